"""How several ranks measure their versions and agree on a rate, on a clock of the test's: a simulation."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sized
from functools import partial
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest

from reft.grid import Coordinate, Degrees, Topology, VersionId
from reft.node.history import STARTED, note
from reft.policy.rate import (
    DueSteps,
    IntervalController,
    OverheadEstimator,
    StorageIntervalController,
    whole_interval,
)
from reft.policy.rates import RateCache, dividing, learned_risk
from reft.snapshot.version import Stage, Version
from reft.snapshot.worker import SnapshotRequest


class SimulatedRanks:
    """Steps of a second, longer while a version is under way; the longest request holds from the step after
    the next on, as in the votes. ``ranks``: each with its own noise. ``noise``: standard deviation of a
    step. ``config``: of every rank."""

    def __init__(self, ranks: int = 2, noise: float = 0.0, **config: Any) -> None:
        self.now, self.step, self.cost, self.commit_secs = 0.0, 0, 0.01, 0.4
        self.rates = [
            IntervalController(0.03, clock=lambda: self.now, **config) for _ in range(ranks)
        ]
        self._noise, self._rng = noise, random.Random(1)
        self._agreed, self._due = [1, 1, 1], DueSteps(0)
        self._under_way: list[tuple[SnapshotRequest, float]] = []
        self.taken: list[int] = []

    def run(self, steps: int) -> float:
        """Returns the overhead of versions that take no longer than a step, as a part of the time without."""
        before = len(self.taken)
        for _ in range(steps):
            self.step += 1
            secs = 1.0 + self.cost * bool(self._under_way)
            self.now += secs
            self._commit()
            for rate in self.rates:
                rate.step(self.step, secs + abs(self._rng.gauss(0, self._noise)))
            due = self._due.is_due(self.step, self._agreed[0])
            request = SnapshotRequest(VersionId(1, self.step), None) if due else None
            if request is not None:
                for rate in self.rates:
                    rate.begun(request.label.step, request.done.is_set)
                self.taken.append(self.step)
                self._under_way.append((request, self.now + self.commit_secs))
            self._agreed = [*self._agreed[1:], max(rate.wanted_interval() for rate in self.rates)]
        return (len(self.taken) - before) * self.cost / steps

    def _commit(self) -> None:
        for request, until in list(self._under_way):
            if until <= self.now:
                # The worker tells of the commit at its own time.
                now, self.now = self.now, until
                for rate in self.rates:
                    rate.arrived(request.label.step)
                self.now = now
                self._under_way.remove((request, until))
                request.follow(Version(request.label, stage=Stage.COMMITTED), done=True)

    @property
    def wanted_interval(self) -> int:
        return max(rate.wanted_interval() for rate in self.rates)


def test_the_first_steps_are_a_profile_and_then_algorithm_1_decides() -> None:
    ranks = SimulatedRanks()
    assert ranks.rates[0].to_json()["why"] == "the first steps are being measured"
    ranks.run(60)
    assert ranks.rates[0].costs == pytest.approx(
        {"step_secs": 1.0, "cost_secs": 0.01, "arrival_secs": 0.4}
    )
    assert ranks.wanted_interval == 1
    assert ranks.rates[0].to_json()["overhead"] == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize(("commit_secs", "interval_steps"), [(0.4, 1), (2.6, 3), (5.6, 6)])
def test_what_is_committed_late_is_taken_less_often_so_that_the_bound_on_lost_steps_holds(
    commit_secs: float, interval_steps: int
) -> None:
    """k Ti + To >= Tc + Ts: one is committed before the next is taken. 50 steps are profile enough."""
    ranks = SimulatedRanks()
    ranks.commit_secs = commit_secs
    for steps in (50, 250):
        ranks.run(steps)
        assert ranks.rates[0].costs is not None
        assert ranks.wanted_interval == interval_steps
    told = ranks.rates[0].to_json()
    assert told["lost_most"] <= told["most_lost_steps"]


def test_the_overhead_is_held_when_another_job_loads_the_link_and_the_rate_comes_back() -> None:
    ranks = SimulatedRanks(noise=0.02)
    assert ranks.run(1000) <= 0.03
    assert ranks.wanted_interval == 1
    ranks.cost = 0.3
    ranks.run(400)  # until it is noticed: steps have become slower
    assert ranks.run(2000) <= 0.03 * 1.1
    loaded = ranks.wanted_interval
    assert 9 <= loaded <= 14
    ranks.cost = 0.01
    ranks.run(3000)
    assert ranks.wanted_interval == 1


def test_p6_training_does_not_wait_until_what_was_measured_is_kept() -> None:
    """It is written to a file by the thread that asks for the request; a step ends meanwhile."""
    ended = []

    def keep(interval_steps: int) -> None:
        training = threading.Thread(
            target=ranks.rates[0].step, args=(ranks.step + 1, 1.0), daemon=True
        )
        training.start()
        training.join(30)
        ended.append(not training.is_alive())

    ranks = SimulatedRanks(ranks=1, on_change=keep)
    ranks.run(100)
    assert ended
    assert all(ended)


def test_slower_steps_are_looked_into_before_the_next_look_is_due() -> None:
    ranks = SimulatedRanks()
    ranks.run(1100)  # the last look was at step 1024, the next is due at 1536
    ranks.cost = 0.3
    ranks.run(150)
    assert ranks.wanted_interval == 10


def test_where_no_step_is_without_a_version_some_are_made_so_now_and_then() -> None:
    """Rarely: in one of ten steps at most."""
    ranks = SimulatedRanks()
    ranks.run(100)
    before = len(ranks.taken)
    ranks.run(2048)
    assert 0.9 * 2048 < len(ranks.taken) - before < 2048


def test_what_may_be_noise_asks_for_no_longer_interval() -> None:
    ranks = SimulatedRanks(noise=0.3)
    ranks.cost = 0.0
    ranks.run(5000)
    assert ranks.wanted_interval <= 4


@pytest.mark.parametrize("most", [4, 6, 20])
def test_the_bound_on_rolled_back_steps_is_kept_whatever_it_costs(most: int) -> None:
    ranks = SimulatedRanks(most_steps=most // 2)
    ranks.cost = 2.0
    ranks.run(1500)
    gaps = {b - a for a, b in zip(ranks.taken, ranks.taken[1:], strict=False)}
    assert max(gaps) == most // 2
    told = ranks.rates[0].to_json()
    assert told["lost_most"] <= told["most_lost_steps"] <= most
    assert "the bound on lost steps" in told["why"]
    assert ranks.rates[0].wanted_interval(windows=50) == most // 2


def test_a_fixed_interval_on_storage_finds_a_version_whenever_one_is_due() -> None:
    fits = dividing(12)
    assert [fits(k) for k in (1, 2, 3, 4, 5, 6, 7, 12, 13, 25)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        12,
        12,
        24,
        36,
    ]
    assert dividing(0)(7) == 7
    ranks = SimulatedRanks(fits=fits)
    ranks.cost = 0.14
    ranks.run(1500)
    assert ranks.wanted_interval == 6
    assert set(range(204, 1500, 12)) <= set(ranks.taken)


def test_p9_nothing_grows() -> None:
    ranks = SimulatedRanks(ranks=1)
    ranks.commit_secs = float("inf")
    ranks.run(3000)
    parts = [*vars(ranks.rates[0]).values()]
    parts += [
        v for part in parts if isinstance(part, OverheadEstimator) for v in vars(part).values()
    ]
    held = [v for v in parts if isinstance(v, Sized)]
    assert sum(map(len, held)) <= 400


# -- what an earlier start has measured ------------------------------------------------------------------

FACTS = {"shapes": "a model", "degrees": [2, 2, 1], "device": "cpu"}


def test_the_next_start_of_the_same_needs_no_profile(tmp_path: Path) -> None:
    cache = RateCache(tmp_path, FACTS)
    first = SimulatedRanks(ranks=1, on_change=partial(cache.note, "memory"))
    first.cost = 0.3
    first.run(300)
    assert first.wanted_interval == 10
    again = RateCache(tmp_path, dict(reversed(FACTS.items()))).known.memory
    assert again == 10
    second = SimulatedRanks(ranks=1, known=again)
    second.run(20)
    assert second.taken == [1, 2, 3, 4, 10, 20]  # before the first vote is heard, every step
    assert second.rates[0].to_json()["why"] == "measured by an earlier start"
    assert RateCache(tmp_path, FACTS | {"device": "a faster one"}).known.memory is None
    assert cache.known.storage is None


@pytest.mark.parametrize("content", ["", "{", "[]", "half", "negative", "type"])
def test_a_cache_that_cannot_be_used_is_ignored_with_one_line(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RateCache(tmp_path, FACTS)
    cache.note("memory", 10)
    whole = json.loads(cache.path.read_text())
    changed: dict[str, Any] = {
        "half": cache.path.read_text()[:10],
        "negative": json.dumps(whole | {"memory": 0}),
        "type": json.dumps(whole | {"memory": "soon"}),
    }
    cache.path.write_text(changed.get(content, content))
    again = RateCache(tmp_path, FACTS)
    assert again.known.memory is None
    assert len(caplog.records) == 1
    assert "is ignored" in caplog.text
    again.note("memory", 10)
    assert RateCache(tmp_path, FACTS).known.memory == 10
    assert [path.name for path in tmp_path.iterdir()] == [cache.path.name]


def test_p6_a_directory_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RateCache(tmp_path / "gone", FACTS)
    for steps in (1, 2):
        cache.note("memory", steps)
    assert len(caplog.records) == 1


class SimulatedJob:
    """Steps of a second, which are slower while a version is being written. ``mtbf_secs``: of memory.
    ``carried_secs``: by it, with a wanted probability. ``every``: steps between two snapshots."""

    def __init__(
        self,
        *,
        mtbf_secs: float = 600.0,
        carried_secs: float = inf,
        every: int = 1,
        **config: Any,
    ) -> None:
        self.now, self.step, self.every = 0.0, 0, every
        self.written: list[int] = []
        self.wrote: list[int] = []
        self.slowdown, self.write_secs = 1.1, 4.0
        self.under_way: tuple[VersionId, float] | None = None
        self.rate = StorageIntervalController(
            0.035,
            interval_steps=every,
            risk=lambda: (mtbf_secs, carried_secs),
            clock=lambda: self.now,
            **config,
        )
        self.overheads: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            secs = self.slowdown if self.under_way else 1.0
            self.now += secs
            self.rate.step(self.step, secs)
            if self.step % self.every:
                continue
            if self.under_way and self.now >= self.under_way[1]:
                self.written.append(self.under_way[0].step)
                self.under_way = None
                self.rate.answered({"persisted": [1, self.written[-1]], "failing": False})
            before = self.rate.rate
            due = self.rate.committed(VersionId(1, self.step), self.rate.wanted_interval())
            if self.rate.rate is not before:
                self.overheads.append(self.rate.rate.overhead or 0.0)
            if due and not self.under_way:
                self.under_way = VersionId(1, self.step), self.now + self.write_secs
                self.wrote.append(self.step)


@pytest.mark.parametrize(
    ("epoch_steps", "first"), [(0, 50), (100_000, 50), (4_000, 40), (2_999, 29), (100, 7)]
)
def test_first_it_is_measured_without_checkpoints(epoch_steps: int, first: int) -> None:
    """As CheckFreq does: 1 % of an epoch, at most 50 iterations; at least as many as measure something."""
    job = SimulatedJob(epoch_steps=lambda: epoch_steps)
    job.run(200)
    assert job.wrote[0] == first
    assert job.rate.to_json()["overhead"] is not None


def test_in_a_short_epoch_the_profile_of_memory_is_short_too() -> None:
    def profiled(epoch_steps: int) -> int:
        ranks = SimulatedRanks(epoch_steps=lambda: epoch_steps)
        ranks.commit_secs = 5.6  # few versions can be compared in 50 steps
        while ranks.rates[0].costs is None:
            ranks.run(1)
        return ranks.step

    assert profiled(1_000) < profiled(4_000) < profiled(0) <= 60


def test_versions_come_back_soon_after_a_load_that_made_writing_slow() -> None:
    job = SimulatedJob()
    job.run(600)
    alone = job.rate.wanted_interval()
    job.write_secs = 200.0
    job.run(6000)
    assert job.rate.wanted_interval() >= 200, "one is written before the next is taken"
    job.write_secs, written = 4.0, len(job.written)
    while job.rate.wanted_interval() > 2 * alone:
        job.run(10)
        assert len(job.written) - written <= 20


def test_the_overhead_is_held_when_another_job_loads_the_disk_simulated() -> None:
    """And the rate comes back when that ends."""
    job = SimulatedJob()
    job.run(600)
    alone = job.rate.wanted_interval()
    job.slowdown, job.write_secs = 1.4, 30.0
    job.run(4000)
    loaded, overheads = job.rate.wanted_interval(), job.overheads[-3:]
    assert loaded >= 4 * alone
    assert all(0 < o <= 0.035 for o in overheads)
    assert job.rate.to_json()["why"]
    job.slowdown, job.write_secs = 1.1, 4.0
    job.run(20 * loaded)
    assert job.rate.wanted_interval() <= loaded // 2
    assert job.overheads[-1] <= 0.035


@pytest.mark.parametrize(
    ("goals", "interval", "why"),
    [
        ({"most_lost_steps": 90}, 45, "bounded by max_lost_steps"),
        # Memory alone carries the job with the wanted probability for 70 steps of a second.
        ({"carried_secs": 70.0}, 70, "wanted probability"),
    ],
)
def test_where_memory_never_fails_nothing_but_the_goals_make_it_write(
    goals: dict[str, float], interval: int, why: str
) -> None:
    job = SimulatedJob(mtbf_secs=inf, **goals)
    job.run(400)
    assert job.rate.wanted_interval() == interval
    assert job.rate.to_json()["most_lost_steps"] == 2 * interval
    assert why in job.rate.to_json()["why"]


def test_the_bound_on_lost_steps_is_kept_from_the_first_version_on() -> None:
    job = SimulatedJob(most_lost_steps=21, every=4)
    job.slowdown = 3.0
    job.run(600)
    assert {b - a for a, b in zip(job.wrote, job.wrote[1:], strict=False)} | {job.wrote[0]} == {8}
    assert job.rate.to_json()["overhead"] > 0.035  # which the bound does not allow to be held


def test_a_failing_storage_teaches_nothing() -> None:
    job = SimulatedJob()
    job.run(49)
    job.write_secs = inf
    job.run(500)
    before = job.rate.wanted_interval()
    job.rate.answered({"persisted": None, "failing": True})
    job.rate.answered({"persisted": [1, 500], "failing": False})
    job.run(1)
    assert job.rate.wanted_interval() == before == 50


def test_when_memory_overtakes_what_is_to_be_written_fewer_are_asked_for() -> None:
    """Storage was still busy when it was due, so no version of this rate would ever be written."""
    job = SimulatedJob(most_lost_steps=300)
    job.run(55)
    answer = {"persisted": None, "failing": True, "overtaken": [1, 50]}
    job.rate.answered(answer)
    job.rate.answered(answer)
    assert job.rate.wanted_interval() == 100  # once for each
    assert "newer versions" in job.rate.to_json()["why"]
    job.rate.answered(answer | {"overtaken": [1, 100]})
    assert job.rate.wanted_interval() == 150  # the bound
    job.under_way = None
    job.run(3000)
    assert job.rate.wanted_interval() < 150  # and back, when storage keeps up again


def test_a_version_that_storage_never_began_with_teaches_nothing() -> None:
    """The next one is measured from its own commit on."""
    job = SimulatedJob(most_lost_steps=300)
    job.write_secs = inf
    job.run(90)
    job.rate.answered({"persisted": None, "failing": False, "overtaken": [1, 50]})
    job.under_way, job.write_secs = None, 4.0
    job.run(60)
    assert job.rate.costs is not None
    assert job.rate.costs["arrival_secs"] < 10


def test_p6_training_does_not_wait_while_the_history_of_failures_is_read() -> None:
    ended = []

    def read() -> tuple[float, float]:
        training = (
            threading.Thread(target=job.rate.step, args=(1000, 1.0), daemon=True) if ready else None
        )
        if training is not None:
            training.start()
            training.join(30)
            ended.append(not training.is_alive())
        return 600.0, inf

    ready: list[bool] = []
    job = SimulatedJob()
    job.rate._risk = read
    ready.append(True)
    job.run(200)
    assert ended
    assert all(ended)


def test_p9_where_no_daemon_answers_nothing_grows_and_the_decision_is_the_votes() -> None:
    job = SimulatedJob()
    job.write_secs = inf
    job.run(2000)
    assert job.rate.wanted_interval() == 50
    due = [step for step in range(2001, 2101) if job.rate.committed(VersionId(1, step), 30)]
    assert due == [2010, 2040, 2070, 2100]
    held = [value for value in vars(job.rate).values() if isinstance(value, Sized)]
    assert sum(map(len, held)) <= 70


def test_how_often_memory_fails_is_learned_from_the_history(tmp_path: Path) -> None:
    coordinates = tuple(Coordinate(0, dp, 0) for dp in range(4))
    topology = Topology(Degrees(1, 4, 1), coordinates, ("a", "b", "c", "d"))

    def mtbf_secs(tolerance: int = 0) -> float:
        return learned_risk(tmp_path, topology, tolerance, 100.0, None)[0]

    configured = mtbf_secs()
    assert configured == pytest.approx(100 * 86400 / 4)
    for lost in ([], ["b"], ["c"], ["b"]):
        note(
            *(tmp_path, STARTED),
            **{"round": 1, "nodes": ["a", "b", "c", "d"], "failures": [], "joined": []},
            lost=lost,
            newest_step=1,
        )
    assert mtbf_secs() == pytest.approx(configured / 4, rel=0.01)
    assert mtbf_secs(1) > 100 * configured


def test_for_how_long_memory_carries_a_job_is_what_reft_plan_says_of_it(tmp_path: Path) -> None:
    """Three nodes whose memory survives one; one fails in 100 days: 3 q^2 - 2 q^3 = 0.999."""
    coordinates = tuple(Coordinate(0, dp, 0) for dp in range(3))
    topology = Topology(Degrees(1, 3, 1), coordinates, ("a", "b", "c"))
    _, carried = learned_risk(tmp_path, topology, 1, 100.0, 0.999)
    q = exp(-carried / (100 * 86400))
    assert 3 * q**2 - 2 * q**3 == pytest.approx(0.999, abs=1e-9)
    assert learned_risk(tmp_path, topology, 0, 100.0, 0.999)[1] < carried / 10


def test_where_versions_are_rarer_than_asked_for_storage_has_the_next_one() -> None:
    """The ranks may have voted to take every third version only: of 50 steps none but 150 would be due."""
    assert whole_interval(50, 1) == 50
    assert whole_interval(50, 3) == 51
    job = SimulatedJob()
    due = [
        step
        for step in range(3, 160, 3)
        if job.rate.committed(VersionId(1, step), whole_interval(50, 3))
    ]
    assert due == [51, 102, 153]


def test_the_bound_holds_from_what_is_on_storage_also_where_a_start_goes_on_with_another_interval() -> (
    None
):
    """The job has written step 100 and goes on from 131 in memory; it knows an interval of 64."""
    rate = StorageIntervalController(0.035, start_step=100)
    due = [step for step in range(132, 330) if rate.committed(VersionId(2, step), 64)]
    assert due == [164, 192, 256, 320]
