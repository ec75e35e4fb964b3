"""The simulated device, as new for every test, and those of every vendor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from reft.device import VENDORS, Vendor
from tests.device.simulated import NAME, Simulated, SimulatedVendor, missing, simulated


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    if why := missing():
        pytest.skip(why)
    device = simulated()
    monkeypatch.setitem(VENDORS, NAME, SimulatedVendor(device))
    device.reset()
    yield device
    device.reset()


@pytest.fixture
def at_hand(request: pytest.FixtureRequest) -> Vendor:
    """Of a test that is marked ``gpu`` a real device where there is one, of all others the simulated one."""
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        return VENDORS["cuda"]
    request.getfixturevalue("sim")
    return VENDORS[NAME]


@pytest.fixture(params=[NAME, pytest.param("cuda", marks=pytest.mark.gpu)])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    if request.param == NAME:
        request.getfixturevalue("sim")
    found = VENDORS[request.param]
    if not found.module.is_available():
        pytest.skip(f"needs a device of type {request.param}")
    return found


def hold(vendor: Vendor) -> Callable[[], None]:
    """Hold the current stream up; what is returned lets it go on."""
    if vendor.type == NAME:
        go: Callable[[], None] = vendor.module.hold()
        return go
    vendor.module._sleep(500_000_000)  # some tenths of a second
    return lambda: None
