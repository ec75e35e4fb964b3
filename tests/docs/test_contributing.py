"""The worked example of CONTRIBUTING.md does what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CpuCopyEngine
from tests.snapshot.ranks import ALONE, WAIT_SECS, Rank, group_of_one

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_feature_refuses_versions_and_ends_the_job(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    with group_of_one():
        me = Rank(0, tmp_path, ALONE, Copier(CpuCopyEngine(), 2**18), names["WeightLimit"](25.0))
        committed = me.take_next(5)  # step n writes weights of 10 n to 10 n + 3
        halt = me.worker.votes.halt
        me.worker.close(WAIT_SECS)
    assert committed == [True, True, False, False, False]
    assert {cause for _, cause in me.skips} == {"a weight is too large"}
    assert halt is not None
    assert halt.restarts


def test_files_to_read_have_about_the_stated_lines() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    rows = re.findall(r"^\| `([a-z_/]+\.py)` \| ([\d,]+) \|", page, re.MULTILINE)
    assert len(rows) == 10
    for file, stated in rows:
        lines = len((ROOT / "reft" / file).read_text().splitlines())
        assert abs(lines - int(stated.replace(",", ""))) <= 0.15 * lines, file
