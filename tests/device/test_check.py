"""What a rank tries on its own device at attach, and the paragraph that says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reft import optim
from reft.device import Vendor
from reft.engine.checks.start import DeviceFindings, device_paragraph, try_device
from reft.snapshot.copying.device import DeviceCopyEngine
from tests.device.simulated import NAME, Simulated, SimulatedVendor
from tests.protect.test_backends import WrongBytes

FOUND = DeviceFindings("cuda", 3, 20e9, adam_is_exact=True)


def tried(vendor: Vendor, directory: Path) -> DeviceFindings:
    found, engine = DeviceFindings(vendor.name, 1), DeviceCopyEngine(torch.device(vendor.type), vendor)
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
        vendor.module.settings.bytes_per_sec = 1e9
    found = tried(vendor, tmp_path)
    assert (found.adam_is_exact, found.to_change) == (True, [])
    assert 0 < found.copy_bytes_per_sec < (1.1e9 if simulated else 1e12)
    assert found.adam_parameters_per_sec > 0


def test_p6_what_a_device_does_otherwise_is_found_and_ends_nothing(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rounds_up(v: torch.Tensor, out: torch.Tensor) -> None:
        torch.sqrt(v, out=out)
        if v.device.type != "cpu":
            out.view(torch.int32).add_(1)

    monkeypatch.setattr(optim, "square_root", rounds_up)
    monkeypatch.setattr("reft.engine.checks.start.backend_for", lambda buffer: WrongBytes())
    found = tried(SimulatedVendor(sim), tmp_path)
    assert not found.adam_is_exact
    (parities,) = found.to_change
    assert 'write "protection": "arc"' in parities
    monkeypatch.setattr(sim, "Event", None)
    (said,) = tried(SimulatedVendor(sim), tmp_path).to_change
    assert "the device could not be tried out (TypeError" in said


def test_one_paragraph_says_what_was_found_and_what_to_change_on_which_rank() -> None:
    odd = replace(FOUND, adam_is_exact=False, copy_bytes_per_sec=9e9, free_cores=1, to_change=["a", "b"])
    assert device_paragraph([FOUND, replace(FOUND, copy_bytes_per_sec=25e9)]).endswith(
        "reft.ExactAdam steps as on a host; copies into host memory run at 20 (rank 0) to 25 GB/s; every rank has 3 "
        "cores or more to spare. To change: nothing"
    )
    assert device_paragraph([FOUND, replace(odd, to_change=["a"]), odd]) == (
        "tried on cuda: reft.ExactAdam steps NOT as on a host; copies into host memory run at 9 (rank 1) to 20 GB/s; "
        "every rank has 1 cores or more to spare. To change: a (rank 1, 2 in all); b (rank 2, 1 in all)"
    )
