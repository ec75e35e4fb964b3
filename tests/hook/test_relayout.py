"""A job goes on in another layout from what reft persisted, as a job of that layout would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reft.grid import Degrees
from reft.load.offline import persist_offline
from tests.hook.ranks import run_ranks
from tests.hook.relayout_job import CASES, STEPS
from tests.hook.test_resizing import to_universal

JOB = Path(__file__).with_name("relayout_job.py")
SHORT = Degrees(2, 2, 1), Degrees(1, 1, 2)
LONG = (*(Degrees(*d) for d in ((2, 2, 1), (1, 2, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2), (2, 1, 1))),)
"""Of every life."""
Lives = list[list[dict[str, Any]]]


def lives_of(root: Path, layouts: tuple[Degrees, ...], cases: Sequence[str]) -> Lives:
    """Per life what every rank saw."""
    found, before = [], ""
    for number, degrees in enumerate(layouts, 1):
        until = number * STEPS
        life = {"until": until, "from": before, "pp": degrees.pp, "tp": degrees.tp, "cases": list(cases)}
        (root / "life.json").write_text(json.dumps(life))
        found.append(run_ranks(JOB, root, world=degrees.world_size))
        before = f"step{until}"
        to_universal(root, before)
        for case in cases:
            nodes = sorted((root / case / f"memory-{until}").glob("node*"))
            persist_offline([node / case for node in nodes], root / case / "persisted")
    return found


def are_of_their_layouts(lives: Lives, layouts: tuple[Degrees, ...], case: str) -> None:
    """Bit for bit, masters and moments with their padding too."""
    for number, (degrees, ranks) in enumerate(zip(layouts[1:], lives[1:], strict=True), 1):
        for rank in ranks:
            assert "persisted" in rank[case]["path"]
            assert rank[case]["begins"] == number * STEPS
            assert rank[case]["losses"] == rank[case]["reference"]["losses"], degrees
            assert rank[case]["images"] == rank[case]["reference"]["images"], degrees


def test_p1_a_job_goes_on_in_another_layout_as_a_job_of_that_layout(tmp_path: Path) -> None:
    lives = lives_of(tmp_path, SHORT, ["zero1"])
    are_of_their_layouts(lives, SHORT, "zero1")
    for rank in lives[1]:
        assert "the running job alone has 6.down.weight" in rank["zero1"]["refused"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_p1_so_it_does_through_many_layouts(tmp_path: Path) -> None:
    lives = lives_of(tmp_path, LONG, list(CASES))
    for case in CASES:
        are_of_their_layouts(lives, LONG, case)
