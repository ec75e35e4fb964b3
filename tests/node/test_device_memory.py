"""What a trainer notes of its device's memory, and that nothing of it can stop a step (P6). The same contract on
a real device (CUDA, or ROCm's HIP) and on the simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reft.device import Vendor
from reft.node.monitors import DeviceMemory
from reft.node.progress import DeviceUse, ProgressPage, read_pages
from tests.device.conftest import at_hand, sim
from tests.device.simulated import NAME, Simulated

__all__ = ["at_hand", "sim"]


@pytest.fixture
def page(tmp_path: Path) -> ProgressPage:
    return ProgressPage(tmp_path, 0, 0, 10.0, 600.0)


def noted(tmp_path: Path) -> DeviceUse | None:
    (seen,) = read_pages(tmp_path)
    return seen.device


def test_the_allocators_numbers_reach_the_page(
    tmp_path: Path, page: ProgressPage, sim: Simulated
) -> None:
    settings = sim.settings
    settings.total_bytes, settings.others_bytes = 2**30, 2**20
    kept = torch.ones(2**16, device=NAME)
    memory = DeviceMemory(page, torch.device(NAME))
    assert noted(tmp_path) is None
    memory.after_step()
    before = DeviceUse(2**30 - 2**20, settings.allocated_bytes, settings.peak_bytes)
    assert noted(tmp_path) == before
    assert before.allocated >= kept.nbytes
    more = torch.ones(2**16, device=NAME)
    memory.after_step()  # within the same second
    assert noted(tmp_path) == before
    del more


@pytest.mark.parametrize("error", [RuntimeError("no statistics"), KeyError("allocated_bytes")])
def test_p6_an_allocator_that_counts_nothing_is_asked_once(
    tmp_path: Path,
    page: ProgressPage,
    sim: Simulated,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    asked = []

    def stats(device: torch.device) -> None:
        asked.append(device)
        raise error

    monkeypatch.setattr(sim, "memory_stats_as_nested_dict", stats)
    memory = DeviceMemory(page, torch.device(NAME), every_secs=0.0)
    memory.after_step()
    memory.after_step()
    assert len(asked) == 1
    assert noted(tmp_path) is None


def test_without_a_device_nothing_is_noted(tmp_path: Path, page: ProgressPage) -> None:
    DeviceMemory(page, torch.device("cpu")).after_step()
    assert noted(tmp_path) is None


@pytest.mark.gpu
def test_a_device_is_counted(tmp_path: Path, page: ProgressPage, at_hand: Vendor) -> None:
    device = torch.device(at_hand.type, at_hand.module.current_device())
    kept = torch.ones(2**24, device=device)
    DeviceMemory(page, device).after_step()
    found = noted(tmp_path)
    assert found is not None
    assert found.peak_allocated >= found.allocated >= kept.nbytes
    assert found.total >= found.peak_allocated
