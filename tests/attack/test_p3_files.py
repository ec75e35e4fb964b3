"""Arena files that are removed, replaced, cut off, torn or exchanged: noticed at the next version (P3)."""

from __future__ import annotations

import pytest

from tests.attack.file_scenarios import ATTACKS, files, swap, swapped_before
from tests.attack.workers import Results

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("files"), files, swap, swapped_before)


def test_p3_damaged_files_are_noticed_and_made_anew(results: Results) -> None:
    for rank, result in enumerate(results.of(files)):
        for kind, which in ATTACKS:
            found = result[f"{kind} {which}"]
            assert found["last"], (rank, kind, which)
            # What is told to be committed lies in files that a restart finds.
            assert list(found["in_files"].values()) == [found["step"]], (rank, kind, which)
            # On the node that was attacked it was said why, at the next version.
            assert bool(found["said"]) == (rank == 1), (rank, kind, which)


def test_p3_files_exchanged_between_local_ranks_are_told_apart(results: Results) -> None:
    for result in results.of(swap):
        assert result.pop("names") == [f"rank{r}-slot{s}.arena" for r in (0, 1) for s in (0, 1)]
        for slots, found in result.items():
            assert found["last"], slots
            assert list(found["in_files"].values()) == [found["step"]] * 2, slots


def test_p3_a_recovered_version_in_all_slots_of_a_rank_leaves_room_for_the_next(results: Results) -> None:
    for result in results.of(swapped_before):
        assert list(result["before"].values()) == [2, 2], "nothing of the recovered version is given up"
        assert result["committed"] == [True, True]
