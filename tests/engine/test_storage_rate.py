"""How one rank measures its checkpoints and what it wants, on a clock of the test's: a simulation."""

from __future__ import annotations

import threading
from collections.abc import Sized
from math import exp, inf
from pathlib import Path
from typing import Any

import pytest

from reft.engine.rates import learned_risk
from reft.grid import Coordinate, Degrees, Topology
from reft.naming import Label
from reft.node.report import STARTED, note
from reft.policy.rate import StorageRate, whole_interval


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
        self.under_way: tuple[Label, float] | None = None
        self.rate = StorageRate(
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
            due = self.rate.committed(Label(1, self.step), self.rate.wanted_interval())
            if self.rate.rate is not before:
                self.overheads.append(self.rate.rate.overhead or 0.0)
            if due and not self.under_way:
                self.under_way = Label(1, self.step), self.now + self.write_secs
                self.wrote.append(self.step)


def test_first_it_is_measured_without_checkpoints() -> None:
    """As CheckFreq does: 50 iterations."""
    job = SimulatedJob()
    job.run(200)
    assert job.wrote[0] == 50
    assert job.rate.to_json()["overhead"] is not None


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
        training = threading.Thread(target=job.rate.step, args=(1000, 1.0), daemon=True) if ready else None
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
    due = [step for step in range(2001, 2101) if job.rate.committed(Label(1, step), 30)]
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
    due = [step for step in range(3, 160, 3) if job.rate.committed(Label(1, step), whole_interval(50, 3))]
    assert due == [51, 102, 153]


def test_the_bound_holds_from_what_is_on_storage_also_where_a_start_goes_on_with_another_interval() -> None:
    """The job has written step 100 and goes on from 131 in memory; it knows an interval of 64."""
    rate = StorageRate(0.035, start_step=100)
    due = [step for step in range(132, 330) if rate.committed(Label(2, step), 64)]
    assert due == [164, 192, 256, 320]
