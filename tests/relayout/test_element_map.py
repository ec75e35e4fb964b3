"""Every layout of a small model can be made of every other: each element is written once, and is the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import pytest

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.relayout.element_map import (
    WHOLE,
    ElementMove,
    Parameter,
    RankContents,
    RankLayout,
    plan_layout,
    tensor_name,
)

WIDTH = 4
TIED = "tied_modules.embed.weight"
LAYERS = 4
MIXED = (8, 4, 4)  # lengths of three matrices in one parameter, with all slices
KINDS = ("master", "exp_avg", "exp_avg_sq")
ALL = [
    Degrees(pp, dp, tp)
    for pp, dp, tp in product((1, 2, 4), (1, 2, 3), (1, 2, 4))
    if pp * dp * tp <= 8
]
OF_TWELVE = [Degrees(3, 2, 2), Degrees(2, 3, 2), Degrees(3, 1, 4)]
OF_EIGHT = [Degrees(2, 1, 4), Degrees(4, 2, 1)]
FORMS = ("zero0", "zero0-flat", "zero1")


def whole_model() -> dict[str, tuple[tuple[int, ...], int, int | None]]:
    model: dict[str, tuple[tuple[int, ...], int, int | None]] = {TIED: ((8, 3), 0, 0)}
    for layer in range(LAYERS):
        model[f"{layer}.norm"] = ((5,), WHOLE, 1)
        model[f"{layer}.up"] = ((8, 3), 0, 0)
        model[f"{layer}.qkv"] = ((2, 4, 3), 1, 0)
        model[f"{layer}.mixed"] = ((16, 2), 0, 0)
        model[f"{layer}.down"] = ((3, 8), 1, 0)
        model[f"{layer}.fixed"] = ((2,), WHOLE, None)
    return model


def stage_of(name: str, pp: int) -> set[int]:
    return {0, pp - 1} if name == TIED else {int(name.split(".", maxsplit=1)[0]) * pp // LAYERS}


def layout_of(degrees: Degrees, form: str, known: bool = True) -> RankLayout:
    held = {}
    for pp, tp in product(range(degrees.pp), range(degrees.tp)):
        names = {n: v for n, v in whole_model().items() if pp in stage_of(n, degrees.pp)}
        parameters = []
        for name, (shape, split, _) in names.items():
            part = tuple(n // degrees.tp if d == split else n for d, n in enumerate(shape))
            blocks = tuple(n // degrees.tp for n in MIXED) if name.endswith("mixed") else ()
            parameters.append(Parameter(name, part, split if known else None, blocks))
        groups = tuple(tuple(n for n in names if names[n][2] == g) for g in (0, 1))
        sizes = {p.name: p.numel for p in parameters}
        totals = [sum(sizes[n] for n in group) for group in groups]
        parted = tuple(2 * ceil(t / (2 * degrees.dp)) for t in totals) if form == "zero1" else ()
        held[pp, tp] = RankContents(
            tuple(parameters), groups, (KINDS, KINDS), form != "zero0", parted
        )
    return RankLayout(degrees, held)


def truth(kind: str, name: str, tp: int, slices: int) -> np.ndarray:
    """The slice's elements of one kind, each a number of its own in the whole job."""
    shape, split, _ = whole_model()[name]
    first = 1 + 10_000 * list(whole_model()).index(name) + 1_000 * ("model", *KINDS).index(kind)
    whole = np.arange(first, first + prod(shape)).reshape(shape)
    if name.endswith("mixed"):
        matrices = np.split(whole, np.cumsum(MIXED)[:-1], split)
        return np.concatenate([np.split(m, slices, split)[tp] for m in matrices]).reshape(-1)
    return (whole if split == WHOLE else np.split(whole, slices, split)[tp]).reshape(-1)


def state_of(layout: RankLayout, at: Coordinate) -> dict[str, np.ndarray]:
    """The tensors that a rank has, made from the layout's definition and not by the planner."""
    held, slices = layout.held[at.pp, at.tp], layout.degrees.tp
    state = {f"model.{p.name}": truth("model", p.name, at.tp, slices) for p in held.parameters}
    for group, names in enumerate(held.groups):
        for kind in held.kinds[group]:
            each = [truth(kind, name, at.tp, slices) for name in names]
            if not held.flat:
                state |= {tensor_name(kind, group, i): values for i, values in enumerate(each)}
                continue
            flat = np.concatenate([*each, np.zeros(0, int)])
            if held.parted:
                part = held.parted[group]
                flat = np.pad(flat, (0, part * layout.degrees.dp - len(flat)))
                flat = flat[at.dp * part : (at.dp + 1) * part]
            state[tensor_name(kind, group, 0)] = flat
    return state


State = dict[Coordinate, dict[str, np.ndarray]]


def states_of(layout: RankLayout) -> State:
    return {at: state_of(layout, at) for at in layout.degrees.coordinates()}


def made(
    old: State,
    wanted: dict[str, np.ndarray],
    new: RankLayout,
    at: Coordinate,
    moves: tuple[ElementMove, ...],
) -> dict[str, np.ndarray]:
    found = {name: np.full(values.shape, -1) for name, values in wanted.items()}
    written = {name: np.zeros(values.shape, int) for name, values in wanted.items()}
    for move in moves:
        values = old[move.source][move.tensor][move.start : move.start + move.numel]
        assert len(values) == move.numel > 0, f"{move} is beyond what the old rank has"
        assert move.at + move.numel <= len(found[move.target]), (
            f"{move} is beyond what the new rank has"
        )
        found[move.target][move.at : move.at + move.numel] = values
        written[move.target][move.at : move.at + move.numel] += 1
    for zeros in new.held[at.pp, at.tp].paddings(at.dp):
        found[zeros.target][zeros.at : zeros.at + zeros.numel] = 0
        written[zeros.target][zeros.at : zeros.at + zeros.numel] += 1
    assert all((times == 1).all() for times in written.values()), "every element is written once"
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("olds", "news"),
    # Of twelve: three stages of four layers, and replicas and slices of which neither count divides the other.
    [(ALL, ALL), (OF_TWELVE, OF_TWELVE), (OF_TWELVE, OF_EIGHT), (OF_EIGHT, OF_TWELVE)],
    ids=["all", "twelve", "twelve to eight", "eight to twelve"],
)
def test_p3_every_layout_is_made_of_every_other(
    form: str, olds: list[Degrees], news: list[Degrees]
) -> None:
    layouts = {degrees: layout_of(degrees, form) for degrees in (*olds, *news)}
    states = {degrees: states_of(layout) for degrees, layout in layouts.items()}
    for before, after in product(olds, news):
        (old, had), (new, has) = (layouts[before], states[before]), (layouts[after], states[after])
        for at in new.degrees.coordinates():
            found = made(had, has[at], new, at, plan_layout(old, new, at))
            wrong = [name for name, values in has[at].items() if (found[name] != values).any()]
            assert not wrong, (old.degrees, new.degrees, at, wrong)


def renamed(held: RankContents) -> RankContents:
    def name(old: str) -> str:
        return old.replace("1.up", "1.upward")

    parameters = tuple(p._replace(name=name(p.name)) for p in held.parameters)
    return replace(
        held, parameters=parameters, groups=tuple(tuple(map(name, g)) for g in held.groups)
    )


def with_parameter(held: RankContents, name: str, **changes: Any) -> RankContents:
    parameters = tuple(p._replace(**changes) if p.name == name else p for p in held.parameters)
    return replace(held, parameters=parameters)


def changed(layout: RankLayout, change: Callable[[RankContents], RankContents]) -> RankLayout:
    return replace(layout, held={at: change(held) for at, held in layout.held.items()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, "the version alone has 1.up"),
        (
            lambda held: with_parameter(held, "0.norm", shape=(7,)),
            r"0.norm has the shape \[5\] in the version .* and \[7\]",
        ),
        (
            lambda held: replace(held, groups=held.groups[::-1]),
            "is in the optimizer's group 0 .* and in group 1",
        ),
        (
            lambda held: replace(held, kinds=(("master", "momentum"), KINDS)),
            "exp_avg, exp_avg_sq, master in the version, and in group 0 with master, momentum",
        ),
    ],
)
def test_what_names_do_not_allow_is_refused_by_name(
    change: Callable[[RankContents], RankContents], said: str
) -> None:
    old, new = Degrees(2, 1, 1), Degrees(1, 2, 1)
    with pytest.raises(LayoutError, match=said):
        plan_layout(
            layout_of(old, "zero1"), changed(layout_of(new, "zero1"), change), Coordinate(0, 0, 0)
        )


def test_slices_that_nobody_describes_are_refused_by_name() -> None:
    old, new = Degrees(1, 1, 1), Degrees(1, 1, 2)
    with pytest.raises(
        LayoutError, match=r"not known how tensor slices share tied_modules.*partition_dim"
    ):
        plan_layout(
            layout_of(old, "zero1", known=False),
            layout_of(new, "zero1", known=False),
            Coordinate(0, 0, 0),
        )
    other = changed(layout_of(new, "zero1"), lambda held: with_parameter(held, "2.up", split=1))
    with pytest.raises(LayoutError, match=r"different dimensions, or parts of them, of 2\.up"):
        plan_layout(layout_of(old, "zero1"), other, Coordinate(0, 0, 0))
    one = changed(layout_of(new, "zero1"), lambda held: with_parameter(held, "2.mixed", blocks=()))
    with pytest.raises(LayoutError, match=r"different dimensions, or parts of them, of 2\.mixed"):
        plan_layout(layout_of(old, "zero1"), one, Coordinate(0, 0, 0))
    # Slices that stay what they are need no description.
    same = layout_of(Degrees(1, 2, 2), "zero1", known=False)
    assert plan_layout(same, layout_of(Degrees(2, 1, 2), "zero1", known=False), Coordinate(0, 0, 1))


def test_partitions_that_are_not_the_whole_are_refused() -> None:
    old = layout_of(Degrees(1, 2, 1), "zero1")
    short = changed(old, lambda held: replace(held, parted=(4, 4)))
    with pytest.raises(LayoutError, match="do not make up the whole"):
        plan_layout(short, layout_of(Degrees(1, 1, 1), "zero1"), Coordinate(0, 0, 0))
