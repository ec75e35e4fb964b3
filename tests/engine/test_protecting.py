"""A job says that it is protected, what it was resumed from, and which time-outs would fire before the watch for
hangs. The recovered state is protected before the first step, or training goes on with a warning (P3, P6)."""

from __future__ import annotations

import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from reft.config import ReftConfig, parse_block
from reft.engine.checks.start import group_timeout_secs, timeout_is_short, what_is_protected
from reft.engine.load.memory import MemoryRestorer
from reft.grid import Degrees
from reft.naming import Label
from reft.node import report
from reft.recover.plan import NotRecoverable
from reft.snapshot.worker import SnapshotRequest
from reft.state.codec import encode

LONG = 60.0


def test_p6_a_restored_state_whose_commit_does_not_come_is_waited_for_only_so_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = SnapshotRequest(Label(2, 7), None, must=True)  # nothing ever becomes of it
    session: Any = SimpleNamespace(
        submit=lambda must: request,
        config=SimpleNamespace(commit_timeout_secs=0.1),
        stats=SimpleNamespace(last_error="a peer is silent"),
    )
    protecting = threading.Thread(target=MemoryRestorer(session).protect, daemon=True)
    protecting.start()
    protecting.join(LONG / 2)
    assert not protecting.is_alive(), "training waits for a commit that does not come"
    (record,) = caplog.records
    assert "step 7 could not be protected again: a peer is silent. Training goes on" in record.message


@pytest.mark.parametrize(
    ("block", "tolerance", "survives", "kept"),
    [
        ({}, 0, "killed trainers, but no lost node", "none on storage (persist.dir is not set)"),
        (
            {"persist": {"dir": "/p", "interval_steps": 100}},
            1,
            "the loss of 1 node(s) per sharding group",
            "on storage in /p every 100 steps",
        ),
        ({"persist": {"dir": "/p"}}, 1, "", "on storage in /p when the job is asked to stop"),
        ({"interval_steps": 4}, 1, "", "in memory every 4 steps, none"),
        ({"interval_steps": "auto"}, 1, "", "in memory at an interval that reft chooses, none"),
    ],
)
def test_p4_a_start_says_in_a_line_what_is_protected(
    block: dict[str, Any], tolerance: int, survives: str, kept: str
) -> None:
    session: Any = SimpleNamespace(
        config=parse_block(block),
        tolerance=tolerance,
        topology=SimpleNamespace(degrees=Degrees(1, 2, 1), failure_domains=("a", "b")),
        memory=SimpleNamespace(incarnation=1),
        protection=SimpleNamespace(record=SimpleNamespace(in_force="arc")),
    )
    said = what_is_protected(session)
    assert said.startswith(
        "the job is protected: PP1xDP2xTP1 on 2 node(s), incarnation 1; protection arc survives "
    )
    assert survives in said
    assert kept in said
    assert len(said.splitlines()) == 1


def restarted(job_dir: Path) -> Any:
    """A session on rank 0 whose launcher has seen a trainer fail."""
    failed = dict(failures=["b, rank 1, killed by SIGKILL"], failed_unix_secs=time.time() - 100)
    report.note(
        job_dir, report.STARTED, round=2, nodes=["a", "b"], lost=[], joined=[], newest_step=7, **failed
    )
    return SimpleNamespace(
        is_rank_zero=True,
        engine=SimpleNamespace(global_steps=7),
        job_id="job",
        memory=SimpleNamespace(
            job_dir=SimpleNamespace(path=job_dir), identity=SimpleNamespace(restarted=True), record=None
        ),
        control=SimpleNamespace(rank=1, gather_bytes=lambda data: [encode(["", ""])]),
    )


def test_a_restart_that_finds_nothing_says_that_the_job_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MemoryRestorer(restarted(tmp_path)).refuse_silent_restart(NotRecoverable(("nothing is in memory",)))
    (record,) = caplog.records
    assert re.search(
        r"the job starts from the beginning: nothing was committed and .* on storage, "
        r"10\d\.\d s after the failure \(b, rank 1, killed by SIGKILL\)",
        record.message,
    )


@pytest.mark.parametrize(
    ("timeout_secs", "short"), [(599.0, True), (600.0, False), (1800.0, False), (None, False)]
)
def test_only_what_would_fire_before_is_said(timeout_secs: float | None, short: bool) -> None:
    assert (timeout_is_short(ReftConfig(), timeout_secs) is not None) is short
    assert timeout_is_short(ReftConfig(hang_factor=0.0), timeout_secs) is None, "nobody is watched"
    said = timeout_is_short(ReftConfig(), 60.0)
    assert said is not None
    assert "collectives time out after 60 s" in said
    assert "deepspeed.init_distributed(timeout=timedelta(seconds=1200))" in said
    assert '"hang_timeout_secs": 30' in said
    assert timeout_is_short(ReftConfig(hang_timeout_secs=30), 60.0) is None, "as was said"


def test_the_time_out_is_that_of_the_group_of_training() -> None:
    assert group_timeout_secs() is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=61))
    try:
        assert group_timeout_secs() == 61.0
    finally:
        dist.destroy_process_group()
