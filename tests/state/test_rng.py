"""P8, trap 7: every generator continues where the snapshot found it, and late buffers come back without waiting."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from reft.device import Vendor
from reft.errors import LayoutError, UnsupportedStateError
from reft.state import codec
from reft.state.blob import DecodedBlob, HostBlob, LateBlob, capture_rng, restore_rng
from reft.state.catalogue import SectionImage
from tests.device.conftest import hold, sim, vendor

__all__ = ["sim", "vendor"]


def draw() -> tuple[Any, ...]:
    """One number of every kind that keeps something back (the second Gaussian)."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(2).tolist(),
        torch.randn(3).tolist(),
    )


def test_all_generators_continue_where_they_were() -> None:
    draw()  # leaves a second Gaussian in Python's and NumPy's generators
    state = codec.encode(capture_rng())
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_rng(codec.decode(state))
    assert [draw() for _ in range(3)] == expected


class Tracker:
    """Megatron's tracker: named states, kept as tensors or (for CUDA graphs) as generators."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A module in Megatron's place, since Megatron itself needs a GPU to be imported."""
    tracker = Tracker({})
    module = types.ModuleType("megatron.core.tensor_parallel.random")
    module.get_cuda_rng_tracker = lambda: tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return tracker


def test_trackers_with_tensors_and_generators(megatron: Tracker) -> None:
    generator = torch.Generator().manual_seed(5)
    megatron.states = {"model": torch.get_rng_state(), "graph": generator}
    state = codec.decode(codec.encode(capture_rng()))
    expected = torch.rand(4, generator=generator)
    wanted = megatron.states["model"].clone()
    megatron.states["model"].zero_()
    restore_rng(state)
    assert megatron.states["graph"] is generator
    assert torch.equal(torch.rand(4, generator=generator), expected)
    assert torch.equal(megatron.states["model"], wanted)


def test_unknown_tracker_states_are_refused(megatron: Tracker) -> None:
    megatron.states = {"model": object()}
    with pytest.raises(UnsupportedStateError, match=r"builtins\.object"):
        capture_rng()


def test_a_missing_tracker_is_an_error(megatron: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.states = {"model": torch.get_rng_state()}
    state = capture_rng()
    monkeypatch.delitem(sys.modules, "megatron.core.tensor_parallel.random")
    with pytest.raises(LayoutError, match="tensor_parallel"):
        restore_rng(state)


def test_another_device_is_an_error() -> None:
    state = {**capture_rng(), "device": {"name": "cuda", "state": torch.get_rng_state()}}
    if not torch.cuda.is_available():
        with pytest.raises(LayoutError, match="cuda"):
            restore_rng(state)


def test_a_device_s_generator_goes_on_where_it_was(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.accelerator", raising=False)  # which knows none
    torch.rand(3, device=vendor.type)
    state = codec.decode(codec.encode(capture_rng()))
    drawn = torch.rand(3, device=vendor.type).cpu()
    restore_rng(state)
    assert torch.equal(torch.rand(3, device=vendor.type).cpu(), drawn)


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


@pytest.mark.parametrize(
    "on_device", [set(), {"scalar"}, {"nan", "mask", "empty"}, set(BUFFERS)], ids=len
)
def test_late_buffers_come_back_bit_by_bit(on_device: set[str], vendor: Vendor) -> None:
    live = {
        name: b.to(vendor.type) if name in on_device else b.clone() for name, b in BUFFERS.items()
    }
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


def test_values_of_a_device_are_those_of_the_boundary_and_nobody_waits_for_it(
    vendor: Vendor,
) -> None:
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
