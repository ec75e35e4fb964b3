"""What people and tools get to see of a profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from reft import cli
from reft.config import explain, parse_block
from reft.env import ENV_PROFILE
from reft.errors import ConfigError
from reft.profile.analysis import analyse
from reft.profile.profiler import note_taken, write
from reft.profile.result import ProfileResult
from reft.snapshot.schedule import ChunkRecord
from reft.tools import profile as cli_profile
from reft.tools.profile import advice, draw, show, verdict
from tests.profile.simulated import a_profile, costs, run, train_schedule, with_chunks

IN_MID = [ChunkRecord(1, 2_000_000, 5.0e-3 + i * 1e-3, 5.9e-3 + i * 1e-3, 0, "replicated") for i in range(2)]
IN_FILL = [ChunkRecord(1, 2_000_000, 1e-5, 9.1e-4, 0, "replicated")]
TOO_MUCH = [ChunkRecord(2, 9_000_000, 1e-3 * i, 1e-3 * (i + 1), None, "replicated") for i in range(30)]


def test_the_table_names_stages_windows_and_what_fits():
    console = Console(width=200, record=True, file=StringIO())
    show(a_profile({0: IN_MID, 1: IN_FILL}), console)
    text = console.export_text()
    assert "pp 2 x dp 1 x tp 1: 6 steps" in text
    assert "mid" in text
    assert "fill" in text
    assert "RecvGrad" in text
    assert "4.0 MB / 0 / 0 / 0" in text


def test_advice_says_what_fits_and_what_does_not():
    lines = list(advice(a_profile({0: IN_MID, 1: TOO_MUCH})))
    assert any(line.startswith("stage 0: a snapshot of 4.0 MB fits into") for line in lines)
    assert any(line.startswith("stage 1: a snapshot of 270.0 MB does not fit") for line in lines)
    slow = advice(a_profile(given=replace(costs(2), backward_secs=(4e-3, 9e-3))))
    assert any("stage 1 computes" in line and "longer than the mean stage" in line for line in slow)
    ranks, _ = run(train_schedule(2, 4), costs(2), 4)
    chunked = [replace(r, snapshot_bytes=4_000_000) for r in with_chunks(ranks, {0: IN_FILL, 1: IN_FILL})]
    rare = advice(analyse(chunked, "job", (2, 1, 1)))
    assert any("snapshots were taken of about 50 % of the measured steps" in line for line in rare)
    assert any("no recurring idle time" in line for line in advice(a_profile(stages=1)))


def test_the_title_says_whether_snapshots_are_free():
    assert verdict(a_profile()) == "No snapshots ran in the profiled steps"
    assert verdict(a_profile({0: IN_MID, 1: IN_FILL})).startswith("Snapshots are free here")
    assert "during computation" in verdict(a_profile({0: IN_MID, 1: TOO_MUCH}))


def check_trace(path, ranks: int) -> None:
    """Loadable, one process per rank, and no two slices of a track at the same time."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"]
            tracks[event["pid"], event["tid"]].append((begin, begin + event["dur"], event["name"]))
    assert {pid for pid, _ in tracks} == set(range(ranks))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[track] for track in tracks} >= {"steps", "instructions"}
    for slices in tracks.values():
        for (_, end, name), (begin, _, following) in pairwise(slices):
            assert begin >= end - 1e-3, f"{following} begins {end - begin} us before {name} ends"


@pytest.mark.process  # matplotlib asks fc-list for fonts, the first time on a machine
def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    result = a_profile({0: IN_MID, 1: IN_FILL})
    draw(result, path)
    # Text is drawn as paths, with the words as comments.
    text = path.read_text()
    assert "stage 1" in text
    assert "Snapshots are free here" in text
    assert "of the copying time is idle time" in text
    assert text.count("of it in idle time") == 2
    assert text.count("4.0 MB to copy") == 1, "bytes and parts of the time stand apart"
    with pytest.raises(ConfigError, match="step 99 was not profiled; the profile has steps"):
        draw(result, path, step=99)


@pytest.mark.integration
def test_the_picture_of_the_guide_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "benchmarks/profile_picture.py"), "--out", str(tmp_path / "p.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "stage 2: a snapshot of 1.2 GB does not fit its idle time" in done.stdout
    assert (tmp_path / "p.png").stat().st_size > 20_000


@pytest.mark.process
def test_a_job_leaves_profile_trace_and_figure(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    result = a_profile({0: IN_MID})
    write(result, tmp_path)
    assert ProfileResult.load(tmp_path / "profile.json") == result
    check_trace(tmp_path / "trace.json", ranks=2)
    assert (tmp_path / "profile.png").stat().st_size > 5000
    assert "could not be drawn" not in caplog.text


def test_a_saved_profile_is_shown_again(tmp_path, capsys):
    saved, trace, copy = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "again.json"
    result = a_profile({0: IN_MID, 1: IN_FILL})
    result.save(saved)
    code = cli.main(["profile", "--from", str(saved), "--trace", str(trace), "--json", str(copy)])
    assert code == 0
    assert "idle windows of a step" in capsys.readouterr().out
    assert copy.read_text() == saved.read_text()
    check_trace(trace, ranks=2)
    assert cli.main(["profile", "--json", "-", f"--from={saved}"]) == 0
    assert ProfileResult.from_json(json.loads(capsys.readouterr().out)) == result


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0", "train.py"], "--steps is 0; expected at least 1"),
        (["--from", "none.json"], "cannot read the profile"),
        (
            ["--nproc-per-node", "2", "--from", "p.json", "train.py"],
            "remove the script and its launch options",
        ),
    ],
)
def test_wrong_use_is_explained(arguments, says, capsys):
    assert cli.main(["profile", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_block_has_the_keys_and_the_command_sets_them(tmp_path, monkeypatch):
    assert {"profile.steps", "profile.warmup_steps", "profile.dir"} <= {doc.key for doc in explain()}
    with pytest.raises(ConfigError, match=r'did you mean "warmup_steps"'):
        parse_block({"enabled": True, "profile": {"warmup_step": 3}})
    assert parse_block({}).profile.steps == 0

    started = []
    monkeypatch.setattr("reft.job.launch.launch", lambda options: started.append(options) or 1)
    monkeypatch.setenv(ENV_PROFILE, "")
    command = ["--steps", "7", "--warmup-steps", "2", "--dir", str(tmp_path), "--nproc-per-node", "2"]
    assert cli_profile.main([*command, "train.py", "--steps", "100"]) == 1
    (options,) = started
    assert options.arguments[-3:] == ("train.py", "--steps", "100")
    assert options.job_id.startswith("profile-")

    block = parse_block({}, os.environ)  # a job without a block
    assert block.enabled
    assert (block.profile.steps, block.profile.warmup_steps, block.profile.then) == (7, 2, "exit")
    assert block.profile.dir == tmp_path


def run_with(monkeypatch, tmp_path, job) -> int:
    monkeypatch.setenv(ENV_PROFILE, "")
    monkeypatch.setattr("reft.job.launch.launch", lambda options: job() or 0)
    return cli_profile.main(["--dir", str(tmp_path), "--steps", "3", "train.py"])


def test_what_the_command_returns_when_this_node_has_no_profile(tmp_path, monkeypatch, capsys):
    assert run_with(monkeypatch, tmp_path, lambda: None) == 1
    assert "fewer than 5 + 3 + 1 steps" in capsys.readouterr().err
    # Another node's rank 0 wrote it.
    assert run_with(monkeypatch, tmp_path, lambda: note_taken(tmp_path, 4)) == 0
    assert "on the node of rank 0" in capsys.readouterr().err
    assert run_with(monkeypatch, tmp_path, lambda: note_taken(tmp_path, 0)) == 1
    assert "the profile could not be made" in capsys.readouterr().err
    # A profile that lay there before is not taken for this job's.
    a_profile().save(tmp_path / "profile.json")
    assert run_with(monkeypatch, tmp_path, lambda: None) == 1
    assert run_with(monkeypatch, tmp_path, lambda: a_profile().save(tmp_path / "profile.json")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
