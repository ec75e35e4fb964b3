"""What stands for a network file system gives the same bytes, and none of them sooner than its rate allows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.test_benchmarks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from slow_files import slow_loads

RATE = 1000.0


def test_every_byte_is_paid_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(secs: float) -> None:
        nonlocal now
        now += secs

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    saved = {name: torch.randn(1000) for name in "abc"}
    path = tmp_path / "file.pt"
    torch.save(saved, path)
    with slow_loads(RATE):
        loaded = torch.load(path)
        paid = now
        torch.load(path)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert 3 * saved["a"].nbytes / RATE <= paid < 2 * path.stat().st_size / RATE
    assert now == paid
