"""Objects that the script gives in ``state={...}`` are part of every version, and restored in place (P8)."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import reft
from reft.engine.host_state import GivenState, HostStates
from reft.errors import ConfigError
from reft.state.codec import decode, encode
from tests.follow.lives import Life, live, mlp, resumed, square


class Counter:
    """Torch's Stateful protocol."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def objects_of(model: nn.Module) -> dict[str, Any]:
    return {
        "ema": copy.deepcopy(model).requires_grad_(False),
        "swa": torch.optim.swa_utils.AveragedModel(model),
        "numpy": np.random.default_rng(3),
        "legacy": np.random.RandomState(4),
        "torch": torch.Generator().manual_seed(5),
        "python": random.Random(6),
        "counter": Counter(),
    }


def script(life: Life, when: str) -> None:
    model = mlp()
    engine = life.initialize(model)
    state = objects_of(model)
    if when == "attach":
        reft.attach(engine, state=state)
    reft.resume(engine, state=state if when == "resume" else None)
    if when == "late":
        reft.attach(engine, state=state)
    state["torch"].manual_seed(
        99
    ) if engine.global_steps and when == "late" else None  # undone where training begins
    while engine.global_steps < life.steps:
        loss = life.train(square)
        state["swa"].update_parameters(model)
        state["counter"].count += 1
        with torch.no_grad():
            for old, new in zip(state["ema"].parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        norms = [sum(p.square().sum() for p in state[name].parameters()) for name in ("ema", "swa")]
        drawn = [state["numpy"].random(), state["legacy"].rand(), state["python"].gauss(0, 1)]
        drawn.append(torch.rand((), generator=state["torch"]))
        life.note(loss, *norms, *drawn, state["counter"].count)


@pytest.mark.integration
@pytest.mark.parametrize("when", ["attach", "resume", "late"])
def test_p8_objects_of_every_kind_continue_where_the_version_was(root: Path, when: str) -> None:
    undisturbed, cut = resumed(root, lambda life: script(life, when), cuts=(3, 6), steps=8)
    assert cut == undisturbed


def gives(given: dict[str, Any], *accept: str) -> Any:
    def run(life: Life) -> None:
        engine = life.initialize(mlp(), accept=accept)
        reft.resume(engine, state=given)
        while engine.global_steps < life.steps:
            life.train(square)

    return run


def test_p12_an_object_of_an_unknown_kind_is_refused_by_name(root: Path) -> None:
    for unknown in ([1, 2], torch.zeros(3), random.SystemRandom(), Counter):
        with pytest.raises(
            ConfigError,
            match=r"state\['mine'\] is of class .*; expected one of: objects with state_dict",
        ):
            live(root, gives({"mine": unknown}), "kinds", 2)


def test_p12_a_state_that_cannot_be_stored_is_refused_at_once(root: Path) -> None:
    counter = Counter()
    counter.count = object()  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"state\['mine'\].* cannot be stored: .*of class builtins.object"
    ):
        live(root, gives({"mine": counter}), "stored", 2)


def test_p12_names_that_a_version_lacks_or_has_too_many_are_said_with_what_to_write(
    root: Path,
) -> None:
    live(root, gives({"a": Counter(), "b": Counter()}), "names", 4, 3)
    with pytest.raises(
        ConfigError,
        match=r'does not hold state.c; it holds state.a, state.b.*"accept_changes": \["state.c"\]',
    ):
        live(root, gives({"a": Counter(), "b": Counter(), "c": Counter()}), "names", 4)
    with pytest.raises(
        ConfigError,
        match=r'holds state.b, which the script has not given. Write .*state=\{"b": \.\.\.\}',
    ):
        live(root, gives({"a": Counter()}), "names", 4)
    live(root, gives({"a": Counter(), "c": Counter()}, "state.b", "state.c"), "names", 4)


@pytest.mark.integration
@pytest.mark.parametrize("when", ["before", "after"])
def test_p8_what_is_drawn_between_two_steps_is_drawn_once(root: Path, when: str) -> None:
    """A batch that a generator makes before its step, without a loader; a number that it draws after the step."""

    def script(life: Life) -> None:
        engine = life.initialize(mlp())
        generator = np.random.default_rng(3)
        reft.resume(engine, state={"generator": generator})
        while engine.global_steps < life.steps:
            x = (
                torch.from_numpy(generator.random((4, 8), np.float32))
                if when == "before"
                else torch.ones(4, 8)
            )
            loss = square(engine(x))
            engine.backward(loss)
            engine.step()
            life.note(loss, 0.0 if when == "before" else generator.random())

    undisturbed, cut = resumed(root, script, cuts=(2, 5), steps=7)
    assert cut == undisturbed


def test_what_the_script_changes_on_purpose_after_a_load_is_captured_again() -> None:
    """Versions hold what was loaded until training goes on: also the generators from which was drawn meanwhile."""
    counter, noise = Counter(), torch.Generator().manual_seed(5)
    states = HostStates([GivenState("counter", counter), GivenState("noise", noise)])
    saved = decode(encode(states.capture()))
    states.restore(saved)
    counter.count, _ = 7, torch.rand(1, generator=noise)
    assert encode(states.capture()) == encode(saved)
    states.recapture()
    again = states.capture()
    counter.count = 0
    states.restore(again)
    assert counter.count == 7
    assert encode(again["state.noise"]) == encode(saved["state.noise"])
