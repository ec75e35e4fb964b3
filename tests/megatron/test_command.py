"""``make megatron`` runs every case that it was asked for, whatever becomes of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.command import run_cases


@pytest.mark.process
def test_a_case_that_does_not_end_in_time_is_reported_and_the_next_ones_are_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import time\n\ntime.sleep(600)\n")
    slow, ran = runs.Program(script=script, arguments=(), nodes=1, secs=0.1), []

    def run(name: str) -> list[str] | None:
        ran.append(name)
        if name == "slow":
            slow.run(tmp_path / name, None)
        if name == "wrong":
            raise KeyError("lm loss")
        return {"differs": ["iteration 3"], "skipped": None}.get(name, [])

    assert run_cases(["slow", "wrong", "differs", "skipped", "equal"], lambda _: run) == 1
    assert ran == ["slow", "wrong", "differs", "skipped", "equal"]
    said = capsys.readouterr()
    for words in (
        "DIFFERS slow, ",
        "still runs after 0 s",
        "KeyError: 'lm loss'",
        "DIFFERS differs, ",
        "EQUAL equal, ",
    ):
        assert words in said.out
    assert "DIFFER: slow, wrong, differs; the logs are in " in said.err
    assert run_cases(["skipped", "equal"], lambda _: run) == 0
