"""Killed between data and parity, with another node lost: the older version, never a mixture. Every point,
and Reed-Solomon: ``make faults``."""

from __future__ import annotations

import pytest

from reft.config import FaultPoint
from tests.faults.job import Scratch
from tests.faults.write_hole import HOLES, run_hole

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.mark.nightly
def test_p5_data_and_parity_of_different_versions_never_mix(scratch: Scratch) -> None:
    points = (FaultPoint.DURING_PARITY, FaultPoint.BEFORE_SEAL)
    found, problems = run_hole(scratch, HOLES[0], points)
    assert problems == [], found
    assert [struck.point for struck in found] == list(points)
