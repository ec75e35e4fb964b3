"""``examples/llama/pretrain.py`` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pretrain.conftest import pretrain

SMALL = (
    "--layers",
    2,
    "--hidden",
    32,
    "--ffn",
    48,
    "--seq",
    32,
    "--micro-batches",
    2,
    "--dropout",
    0,
)


def events(folder: Path) -> list[dict]:
    (path,) = folder.glob("rank-0-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.integration
def test_loss_goes_down_is_shown_and_a_checkpoint_resumes_it(
    tmp_path: Path, text_folder: Path
) -> None:
    common = (
        *SMALL,
        "--data",
        text_folder,
        "--cache-dir",
        tmp_path / "cache",
        "--steps",
        30,
        "--lr",
        0.01,
    )
    common = (*common, "--save-interval", 20, "--log-interval", 10)
    done = pretrain(*common, "--save-dir", "saved", cwd=tmp_path, REFT_EVENTS=str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed" not in done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/30", "10/30", "20/30", "30/30"]
    ready, *steps = events(tmp_path / "one")
    assert ready["event"] == "ready"
    assert {"data_secs", "import_secs", "engine_secs"} <= ready.keys()
    assert [e["step"] for e in steps] == list(range(1, 31))
    assert all(float.fromhex(e["loss_hex"]) == e["loss"] for e in steps)
    assert sum(e["loss"] for e in steps[-5:]) / 5 < steps[0]["loss"] - 1.0

    # A second process starts from the step 20 of the first: the same numbers, to the last bit.
    assert (tmp_path / "saved" / "latest").read_text() == "global_step30"
    (tmp_path / "saved" / "latest").write_text("global_step20")
    again = pretrain(
        *common,
        "--load-dir",
        "saved",
        "--save-dir",
        "other",
        cwd=tmp_path,
        REFT_EVENTS=str(tmp_path / "two"),
    )
    assert again.returncode == 0, again.stderr
    assert "resumed at step 20" in again.stdout
    assert [(e["step"], e["loss_hex"]) for e in events(tmp_path / "two")[1:]] == [
        (e["step"], e["loss_hex"]) for e in steps[20:]
    ]


@pytest.mark.process
def test_wrong_use_is_one_clear_line_and_status_2(tmp_path: Path) -> None:
    for argv, says in (
        (("--pp", 2), "found 1 processes; --pp 2 x --tp 1 needs a multiple of 2"),
        (("--data", "nowhere"), "no such file or folder"),
        (("--model", "giant"), "no model named 'giant'"),
    ):
        done = pretrain(*argv, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
