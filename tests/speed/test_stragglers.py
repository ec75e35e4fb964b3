"""A slow rank, node or link is named among its equals; nothing else is, whatever the machine is busy with."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from math import exp

import pytest

from reft.speed.reports import Kind
from reft.speed.sequential import Limits, SlowTest, threshold_for
from reft.speed.stragglers import SpeedWatch

from .fleet import RANKS, Parts, parts, recorded, tell


def noisy(rank: int, secs: float, *, slow_from: int = 10**9, factor: float = 1.2) -> Callable[[int], Parts]:
    """Computing with Laplace noise of three percent, always the same."""

    def of(step: int) -> Parts:
        source = random.Random(1000 * step + rank)
        noise = source.expovariate(33.0) - source.expovariate(33.0)
        return parts(secs * exp(noise) * (factor if step >= slow_from else 1.0))

    return of


def test_a_rank_that_is_slower_by_a_fifth_is_named_within_20_steps() -> None:
    watch = SpeedWatch()
    ranks = {at: noisy(i, 0.04, slow_from=100 if at == (1, 1, 0) else 10**9) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), ranks)
    assert watch.slow() == ()
    tell(watch, range(100, 120), ranks)
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks) == (Kind.RANK, "rank 3 (node3)", (3,))
    assert abs(named.since_step - 100) <= 3
    assert named.factor == pytest.approx(1.2, rel=0.05)
    assert named.cost_secs == pytest.approx(0.008, rel=0.3)
    assert named.cost_share == pytest.approx(0.08, rel=0.3)
    assert "it costs the job up to" in str(named)
    # As quick as the others again, it is named no more.
    well = {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(120, 170), well)
    assert watch.slow() == ()


def test_a_stage_that_has_more_to_do_is_not_slow() -> None:
    watch = SpeedWatch()
    tell(watch, range(1, 300), {at: noisy(i, 0.02 if at[0] else 0.06) for i, at in enumerate(RANKS)})
    assert watch.slow() == ()
    assert {s.rank: round(s.compute_secs, 2) for s in watch.speeds()} == {0: 0.06, 1: 0.06, 2: 0.02, 3: 0.02}


def test_one_replica_has_no_equals() -> None:
    watch = SpeedWatch()
    tell(watch, range(1, 200), {(pp, 0, 0): noisy(pp, 0.02 * (1 + pp)) for pp in (0, 1)})
    assert watch.slow() == ()
    assert len(watch.speeds()) == 2


def test_no_rank_is_named_in_1000_recorded_steps_of_a_busy_machine() -> None:
    steps = list(recorded())
    assert len(steps) > 990

    def of(at: tuple[int, int, int], step: int) -> Parts:
        _, whole, ranks = known[step]
        return parts(ranks[at][0], whole=whole, busy=ranks[at][1])

    known = {step: (step, whole, ranks) for step, whole, ranks in steps}
    watch, named = SpeedWatch(), []
    numbers = sorted(known)
    for first in range(numbers[0], numbers[-1] - 8, 8):
        chunk = range(first, first + 8)
        if all(step in known for step in chunk):
            tell(watch, chunk, {at: partial(of, at) for at in RANKS})
            named += [str(s) for s in watch.slow()]
    assert named == []


def test_a_busy_machine_does_not_hide_who_is_slower_by_a_third() -> None:
    """In most of the recorded steps, whenever it begins: named within 30 steps, and never its peer."""
    steps = list(recorded())
    named, others, cases = 0, 0, 0
    for start in range(100, 900, 50):
        for pp in (0, 1):
            mine, peer = (SlowTest(Limits(threshold=threshold_for(4))) for _ in range(2))
            for step, whole, ranks in steps[: start + 30]:
                slower = 4 / 3 if step >= steps[start][0] else 1.0
                ratio = slower * ranks[pp, 0, 0][0] / ranks[pp, 1, 0][0]
                mine.see(step, ratio, whole)
                peer.see(step, 1 / ratio, whole)
            cases += 1
            named += mine.since_step is not None
            others += peer.since_step is not None
    assert others == 0
    assert named >= 0.9 * cases


def test_the_stated_rate_of_false_alarms_is_kept() -> None:
    """Independent noise: less than one name in exp(threshold) steps, for a threshold at which that shows."""
    source, threshold = random.Random(5), 4.0
    alarms, steps = 0, 40_000
    test = SlowTest(Limits(threshold=threshold, least_steps=1, least_secs=0.0))
    for step in range(steps):
        noise = source.expovariate(5.0) - source.expovariate(5.0)
        if test.see(step, exp(noise), 1.0) and test.since_step is not None:
            alarms += 1
            test = SlowTest(Limits(threshold=threshold, least_steps=1, least_secs=0.0))
    assert alarms <= steps / exp(threshold)
    assert threshold_for(8, 1e6) > threshold_for(4, 1e6) > 15


def test_a_burst_is_no_slowness() -> None:
    watch = SpeedWatch()
    ranks = {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), ranks)
    tell(watch, range(100, 107), ranks | {RANKS[0]: noisy(0, 0.12)})
    tell(watch, range(107, 140), ranks)
    assert watch.slow() == ()


def test_a_node_of_which_all_trainers_are_slow_is_named_as_one() -> None:
    watch = SpeedWatch()
    places = [(0, dp, 0) for dp in range(6)]
    ranks = {at: noisy(i, 0.06 if i in (2, 3) else 0.04) for i, at in enumerate(places)}
    tell(watch, range(1, 100), ranks, node=lambda rank: f"host{rank // 2}")
    (named,) = watch.slow()
    assert (named.kind, named.name, named.ranks, named.nodes) == (Kind.NODE, "host1", (2, 3), ("host1",))


def test_tensor_parallel_peers_wait_for_each_other_and_are_named_together() -> None:
    watch = SpeedWatch()
    places = [(0, dp, tp) for dp in range(3) for tp in range(2)]
    ranks = {at: noisy(i, 0.06 if at[1] == 1 else 0.04) for i, at in enumerate(places)}
    tell(watch, range(1, 100), ranks)
    (named,) = watch.slow()
    assert (named.name, named.ranks) == ("one of ranks 2, 3", (2, 3))


def test_a_slow_link_is_told_from_a_stage_that_waits() -> None:
    watch = SpeedWatch()

    def of(at: tuple[int, int, int], step: int) -> Parts:
        slow = 0.004 if at[1] == 1 else 0.0005
        # The first stage waits long for the second; whoever comes last sees what the bytes take.
        return parts(0.03, next=0.02) if at[0] == 0 else parts(0.03, previous=slow)

    tell(watch, range(1, 60), {at: partial(of, at) for at in RANKS})
    (named,) = watch.slow()
    assert (named.kind, named.name) == (Kind.LINK, "rank 1 (node1) - rank 3 (node3)")
    assert named.factor == pytest.approx(8.0, rel=0.1)
    assert named.cost_secs == pytest.approx(8 * 0.0035, rel=0.1)


def test_a_rank_that_has_no_core_for_long_is_named_by_dlrovers_rule() -> None:
    watch = SpeedWatch()
    ranks = {at: (lambda step: parts(0.02)) for at in RANKS}
    ranks[RANKS[1]] = lambda step: parts(0.02, busy=0.03)
    tell(watch, range(1, 99), ranks)
    assert watch.slow() == ()
    tell(watch, range(99, 110), ranks)
    (named,) = watch.slow()
    assert (named.ranks, named.since_step) == ((1,), 1)
    assert named.why == "its processor is busy with something else"
    assert named.cost_secs == pytest.approx(0.03)


def test_a_job_that_goes_back_or_starts_again_is_looked_at_anew() -> None:
    watch = SpeedWatch()
    slow = {at: noisy(i, 0.06 if i == 0 else 0.04) for i, at in enumerate(RANKS)}
    well = {at: noisy(i, 0.04) for i, at in enumerate(RANKS)}
    tell(watch, range(1, 100), slow)
    assert [s.ranks for s in watch.slow()] == [(0,)]
    tell(watch, range(50, 60), well, pid=8)
    assert watch.slow() == ()
    tell(watch, range(20, 120), slow, pid=8)
    assert [s.ranks for s in watch.slow()] == [(0,)], "steps that are made again count"
