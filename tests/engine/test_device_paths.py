"""What has never run on a device is said at the start of a job on one."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.config_read import parse_block
from reft.engine.device_paths import PATHS, Run, platform_of, report_untried, untried
from reft.optim import ExactAdam


def job(
    block: dict[str, Any], optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, rank: int = 0
) -> Any:
    """As much of a session on a device as is asked."""
    config = parse_block(block)
    return SimpleNamespace(
        config=config,
        copying=SimpleNamespace(variant=config.variant, engine=SimpleNamespace(asynchronous=True)),
        protection=SimpleNamespace(record=SimpleNamespace(parsed=config.scheme)),
        state=SimpleNamespace(
            adapter=SimpleNamespace(
                steps_exactly=isinstance(optimizer([torch.nn.Parameter(torch.ones(1))]), ExactAdam)
            )
        ),
        is_rank_zero=rank == 0,
    )


def test_a_job_hears_of_what_it_uses_only() -> None:
    plain = set(untried(PATHS, job({}), "CUDA"))
    assert {"copies on a side stream", "pinned arenas", "windows by the device's clock"} <= plain
    more = job({"protection": "rs:2+aor", "has": {"overflow": "staging"}}, ExactAdam)
    assert set(untried(PATHS, more, "CUDA")) - plain >= {
        "staging in device memory",
        "capture of gradients",
        "ExactAdam",
    }
    assert any(name.startswith("parities by") for name in untried(PATHS, more, "CUDA"))


def test_what_ran_is_not_said_and_another_platform_counts_for_itself() -> None:
    ran = [replace(path, runs=(Run("CUDA", "a device", "a file"),)) for path in PATHS]
    assert list(untried(ran, job({}), "CUDA")) == []
    assert list(untried(ran, job({}), "ROCm")) == list(untried(PATHS, job({}), "ROCm")) != []
    assert platform_of(SimpleNamespace(hip="6.2", cuda=None)) == "ROCm"
    assert platform_of(SimpleNamespace(hip=None, cuda="12.8")) == "CUDA"


def test_it_is_one_line_on_one_rank_of_a_job_on_a_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reft")
    report_untried(job({}, rank=1))
    on_host = job({})
    on_host.copying.engine.asynchronous = False
    report_untried(on_host)
    assert caplog.messages == []
    report_untried(job({}))
    (line,) = caplog.messages
    assert "never run on a CUDA device before" in line
    assert "copies on a side stream" in line
    assert "'make gpu'" in line
