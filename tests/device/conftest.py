"""The simulated device, as new for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reft.device import VENDORS
from tests.device.simulated import NAME, Simulated, SimulatedVendor, simulated


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    device = simulated()
    monkeypatch.setitem(VENDORS, NAME, SimulatedVendor(device))
    device.reset()
    yield device
    device.reset()
