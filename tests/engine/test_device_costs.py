"""What a copy within the device costs, and what is left of its memory: of NVIDIA's (CUDA) or AMD's (ROCm)."""

from __future__ import annotations

import pytest
import torch

from reft.engine.rates import device_copy_secs, spare_device_bytes


def test_without_a_device_there_is_nothing_to_measure() -> None:
    assert device_copy_secs(torch.device("cpu"), 2**20) is None
    assert spare_device_bytes(torch.device("cpu")) == 0


def test_p6_a_device_that_gives_no_memory_is_not_measured_and_ends_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**34, 2**35))
    monkeypatch.setattr(torch, "empty", refuse)
    assert device_copy_secs(torch.device("cuda"), 2**30) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: measures copies within its memory")
def test_a_copy_within_the_device_is_measured_and_scaled_and_leaves_nothing() -> None:
    device = torch.device("cuda")
    torch.empty(2**20, device=device)
    before = torch.cuda.memory_allocated(device)
    small, large = (device_copy_secs(device, n) for n in (2**26, 2**30))
    assert small is not None
    assert large is not None
    assert 2 * 2**30 / 10e12 < large < 2 * 2**30 / 50e9  # between 50 GB/s and 10 TB/s, read and written
    assert large == pytest.approx(16 * small, rel=0.5)
    assert torch.cuda.memory_allocated(device) == before
    assert 0 < spare_device_bytes(device) < torch.cuda.get_device_properties(device).total_memory
