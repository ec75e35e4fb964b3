"""Wording and JSON of the commands that people and programs read, compared with the files in this directory.

After a change that is meant, ``REFT_UPDATE_GOLDEN=1 pytest tests/golden`` writes the files again; the
difference belongs to the change.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reft.grid import VersionId
from reft.memory.jobdir import DAEMON_FILE, JobDir, process_identity, write_json
from reft.memory.protection_record import ProtectionRecord, write_record
from reft.node.client import TrainerReport
from reft.node.daemon import NodeStatus
from reft.node.history import RESUMED, STARTED, STEPPED, note
from reft.node.metrics import values
from reft.node.report import BOARD_FILE, WAITING, ReportBoard
from reft.storage.persister import PersistStatus
from tests.commands import command
from tests.node.boards import make_board

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
NOW = 1_700_000_000.0
COLUMNS = 80


@pytest.fixture(autouse=True)
def _fixed_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same width, time zone and time everywhere."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.chdir(tmp_path)


def compare(name: str, text: str) -> None:
    text = text.replace(str(Path.cwd()), "/scratch")
    path = HERE / name
    if os.environ.get("REFT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} is older: REFT_UPDATE_GOLDEN=1 pytest tests/golden"


def make_job(board: ReportBoard) -> JobDir:
    """The memory of a job on node a, after a failure: with a daemon, statistics and a history."""
    job = JobDir.open_or_create(Path("memory"), "job", node="a", secret=b"s" * 32)
    write_json(job.path / DAEMON_FILE, process_identity(os.getpid()))
    write_json(job.path / BOARD_FILE, board.model_dump(mode="json"))
    write_record(job.path, ProtectionRecord("arc", "arc", incarnation=1, step=1, tolerance=1))
    facts = {"nodes": ["a", "[b]"], "joined": [], "failures": []}
    note(job.path, STARTED, round=1, lost=[], newest_step=-1, **facts)
    note(job.path, STARTED, round=2, lost=["[b]"], newest_step=7, gathering_secs=1.5, **facts)
    note(job.path, RESUMED, source="memory, own", step=6, secs=0.5, times={})
    note(job.path, STEPPED)
    persist = PersistStatus(dir="/disk", last=VersionId(1, 5), lag_steps=2)
    status = NodeStatus(job.path, {"node": "a", "job_id": "job"}, persist)
    status.add_commit(VersionId(1, 7))
    for rank in range(2):
        stats: dict[str, Any] = {
            "taken": 7,
            "committed": 7,
            "copy_secs_median": 0.25,
            "stall_secs_median": 0.001,
            "traffic": {
                "to_host": {"shard": 2**20, "parity": 512},
                "sent": {"host_state": 2048 * rank},
            },
            "recomputed": 4 + rank,
            "resynced": {"it is not what its owner has": rank},
            "skipped": {"no memory": rank} if rank else {},
            "stale_since_step": 8 if rank else None,
        }
        status.set_report(rank, TrainerReport(1, stale_cause="no memory", stats=stats))
    status.write_if_changed()
    return job


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("status.txt", lambda: make_board(NOW)),
        (
            "status_waiting.txt",
            lambda: make_board(NOW, doing=WAITING, doing_since_unix_secs=NOW - 60, trainers=0),
        ),
    ],
)
def test_status_for_people(name: str, board: Callable[[], ReportBoard]) -> None:
    make_job(board().model_copy(update={"written_unix_secs": NOW}))
    answer = command("status", "--memory-dir", "memory")
    assert answer.code == 1
    compare(name, answer.out)


def test_status_for_programs() -> None:
    make_job(make_board(NOW).model_copy(update={"written_unix_secs": NOW}))
    found = command("status", "--memory-dir", "memory", "--json").json
    compare("status.json", f"{json.dumps(found, indent=1)}\n")


def test_metrics() -> None:
    job = make_job(make_board(NOW))
    lines = [
        f"{name}{dict(labels) or ''} {float(value):g}"
        for name, labels, value in values(make_board(NOW), "a", job.read_status() or {}, NOW)
    ]
    compare("metrics.txt", "\n".join([*lines, ""]))


FP16, BF16_ZERO1 = (str(CONFIGS / name) for name in ("fp16.json", "bf16-zero1.json"))
SMALL = "--model llama2-1.3b --cluster v100 --pp 4 --tp 4 --dp 8"
LARGE = "--model llama2-34b --cluster h100 --tp 8 --pp 4"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan.txt", f"{FP16} {SMALL}"),
        ("plan_unprotected.txt", f"{BF16_ZERO1} {LARGE} --dp 2 --protection none"),
        ("plan_auto.txt", f"{BF16_ZERO1} {LARGE} --dp 24 --protection auto+aor --rank-order auto"),
        ("plan.json", f"{FP16} {SMALL} --micro-batches 4 --json"),
    ],
)
def test_plan(name: str, words: str) -> None:
    answer = command("plan", *words.split())
    compare(name, answer.out)
    if name.endswith("txt"):
        lines = answer.out.splitlines()
        assert max(map(len, lines)) <= COLUMNS
        assert "\u2026" not in answer.out, "nothing is cut off"


WRONG_WORDS = (
    "",
    "fp16.json",
    f"missing.json {SMALL}",
    "fp16.json --model llama2-1.4b --dp 8",
    "fp16.json --model 1.3b",
    "fp16.json --model 1.3b --dp 8 --nodes 2",
    "fp16.json --model 1.3b --nodes 1 --tp 3",
    "fp16.json --model 1.3b --dp 8 --pp 30",
    "fp16.json --model 1.3b --dp 8 --cluster h200",
    f"fp16.json {SMALL} --protection prayer",
    f"fp16.json {SMALL} --protection rs:8",
    f"fp16.json {SMALL} --protection naive:arc+aec",
    f"bf16-zero1.json {LARGE} --dp 16 --protection none+aor",
    f"fp16.json {SMALL} --host-memory-gb 0",
    f"fp16.json {SMALL} --rank-order pipe-data",
)
WRONG_CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
    {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True}},
    {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    {"zero_optimization": {"stage": "auto"}},
    {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
    {"fp16": {"enabled": "auto"}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"optimizer": {"type": "SGD"}},
    {"gradient_accumulation_steps": "auto"},
    {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 10},
    {"bf16": True},
    {"reft": {"copis": 2}},
    {"reft": {"variant": "none"}},
)
WRONG_CLUSTERS: tuple[dict[str, Any], ...] = (
    {"like": "v101"},
    {"devices_per_node": 8},
    {"like": "v100", "device_per_node": 8},
    {"like": "v100", "devices_per_node": 0},
    {"like": "v100", "failures": []},
    {"like": "v100", "failures": [{"mtbf": 3}]},
    {"like": "v100", "achieved_flops": 1e15},
    {"like": "v100", "host_memory_bytes": "much"},
)


def test_what_a_plan_refuses() -> None:
    """Each refusal says what was found, what was expected, and what to write."""
    for name in ("fp16.json", "bf16-zero1.json"):
        Path(name).write_text((CONFIGS / name).read_text())
    lines = []

    def refuse(title: str, words: str) -> None:
        answer = command("plan", *words.split())
        assert answer.code == 2, title
        error = " ".join(answer.err.split()).removeprefix("reft: ")
        lines.append(f"{title}\n    {error}\n")

    for words in WRONG_WORDS:
        refuse(f"plan {words}", words)
    for config in WRONG_CONFIGURATIONS:
        Path("ds.json").write_text(json.dumps(config))
        refuse(json.dumps(config), f"ds.json {SMALL}")
    for cluster in WRONG_CLUSTERS:
        Path("cluster.json").write_text(json.dumps(cluster))
        refuse(json.dumps(cluster), "fp16.json --model 1.3b --dp 8 --cluster cluster.json")
    compare("plan_refusals.txt", "\n".join(lines))


def test_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node without a device, whose measurements vary: a figure is shown as #."""
    monkeypatch.setattr("reft.cli.check.find_local_vendor", lambda: None)
    answer = command("check", "--secs", "0.1", "--node-id", "a")
    compare("check.txt", mask(answer.out))
    found = command("check", "--secs", "0.1", "--node-id", "a", "--json").json
    compare("check.json", f"{json.dumps(shape(found), indent=1)}\n")


def mask(text: str) -> str:
    """Without figures, and without the widths of columns that follow from them."""
    text = re.sub(r"\d[\d.,e+]*", "#", text)
    return re.sub(r"(\s|[─━])\1+", r"\1", text)


def shape(value: Any) -> Any:
    """Keys and types."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__
