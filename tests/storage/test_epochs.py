"""Which versions end an epoch, and which checkpoints are kept for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import reft
import reft.data
from reft.grid import Degrees, VersionId
from reft.snapshot.extension import CopiedVersion, VoteResult
from reft.storage.epochs import EpochEnds, find_epoch_ends
from reft.storage.persisted import PersistedInfo


def checkpoint(step: int, epochs: int | None) -> PersistedInfo:
    label = VersionId(1, step)
    return PersistedInfo(
        Path("/p/job"), f"global_step{step}", "job", label, Degrees(1, 1, 1), 0.0, epochs=epochs
    )


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, []), (1, [20]), (2, [20, 10]), (9, [20, 10])], ids=str
)
def test_the_first_checkpoint_after_each_of_the_newest_epochs_is_kept(
    keep: int, kept: list[int]
) -> None:
    written = [
        *(checkpoint(step, 0) for step in (2, 8)),
        *(checkpoint(step, 1) for step in (10, 12, 18)),
        *(checkpoint(step, 2) for step in (20, 24)),
        checkpoint(25, None),  # Written when the job was stopped
    ]
    assert [info.label.step for info in find_epoch_ends(written, keep)] == kept


class Ranks:
    """Ranks that train and vote; the first reads the data, the last does not."""

    def __init__(self) -> None:
        self.ranks = EpochEnds(), EpochEnds()

    def step(self, step: int, epochs: int | None, *, taken: bool = True) -> bool | None:
        """Make a step; return whether its version ends an epoch, None if it is not taken."""
        for rank, known in zip(self.ranks, (epochs, None), strict=True):
            rank.step_ended(step, known)
        return self.take(step) if taken else None

    def take(self, step: int) -> bool:
        label = VersionId(1, step)
        for rank in self.ranks:
            rank.inspect(cast(CopiedVersion, _Version(label)))
        (number,) = map(max, zip(*(rank.ballot(None, None) for rank in self.ranks), strict=True))
        result = VoteResult(label, ok=True, is_final=True, has_committed=True)
        for rank in self.ranks:
            rank.voted(result, (number,))
        (ends,) = {rank.take(label)[0] for rank in self.ranks}
        return ends


class _Version:
    def __init__(self, label: VersionId) -> None:
        self.label = label


def test_the_first_version_after_an_epochs_end_ends_it_on_all_ranks() -> None:
    ranks = Ranks()
    assert [ranks.step(n, n // 3) for n in range(1, 8)] == [False, False, True] * 2 + [False]


def test_an_epoch_that_ends_between_two_versions_is_not_missed() -> None:
    ranks = Ranks()
    assert [ranks.step(n, n // 3, taken=n % 2 == 0) for n in range(1, 9)] == [
        *(None, False, None, True),
        *(None, True, None, False),
    ]


def test_a_version_that_was_committed_late_counts_by_its_own_step() -> None:
    ranks = Ranks()
    assert not ranks.step(1, 0)
    for step, epochs in ((2, 0), (3, 1)):
        ranks.step(step, epochs, taken=False)
    assert (ranks.take(2), ranks.take(3)) == (False, True)


def test_a_resumed_job_has_not_just_ended_an_epoch() -> None:
    ranks = Ranks()
    assert [ranks.step(n, n // 3) for n in (7, 8, 9)] == [False, False, True]


def test_without_a_loader_no_epoch_ends() -> None:
    ranks = Ranks()
    assert not any(ranks.step(n, None) for n in range(1, 9))
    assert ranks.ranks[0].take(VersionId(1, 8)) == (False, None)


@pytest.mark.parametrize("kind", ["resumable", "samples"])
def test_a_loader_knows_when_an_epoch_has_ended(kind: str) -> None:
    dataset = TensorDataset(torch.arange(6.0))
    loader: Any
    if kind == "resumable":
        loader = reft.resumable(DataLoader(dataset, batch_size=2, shuffle=True), name="epochs")
    else:
        loader = reft.data.loader(dataset, batch_size=2, dp_rank=0, dp_size=1, name="epochs")
    ended = [loader.ended_epochs()]
    for _ in range(2):
        for _batch in loader:
            ended.append(loader.ended_epochs())
    assert ended == [0, 0, 0, 1, 1, 1, 2]
