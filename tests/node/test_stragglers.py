"""Who is slower than its peers is named soon; noise, bursts and unequal stages are not."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from functools import partial
from math import exp
from pathlib import Path

import pytest

from reft.node.progress import (
    RankSteps,
)
from reft.node.step_clock import StepTimes
from reft.node.stragglers import SlownessKind, SlowTest, SpeedWatch

NOISE = Path(__file__).with_name("noise.csv")
"""1,000 undisturbed steps of two stages with two replicas on two cores, which other work kept busy (load
average 15 to 33): the whole step, and each rank's computing and its wait for a core, in microseconds."""


Place = tuple[int, int, int]


RANKS: tuple[Place, ...] = tuple((pp, dp, 0) for pp in (0, 1) for dp in (0, 1))


Of = Callable[[int], StepTimes]


def took(
    step: int,
    compute: float,
    *,
    whole: float = 0.1,
    busy: float = 0.0,
    previous: float = 0,
    next: float = 0,
) -> StepTimes:
    """Seconds; two milliseconds of transfers, collectives and the optimizer each."""
    return StepTimes(step, whole, compute, busy, 0.002, 0.002, 0.002, previous, next, 8)


def tell(
    watch: SpeedWatch,
    steps: range,
    ranks: dict[Place, Of],
    *,
    node: Callable[[int], str] = "node{}".format,
    pid: int = 7,
) -> None:
    """The watch sees these steps, a few at a time; every rank is a node unless ``node`` says else."""
    for first in range(steps.start, steps.stop, 8):
        seen = range(max(steps.start, first - 16), min(first + 8, steps.stop))
        watch.poll(
            (node(rank), RankSteps(rank, pid, at, tuple(of(step) for step in seen)))
            for rank, (at, of) in enumerate(ranks.items())
        )


def recorded() -> Iterator[tuple[int, float, dict[Place, tuple[float, float]]]]:
    """Step, seconds of it, and by rank the seconds of computing and of waiting for a core."""
    with NOISE.open() as file:
        rows = csv.reader(file)
        next(rows)
        for step, whole, *numbers in rows:
            secs = [int(n) / 1e6 for n in numbers]
            ranks = {at: (secs[2 * i], secs[2 * i + 1]) for i, at in enumerate(RANKS)}
            yield int(step), int(whole) / 1e6, ranks


def noisy(rank: int, secs: float, *, slow_from: int = 10**9) -> Of:
    """Computing with Laplace noise of three percent, always the same; slower by a fifth from a step on."""

    def of(step: int) -> StepTimes:
        source = random.Random(1000 * step + rank)
        noise = source.expovariate(33.0) - source.expovariate(33.0)
        return took(step, secs * exp(noise) * (1.2 if step >= slow_from else 1.0))

    return of


def test_a_rank_that_is_slower_by_a_fifth_is_named_within_20_steps() -> None:
    watch = SpeedWatch()
    ranks = {
        at: noisy(i, 0.04, slow_from=100 if at == (1, 1, 0) else 10**9)
        for i, at in enumerate(RANKS)
    }
    tell(watch, range(1, 100), ranks)
    assert watch.slow() == ()
    tell(watch, range(100, 120), ranks)
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks) == (SlownessKind.RANK, "rank 3 (node3)", (3,))
    assert abs(named.since_step - 100) <= 3
    assert named.factor == pytest.approx(1.2, rel=0.05)
    assert named.cost_secs == pytest.approx(0.008, rel=0.3)
    assert named.cost_share == pytest.approx(0.08, rel=0.3)
    # As quick as the others again, it is named no more.
    tell(watch, range(120, 170), {at: noisy(i, 0.04) for i, at in enumerate(RANKS)})
    assert watch.slow() == ()


def test_only_equals_are_compared() -> None:
    """A stage that has more to do is not slow, and one replica has no equals."""
    watch = SpeedWatch()
    tell(
        watch, range(1, 300), {at: noisy(i, 0.02 if at[0] else 0.06) for i, at in enumerate(RANKS)}
    )
    assert watch.slow() == ()
    assert {s.rank: round(s.compute_secs, 2) for s in watch.speeds()} == {
        0: 0.06,
        1: 0.06,
        2: 0.02,
        3: 0.02,
    }
    alone = SpeedWatch()
    tell(alone, range(1, 200), {(pp, 0, 0): noisy(pp, 0.02 * (1 + pp)) for pp in (0, 1)})
    assert alone.slow() == ()
    assert len(alone.speeds()) == 2


def test_no_rank_is_named_in_1000_recorded_steps_of_a_busy_machine() -> None:
    known = {step: (whole, ranks) for step, whole, ranks in recorded()}
    assert len(known) > 990

    def of(at: Place, step: int) -> StepTimes:
        whole, ranks = known[step]
        return took(step, ranks[at][0], whole=whole, busy=ranks[at][1])

    watch = SpeedWatch()
    for first in range(min(known), max(known) - 8, 8):
        chunk = range(first, first + 8)
        if all(step in known for step in chunk):
            tell(watch, chunk, {at: partial(of, at) for at in RANKS})
            assert watch.slow() == ()


def test_a_busy_machine_does_not_hide_who_is_slower_by_a_third() -> None:
    """In most of the recorded steps, whenever it begins: named within 30 steps, and never its peer."""
    steps = list(recorded())
    named, cases = 0, 0
    for start in range(100, 900, 50):
        for pp in (0, 1):
            mine, peer = SlowTest(4), SlowTest(4)
            for step, whole, ranks in steps[: start + 30]:
                slower = 4 / 3 if step >= steps[start][0] else 1.0
                one, other = slower * ranks[pp, 0, 0][0], ranks[pp, 1, 0][0]
                mine.add(step, one, other, whole)
                peer.add(step, other, one, whole)
            cases += 1
            named += mine.since_step is not None
            assert peer.since_step is None
    assert named >= 0.9 * cases


def test_a_burst_is_no_slowness_and_what_costs_little_is_not_named() -> None:
    watch = SpeedWatch()
    ranks = {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), ranks)
    tell(watch, range(100, 107), ranks | {RANKS[0]: noisy(0, 0.12)})
    tell(watch, range(107, 140), ranks)
    assert watch.slow() == ()
    little = {at: (lambda step: took(step, 0.002)) for at in RANKS}
    little[RANKS[0]] = lambda step: took(step, 0.0025)
    tell(watch, range(140, 240), little)
    assert watch.slow() == ()


def test_ranks_that_are_slow_together_are_named_as_a_node_or_as_tensor_parallel_peers() -> None:
    watch = SpeedWatch()
    ranks = {(0, dp, 0): noisy(dp, 0.06 if dp in (2, 3) else 0.04) for dp in range(6)}
    tell(watch, range(1, 100), ranks, node=lambda rank: f"host{rank // 2}")
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks, named.nodes) == (
        SlownessKind.NODE,
        "host1",
        (2, 3),
        ("host1",),
    )
    watch = SpeedWatch()
    places = [(0, dp, tp) for dp in range(3) for tp in range(2)]
    tell(
        watch,
        range(1, 100),
        {at: noisy(i, 0.06 if at[1] == 1 else 0.04) for i, at in enumerate(places)},
    )
    (named,) = watch.slow()
    assert (named.name, named.ranks) == ("one of ranks 2, 3", (2, 3))


def test_a_slow_link_is_told_from_a_stage_that_waits() -> None:
    watch = SpeedWatch()

    def of(at: Place, step: int) -> StepTimes:
        slow = 0.004 if at[1] == 1 else 0.0005
        # The first stage waits long for the second; whoever comes last sees what the bytes take.
        return took(step, 0.03, next=0.02) if at[0] == 0 else took(step, 0.03, previous=slow)

    tell(watch, range(1, 60), {at: partial(of, at) for at in RANKS})
    (named,) = watch.slow()
    assert (named.kind, named.name) == (SlownessKind.LINK, "rank 1 (node1) - rank 3 (node3)")
    assert named.factor == pytest.approx(8.0, rel=0.1)
    assert named.cost_secs == pytest.approx(8 * 0.0035, rel=0.1)


def test_a_job_that_goes_back_or_starts_again_is_looked_at_anew() -> None:
    watch = SpeedWatch()
    slow = {at: noisy(i, 0.06 if i == 0 else 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), slow)
    assert [s.ranks for s in watch.slow()] == [(0,)]
    tell(watch, range(50, 60), {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}, pid=8)
    assert watch.slow() == ()
    tell(watch, range(20, 120), slow, pid=8)
    assert [s.ranks for s in watch.slow()] == [(0,)], "steps that are made again count"
