"""How several ranks measure their versions and agree on a rate, on a clock of the test's: a simulation."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reft.engine.rates import RateCache, dividing
from reft.naming import Label
from reft.policy.rate import Due, Pairs, TierRate
from reft.snapshot.version import Stage, Version
from reft.snapshot.worker import SnapshotRequest


class SimulatedRanks:
    """Steps of a second, longer while a version is under way; the longest request holds from the step after
    the next on, as in the votes. ``ranks``: each with its own noise. ``noise``: standard deviation of a
    step. ``config``: of every rank."""

    def __init__(self, ranks: int = 2, noise: float = 0.0, **config: Any) -> None:
        self.now, self.step, self.cost, self.commit_secs = 0.0, 0, 0.01, 0.4
        self.rates = [TierRate(0.03, clock=lambda: self.now, **config) for _ in range(ranks)]
        self._noise, self._rng = noise, random.Random(1)
        self._agreed, self._due = [1, 1, 1], Due(0)
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
            request = SnapshotRequest(Label(1, self.step), None) if due else None
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
    assert ranks.rates[0].costs == pytest.approx({"step_secs": 1.0, "cost_secs": 0.01, "arrival_secs": 0.4})
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
        training = threading.Thread(target=ranks.rates[0].step, args=(ranks.step + 1, 1.0), daemon=True)
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
    assert [fits(k) for k in (1, 2, 3, 4, 5, 6, 7, 12, 13, 25)] == [1, 2, 3, 4, 6, 6, 12, 12, 24, 36]
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
    parts += [v for part in parts if isinstance(part, Pairs) for v in vars(part).values()]
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
