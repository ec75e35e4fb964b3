"""What a rank tries on its own device at attach, and the paragraph that says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reft import optim
from reft.device import Cuda, Vendor
from reft.policy.choice import DeviceFindings, device_paragraph, memory_node, try_device
from reft.snapshot.device_engine import DeviceCopyEngine
from tests.device.simulated import NAME, Simulated, SimulatedVendor
from tests.protect.test_backends import WrongBytes

FOUND = DeviceFindings("cuda", 3, 20e9, adam_is_exact=True)


def tried(vendor: Vendor, directory: Path) -> DeviceFindings:
    found, engine = (
        DeviceFindings(vendor.name, 1),
        DeviceCopyEngine(torch.device(vendor.type), vendor),
    )
    before = torch.random.get_rng_state()
    try_device(found, vendor, engine, directory, parities=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not list(directory.iterdir())
    assert not getattr(vendor.module, "registrations", 0)
    engine.close()
    return found


@pytest.mark.gpu
def test_a_device_is_tried_with_real_copies_parities_and_steps(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if simulated := vendor.type == NAME:
        monkeypatch.setattr("reft.policy.choice.memory_node", lambda maps, address: 0)
        monkeypatch.setattr(SimulatedVendor, "node", 0)
        vendor.module.settings.bytes_per_sec = 1e9
    found = tried(vendor, tmp_path)
    assert (found.adam_is_exact, found.to_change) == (True, [])
    assert 0 < found.copy_bytes_per_sec < (1.1e9 if simulated else 1e12)
    assert found.adam_parameters_per_sec > 0


def test_a_device_is_tried_where_the_host_says_nothing_of_numa_nodes(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("reft.policy.choice.NUMA_MAPS", tmp_path.parent / "missing", raising=False)
    found = tried(SimulatedVendor(sim), tmp_path)
    assert (found.adam_is_exact, found.to_change) == (True, [])


def test_p6_what_a_device_does_otherwise_is_found_and_ends_nothing(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rounds_up(v: torch.Tensor, out: torch.Tensor) -> None:
        torch.sqrt(v, out=out)
        if v.device.type != "cpu":
            out.view(torch.int32).add_(1)

    monkeypatch.setattr(optim, "square_root", rounds_up)
    monkeypatch.setattr("reft.policy.choice.backend_for", lambda buffer: WrongBytes())
    monkeypatch.setattr("reft.policy.choice.memory_node", lambda maps, address: 1)
    monkeypatch.setattr(SimulatedVendor, "node", 0)
    found = tried(SimulatedVendor(sim), tmp_path)
    assert not found.adam_is_exact
    numa, parities = found.to_change
    assert (
        "host memory is on NUMA node 1, the device on 0: start the rank with numactl --cpunodebind=0"
        in numa
    )
    assert 'write "protection": "arc"' in parities
    monkeypatch.setattr(sim, "Event", None)
    (said,) = tried(SimulatedVendor(sim), tmp_path).to_change
    assert "the device could not be tried out (TypeError" in said


def test_one_paragraph_says_what_was_found_and_what_to_change_on_which_rank() -> None:
    odd = replace(
        FOUND, adam_is_exact=False, copy_bytes_per_sec=9e9, free_cores=1, to_change=["a", "b"]
    )
    assert device_paragraph([FOUND, replace(FOUND, copy_bytes_per_sec=25e9)], "ab").endswith(
        "reft.ExactAdam steps as on a host; copies into host memory run at 20 (rank 0) to 25 GB/s; every rank has 3 "
        "cores or more to spare. To change: nothing"
    )
    assert device_paragraph([FOUND, replace(odd, to_change=["a"]), odd], "abc") == (
        "tried on cuda: reft.ExactAdam steps NOT as on a host; copies into host memory run at 9 (rank 1) to 20 GB/s; "
        "every rank has 1 cores or more to spare. To change: a (rank 1, 2 in all); b (rank 2, 1 in all)"
    )


@pytest.mark.parametrize(
    ("gigabytes", "named"),
    [
        ((20, 9.9, 20, 20), {1: 20}),
        ((20, 10, 20, 20), {}),
        ((20, 9, 1, 30), {2: 14.5}),
        ((20, 0, 20, 1), {3: 20}),  # rank 1 could not be tried out, which is said of it
        ((0, 0), {}),
    ],
)
def test_a_rank_that_copies_at_less_than_half_of_the_median_is_named_with_its_node(
    gigabytes: tuple[float, ...], named: dict[int, float]
) -> None:
    said = device_paragraph([replace(FOUND, copy_bytes_per_sec=g * 1e9) for g in gigabytes], "abcd")
    change = "; ".join(
        f"rank {rank} on node {'abcd'[rank]} copies at {gigabytes[rank]:.3g} GB/s, less than half of the median "
        f"{usual}: look at its link to the host, or replace the node"
        for rank, usual in named.items()
    )
    assert said.endswith(f"To change: {change or 'nothing'}")


def test_the_numa_node_of_memory_is_that_of_most_of_its_pages() -> None:
    maps = (
        "7f00aa000000 default file=/dev/shm/a mapped=9 N0=9 kernelpagesize_kB=4\n"
        "7f00bb000000 bind:1 file=/dev/shm/b mapped=12 N0=2 N1=10 kernelpagesize_kB=4\n"
        "7f00cc000000 default file=/lib/c\n"
    )
    assert [
        memory_node(maps, int(at, 16))
        for at in ("7f00aa000000", "7f00bb000000", "7f00cc000000", "bb")
    ] == [*(0, 1, -1, -1)]


@pytest.mark.parametrize(
    ("name", "environment", "tensor_parallel", "expected"),
    [
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 1, ["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HSA_ENABLE_SDMA": "0"}, 4, []),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 1, []),
        ("rocm", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GPU_MAX_HW_QUEUES": "4"}, 1, []),
        ("rocm", {"HSA_ENABLE_SDMA": "0"}, 1, ["HSA_ENABLE_SDMA=0"]),
        ("rocm", {"GPU_MAX_HW_QUEUES": "2", "HSA_ENABLE_SDMA": "1"}, 1, ["GPU_MAX_HW_QUEUES=2"]),
    ],
)
def test_settings_that_have_copies_hinder_training_are_named(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    environment: Any,
    tensor_parallel: int,
    expected: list[str],
) -> None:
    monkeypatch.setattr(Cuda, "name", name)
    assert [
        text.split()[0] for text in Cuda().settings_to_change(environment, tensor_parallel)
    ] == expected
