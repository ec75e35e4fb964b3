"""Features see every version at the same points, whatever they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.grid import VersionId
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CopyEngine, CpuCopyEngine
from reft.snapshot.extension import CopiedVersion, Halt, VersionFeature, VoteResult
from reft.snapshot.gate import Gate
from reft.snapshot.plan import GroupLayout, LiveImages
from reft.snapshot.version import SkipCause
from reft.snapshot.worker import SnapshotWorker
from tests.snapshot.ranks import ALONE, WAIT_SECS, Rank, group_of_one


class Recorded(VersionFeature):
    """Notes every call; refuses one version."""

    name = "recorded"

    def __init__(self, refused_step: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self._refused_step = refused_step

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        self.calls.append(("handed over", label.step))

    def read(self, images: LiveImages, label: VersionId, engine: CopyEngine, gate: Gate) -> None:
        self.calls.append(("read", label.step))

    def inspect(self, version: CopiedVersion) -> SkipCause | None:
        self.calls.append(("inspect", version.label.step))
        return SkipCause("refused") if version.label.step == self._refused_step else None

    def fill(self, version: CopiedVersion) -> None:
        self.calls.append(("fill", version.label.step))

    def compare(self, version: CopiedVersion) -> SkipCause | None:
        self.calls.append(("compare", version.label.step))
        return None

    def exchanged(self, version: CopiedVersion) -> None:
        self.calls.append(("exchanged", version.label.step))

    def committed(self, version: CopiedVersion) -> None:
        self.calls.append(("committed", version.label.step))

    def neutral_ballot(self) -> tuple[int, ...]:
        return 0, 7

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        return int(cause is not None), 7

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        assert numbers[1] == 7
        self.calls.append(("final vote" if result.is_final else "first vote", result.label.step))
        return Halt("refused", restarts=True) if result.is_final and numbers[0] else None


ORDER = [
    "handed over",
    "read",
    "first vote",
    "inspect",
    "fill",
    "compare",
    "exchanged",
    "final vote",
]


def run(folder: Path, feature: VersionFeature, steps: int) -> tuple[list[bool], SnapshotWorker]:
    with group_of_one():
        me = Rank(0, folder, ALONE, Copier(CpuCopyEngine(), 2**18), feature)
        committed = me.take_next(steps)
        me.worker.close(WAIT_SECS)
    return committed, me.worker


def test_a_feature_is_called_at_every_point_of_a_version(tmp_path: Path) -> None:
    feature = Recorded()
    committed, _ = run(tmp_path, feature, 2)
    assert committed == [True, True]
    # The first version also votes on its layout, and is copied again under it.
    second = [name for name, step in feature.calls if step == 2]
    assert second == [*ORDER, "committed"]


def test_p3_what_a_feature_refuses_is_not_committed_and_may_halt_the_job(tmp_path: Path) -> None:
    feature = Recorded(refused_step=2)
    committed, worker = run(tmp_path, feature, 3)
    assert committed == [True, False, True]
    assert [name for name, step in feature.calls if step == 2] == ORDER
    assert worker.votes.halt == Halt("refused", restarts=True)


@pytest.mark.parametrize("method", ["committed", "ballot"])
def test_p6_an_error_of_a_feature_does_not_reach_training(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = Recorded()

    def fail(*args: object) -> None:
        raise KeyError("a mistake")

    with monkeypatch.context() as patch, group_of_one():
        me = Rank(0, tmp_path, ALONE, Copier(CpuCopyEngine(), 2**18), feature)
        patch.setattr(feature, method, fail)
        during = me.take_next(1)
        patch.undo()
        after = me.take_next(2)
        me.worker.close(WAIT_SECS)
    assert during == [method == "committed"], "a rank that cannot report its state votes no"
    assert after == [True, True]


@pytest.mark.parametrize("delays", [True, False])
def test_p6_training_knows_that_votes_lag_behind_a_feature(
    tmp_path: Path, delays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to stop then names a later step, which no rank has passed."""
    feature = Recorded()
    monkeypatch.setattr(feature, "delays_votes", lambda numbers: delays)
    _, worker = run(tmp_path, feature, 2)
    assert worker.votes.late == delays
