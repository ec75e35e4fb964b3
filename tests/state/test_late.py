"""P8 without waiting: buffers on a device are part of the version, with the values of its step."""

from __future__ import annotations

import pytest
import torch

from reft.device import Vendor
from reft.state.blob import DecodedBlob, HostBlob, LateBlob
from reft.state.catalogue import SectionImage
from tests.device.conftest import hold, sim, vendor

__all__ = ["sim", "vendor"]

BUFFERS = {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
    "bf16": torch.arange(7, dtype=torch.bfloat16),
    "mask": torch.tensor([[True, False], [False, True]]),
    "empty": torch.empty((0, 4)),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "complex": torch.tensor([1 + 2j, -0.0j], dtype=torch.complex128),
}


def encode(state: dict) -> bytes | LateBlob:
    images = (SectionImage([]), SectionImage([]))
    rest = {"rng": None, "adapter": {"layout": [], "state": []}}
    return HostBlob().prepare(lambda *_: b"", images, "signature", {**rest, **state})()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


@pytest.mark.parametrize("on_device", [set(), {"scalar"}, {"nan", "mask", "empty"}, set(BUFFERS)], ids=len)
def test_late_buffers_come_back_bit_by_bit(on_device: set[str], vendor: Vendor) -> None:
    live = {name: b.to(vendor.type) if name in on_device else b.clone() for name, b in BUFFERS.items()}
    block = encode({"buffers": live, "engine": {"global_steps": 4}})
    for buffer in live.values():
        buffer.zero_()  # the next forward pass changes them
    if on_device:
        assert isinstance(block, LateBlob)
        length = len(block)
        block.settle()
        block.settle()
        assert len(block) == length, "the layout of the version depends on its length"
    decoded = DecodedBlob(bytes(block)).state
    assert decoded["engine"] == {"global_steps": 4}
    assert set(decoded["buffers"]) == set(BUFFERS)
    for name, value in BUFFERS.items():
        assert same_bits(decoded["buffers"][name], value), name


def test_without_buffers_on_a_device_the_block_is_as_ever() -> None:
    assert type(encode({"buffers": {"a": torch.ones(2)}})) is bytes


def test_values_of_a_device_are_those_of_the_boundary_and_nobody_waits_for_it(vendor: Vendor) -> None:
    buffer = torch.zeros(1000, device=vendor.type)
    vendor.module.synchronize()
    go = hold(vendor)
    buffer.fill_(1.0)
    before = vendor.module.current_stream().record_event()
    block = encode({"buffers": {"b": buffer}})
    assert isinstance(block, LateBlob)
    assert not before.query(), "capturing waited for the device"
    buffer.fill_(2.0)
    go()
    block.settle()
    assert torch.equal(DecodedBlob(bytes(block)).state["buffers"]["b"], torch.ones(1000))
