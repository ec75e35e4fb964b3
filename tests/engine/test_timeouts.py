"""The time-outs of collectives and the limits of the watch for hangs are compared at the start."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from reft.config import ReftConfig
from reft.engine.checks.start import group_timeout_secs, timeout_is_short


@pytest.mark.parametrize(
    ("timeout_secs", "short"), [(599.0, True), (600.0, False), (1800.0, False), (None, False)]
)
def test_only_what_would_fire_before_is_said(timeout_secs: float | None, short: bool) -> None:
    assert (timeout_is_short(ReftConfig(), timeout_secs) is not None) is short
    assert timeout_is_short(ReftConfig(hang_factor=0.0), timeout_secs) is None, "nobody is watched"


def test_the_line_says_what_to_write() -> None:
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
