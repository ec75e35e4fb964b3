"""The checksums that peers compare, taken of a device while the host runs ahead."""

from __future__ import annotations

import pytest
import torch

from reft.device import Vendor
from reft.grid import VersionId
from reft.snapshot.device_engine import DeviceCopyEngine
from reft.snapshot.gate import Gate
from reft.snapshot.plan import LiveImages
from reft.state.catalogue import SectionImage
from reft.verify.peers import PeerCheck
from tests.device.conftest import hold


def sums_of(
    tensors: list[torch.Tensor], vendor: Vendor, change: bool, by_turns: bool = False, step: int = 1
) -> dict[int, int]:
    engine = DeviceCopyEngine(tensors[0].device, vendor)
    images = LiveImages(
        SectionImage([(str(i), t) for i, t in enumerate(tensors)]), SectionImage([]), None
    )
    check = PeerCheck(by_turns=by_turns, block_bytes=4096, chunk_bytes=1000)
    go = hold(vendor)
    engine.begin()
    check.read(images, VersionId(1, step), engine, Gate())
    engine.fence()
    if change:
        for tensor in tensors:
            tensor.zero_()
    go()
    engine.synchronize()
    engine.close()
    return check.sums


@pytest.mark.gpu
def test_sums_of_a_device_are_of_the_versions_state_and_see_every_flip(vendor: Vendor) -> None:
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(n, generator=generator) for n in (5000, 1, 70)]
    host += [torch.randn(n, generator=generator).to(torch.bfloat16) for n in (3, 4099)]

    def fresh(flip: int | None = None) -> list[torch.Tensor]:
        made = [t.to(vendor.type) for t in host]
        if flip is not None:
            flat = host[flip % len(host)].clone().view(torch.uint8)
            flat[flip * 7 % len(flat)] ^= 1 << flip % 8
            made[flip % len(host)] = flat.view(host[flip % len(host)].dtype).to(vendor.type)
        return made

    expected = sums_of(fresh(), vendor, change=False)
    assert sums_of(fresh(), vendor, change=True) == expected
    for flip in range(12):
        found = sums_of(fresh(flip), vendor, change=True)
        assert sum(found[block] != expected[block] for block in expected) == 1
    assert sums_of(fresh(), vendor, change=False, by_turns=True, step=2) == {2: expected[2]}
    assert not sums_of(fresh(), vendor, change=False, by_turns=True, step=30)  # no block's turn
    moved = fresh()
    moved[0][:2] = moved[0][:2].flip(0)
    assert sums_of(moved, vendor, change=False) != expected
