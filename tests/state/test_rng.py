"""P8, trap 7: every generator continues where the snapshot found it."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from reft.device import Vendor
from reft.errors import LayoutError, UnsupportedStateError
from reft.state import codec
from reft.state.blob import capture_rng, restore_rng
from tests.device.conftest import sim, vendor

__all__ = ["sim", "vendor"]


def draw() -> tuple[Any, ...]:
    """One number of every kind that keeps something back (the second Gaussian)."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(2).tolist(),
        torch.randn(3).tolist(),
    )


def test_all_generators_continue_where_they_were() -> None:
    draw()  # leaves a second Gaussian in Python's and NumPy's generators
    state = codec.encode(capture_rng())
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_rng(codec.decode(state))
    assert [draw() for _ in range(3)] == expected


class Tracker:
    """Megatron's tracker: named states, kept as tensors or (for CUDA graphs) as generators."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A module in Megatron's place, since Megatron itself needs a GPU to be imported."""
    tracker = Tracker({})
    module = types.ModuleType("megatron.core.tensor_parallel.random")
    module.get_cuda_rng_tracker = lambda: tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return tracker


def test_trackers_with_tensors_and_generators(megatron: Tracker) -> None:
    generator = torch.Generator().manual_seed(5)
    megatron.states = {"model": torch.get_rng_state(), "graph": generator}
    state = codec.decode(codec.encode(capture_rng()))
    expected = torch.rand(4, generator=generator)
    wanted = megatron.states["model"].clone()
    megatron.states["model"].zero_()
    restore_rng(state)
    assert megatron.states["graph"] is generator
    assert torch.equal(torch.rand(4, generator=generator), expected)
    assert torch.equal(megatron.states["model"], wanted)


def test_unknown_tracker_states_are_refused(megatron: Tracker) -> None:
    megatron.states = {"model": object()}
    with pytest.raises(UnsupportedStateError, match=r"builtins\.object"):
        capture_rng()


def test_a_missing_tracker_is_an_error(megatron: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.states = {"model": torch.get_rng_state()}
    state = capture_rng()
    monkeypatch.delitem(sys.modules, "megatron.core.tensor_parallel.random")
    with pytest.raises(LayoutError, match="tensor_parallel"):
        restore_rng(state)


def test_another_device_is_an_error() -> None:
    state = {**capture_rng(), "device": {"name": "cuda", "state": torch.get_rng_state()}}
    if not torch.cuda.is_available():
        with pytest.raises(LayoutError, match="cuda"):
            restore_rng(state)


def test_a_device_s_generator_goes_on_where_it_was(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.accelerator", raising=False)  # which knows none
    torch.rand(3, device=vendor.type)
    state = codec.decode(codec.encode(capture_rng()))
    drawn = torch.rand(3, device=vendor.type).cpu()
    restore_rng(state)
    assert torch.equal(torch.rand(3, device=vendor.type).cpu(), drawn)
