"""What a rank tries on its own device at attach, and the paragraph that says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reft import optim
from reft.device import Cuda
from reft.engine.checks.device import DeviceFindings, device_paragraph, memory_node, try_device
from reft.protect.backend import TorchBackend
from reft.snapshot.copying.device import DeviceCopyEngine
from tests.device.conftest import sim
from tests.device.simulated import NAME, Simulated, SimulatedVendor

__all__ = ["sim"]

FOUND = DeviceFindings("cuda", 3, True, True, 1e8, True, 20e9, device_node=1, memory_node=1)


def tried(sim: Simulated, directory: Path) -> DeviceFindings:
    vendor, found = SimulatedVendor(sim), DeviceFindings(NAME, 1, makes_parities=True)
    engine = DeviceCopyEngine(torch.device(NAME), vendor)
    before = torch.random.get_rng_state()
    try_device(found, vendor, engine, directory)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (sim.registrations, list(directory.iterdir())) == (0, [])
    engine.close()
    return found


def test_a_device_is_tried_with_real_copies_parities_and_steps(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optim, "square_root", lambda v, out: torch.sqrt(v, out=out))  # on the host as there
    sim.settings.bytes_per_sec = 1e9
    found = tried(sim, tmp_path)
    assert found.to_change == []
    assert found.adam_is_exact
    assert found.parities_alike
    assert found.registered
    assert 0 < found.copy_bytes_per_sec <= 1e9
    assert found.adam_parameters_per_sec > 0


def test_p6_what_a_device_does_otherwise_is_found_and_ends_nothing(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Wrong(TorchBackend):
        def combine(self, rows, sources, targets) -> None:  # type: ignore[no-untyped-def]
            super().combine(rows, sources, targets)
            targets[-1][-1] ^= 1

    def rounds_up(v: torch.Tensor, out: torch.Tensor) -> None:
        torch.sqrt(v, out=out)
        if v.device.type != "cpu":
            out.view(torch.int32).add_(1)

    sim.settings.refuse_registering = 1
    with monkeypatch.context() as patched:
        patched.setattr(optim, "square_root", rounds_up)
        patched.setattr("reft.engine.checks.device.backend_for", lambda buffer: Wrong())
        found = tried(sim, tmp_path)
    assert (found.adam_is_exact, found.parities_alike, found.registered) == (False, False, False)
    monkeypatch.setattr(sim, "Event", None)
    (said,) = tried(sim, tmp_path).to_change
    assert "the device could not be tried out (TypeError" in said


def test_one_paragraph_says_what_was_found_and_what_to_change_on_which_rank() -> None:
    assert device_paragraph([FOUND, replace(FOUND, copy_bytes_per_sec=25e9)]) == (
        "tried on cuda: reft.ExactAdam steps as on a host; parities are as a host's; copies into host memory run "
        "at 20 to 25 GB/s; every rank has 3 cores or more to spare; memory is on the device's NUMA node. To change: nothing"
    )
    odd = replace(FOUND, adam_is_exact=False, parities_alike=False, copy_bytes_per_sec=9e9, memory_node=0)
    said = device_paragraph([replace(one, to_change=["unset it"]) for one in (FOUND, odd)])
    assert "ExactAdam steps NOT as on a host" in said
    assert "parities are" not in said
    assert "memory is on" not in said.split("To change")[0]
    for text in (
        'on rank 1: parities differ from a host\'s, and restore nothing: write "protection": "arc"',
        "on rank 1: host memory is on NUMA node 0, the device on 1: start the rank with numactl --cpunodebind=1",
        "on rank 1: copies are less than half as fast",
        "on all ranks: unset it",
    ):
        assert text in said
    unknown = device_paragraph([replace(FOUND, memory_node=-1, device_node=-1, registered=False)])
    assert "NUMA nodes are not known. To change: on all ranks: host memory cannot be registered" in unknown


def test_the_numa_node_of_memory_is_that_of_most_of_its_pages() -> None:
    maps = (
        "7f00aa000000 default file=/dev/shm/a mapped=9 N0=9 kernelpagesize_kB=4\n"
        "7f00bb000000 bind:1 file=/dev/shm/b mapped=12 N0=2 N1=10 kernelpagesize_kB=4\n"
        "7f00cc000000 default file=/lib/c\n"
    )
    assert [
        memory_node(maps, int(at, 16)) for at in ("7f00aa000000", "7f00bb000000", "7f00cc000000", "bb")
    ] == [*(0, 1, -1, -1)]


@pytest.mark.parametrize(
    ("name", "environment", "tensor_parallel", "expected"),
    [
        ("cuda", {}, 1, ""),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 1, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HSA_ENABLE_SDMA": "0"}, 4, ""),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 1, ""),
        ("rocm", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GPU_MAX_HW_QUEUES": "4"}, 1, ""),
        ("rocm", {"HSA_ENABLE_SDMA": "0"}, 1, "HSA_ENABLE_SDMA=0"),
        ("rocm", {"GPU_MAX_HW_QUEUES": "2", "HSA_ENABLE_SDMA": "1"}, 1, "GPU_MAX_HW_QUEUES=2"),
    ],
)
def test_settings_that_have_copies_hinder_training_are_named(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    environment: dict[str, str],
    tensor_parallel: int,
    expected: str,
) -> None:
    monkeypatch.setattr(Cuda, "name", name)
    said = Cuda().settings_to_change(environment, tensor_parallel)
    assert [text.split()[0] for text in said] == ([expected] if expected else [])
