"""The storm sees what it has to see, and a short one passes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

import reft
from benchmarks.job_events import History
from tests.attack.storm import Storm, main
from tests.attack.storm_attacks import ATTACKS
from tests.attack.storm_job import SETUPS, Chapter, StormCluster, Verdict, judge
from tests.faults.job import Scratch
from tests.job.cluster import SCRIPTS

REFERENCE = {step: float(step).hex() for step in range(1, 31)}


class Written:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._lives = 0
        self._time = 0.0

    def life(
        self, steps: range, committed: int = 0, restored: tuple[int, str] | None = None
    ) -> None:
        self._lives += 1
        self.write(
            "attached", incarnation=self._lives, node="node0", coordinate="(0, 0, 0)", tolerance=1
        )
        if restored is not None:
            self.write("restored", version=restored[0], source=restored[1])
        for step in steps:
            self.write("step", step=step, loss_hex=REFERENCE[step])
        if committed:
            self.write("commit", step=committed)

    def judge(self, restored: int = 0) -> Verdict:
        chapter = Chapter(self.directory, restored)
        return judge([(chapter, History.of(self.directory))], REFERENCE)

    def write(self, event: str, **fields: object) -> None:
        self._time += 1.0
        line = json.dumps({"event": event, "time": self._time, "rank": 0, **fields})
        with (self.directory / f"reft-0-{1000 + self._lives}.jsonl").open("a") as file:
            file.write(line + "\n")


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "events")


def test_p3_a_commit_that_is_lost_is_seen(written: Written) -> None:
    written.life(range(1, 10), committed=8)
    written.life(range(9, 12), committed=11, restored=(8, "memory"))
    written.life(range(11, 13), restored=(10, "memory"))
    verdict = written.judge()
    assert verdict.problems == ("resumed from step 10 (memory), but step 11 had been committed",)
    assert [r.version for r in verdict.recoveries] == [8, 10]
    assert verdict.losses == 9 + 3 + 2


def test_p1_a_loss_that_differs_is_seen_though_the_step_is_done_again(written: Written) -> None:
    written.life(range(1, 4))
    written.write("step", step=4, loss_hex=(4.5).hex())
    written.life(range(4, 6), restored=(3, "memory"))
    (problem,) = written.judge().problems
    assert problem.startswith("step 4: losses")


def test_p3_a_job_that_began_anew_without_its_commits_is_seen(written: Written) -> None:
    written.life(range(1, 10), committed=8)
    written.life(range(1, 10))
    (problem,) = written.judge().problems
    assert "step 0 (none), but step 8" in problem


def test_p5_the_first_life_without_memory_goes_on_from_the_newest_whole_checkpoint(
    written: Written,
) -> None:
    written.life(range(11, 15), restored=(10, "disk"))
    assert written.judge(restored=10).problems == ()
    (problem,) = written.judge(restored=20).problems
    assert problem.startswith("without memory, step 20 had to come from disk")


def test_a_loss_that_nothing_can_be_compared_with_is_seen(written: Written) -> None:
    written.life(range(1, 31))
    written.write("step", step=31, loss_hex=(1.0).hex())
    (problem,) = written.judge().problems
    assert "undisturbed run has none" in problem


def test_every_kind_comes_before_any_comes_twice(tmp_path: Path) -> None:
    kinds = list(ATTACKS.values())
    storm = Storm(Scratch(tmp_path, tmp_path), Random(1), kinds, steps=1, most=1)
    drawn = [storm.draw(SETUPS[0], True).name for _ in kinds]
    assert sorted(drawn) == sorted(ATTACKS)


def test_setups_differ_and_their_schemes_are_possible() -> None:
    assert len({s.name for s in SETUPS}) == len(SETUPS) >= 6
    for setup in SETUPS:
        assert reft.ReftConfig(**setup.block(Path("/checkpoints"))).enabled


@pytest.mark.process
def test_a_node_of_the_storm_comes_back_as_the_job_that_it_was(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    cluster = StormCluster(
        command=[str(SCRIPTS / "light.py"), "wait", "plain"],
        directory=tmp_path,
        nodes=1,
        env={"TEST_EVENTS": str(tmp_path / "events")},
    )

    def lives(number: int) -> bool:
        return len(list((tmp_path / "events").glob("worker-*.jsonl"))) >= number

    with cluster:
        cluster.start()
        cluster.wait_until(lambda: lives(1), 120, "the first life")
        cluster.cut_power(rendezvous=True)
        cluster.come_back()
        cluster.wait_until(lambda: lives(2), 120, "the second life")
        assert cluster.log(0).count("reft [local/launcher node0] round 1, start") == 2


@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_p3_a_short_storm_breaks_no_promise(tmp_path: Path) -> None:
    target = tmp_path / "storm.json"
    arguments = ["--seed", "7", "--secs", "0", "--least", "4", "--attacks", "4", "--steps", "300"]
    kinds = ["kill-trainer", "kill-launcher", "kill-nodes", "cut-power", "flip-bits-dark"]
    code = main(
        [*arguments, "--setups", "dp2-arc-persist", "--kinds", *kinds, "--json", str(target)]
    )
    summary = json.loads(target.read_text())
    assert code == 0, summary["problems"]
    assert summary["attacks"] >= 4
    assert summary["losses_compared"] > 0
