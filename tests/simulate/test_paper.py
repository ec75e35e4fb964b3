"""The page of published values is what the command writes, and gives a cause for every difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.paper import Verdict
from tests.test_wheel import ROOT


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("paper")
    assert main(("paper", "--out", str(out))) == 0
    return out


def test_the_documentation_is_what_the_command_writes(report: Path) -> None:
    written = (report / "papers.md").read_text()
    assert (ROOT / "docs" / "papers.md").read_text() == written, "run: make paper ARGS='--out docs'"
    for figure in (report / "papers").glob("*.png"):
        assert f"papers/{figure.name}" in written
        assert (ROOT / "docs" / "papers" / figure.name).is_file()


def test_every_row_has_a_verdict_and_every_difference_a_tried_cause(report: Path) -> None:
    rows = json.loads((report / "papers" / "rows.json").read_text())
    for row in rows:
        verdict = Verdict(row["verdict"])
        if verdict is Verdict.NOT_AVAILABLE:
            assert not row["printed"], "a value that was not available must not be printed"
            continue
        assert row["printed"], row
        if verdict is Verdict.DIFFERS:
            assert "Tried:" in row["cause"] or "Follows from" in row["cause"], row
        assert row["how"] in {"simulated", "computed", "measured", ""}, row


def test_rows_have_the_values_that_are_published(report: Path) -> None:
    rows = json.loads((report / "papers" / "rows.json").read_text())
    printed = " ".join(row["printed"] for row in rows)
    for value in ("1 %; 22 %", "6.63", "17 %", "9.27", "0.84", "0.75", "12.36", "6.26", "0.96 %"):
        assert value in printed, value
    for value in ("6.59", "0.61 %", "30.45", "12 to 15", "35 %; 5 %", "3.5 %", "30 to 100"):
        assert value in printed, value
