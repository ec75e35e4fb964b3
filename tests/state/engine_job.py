"""Trains small models through real DeepSpeed engines and resumes them from captured state.

Run by ``test_engines.py`` as one process per rank. For every case: train to step ``SNAP``, copy both images and the
host state away, train on to ``END``; then build a fresh engine with other random numbers, restore, train to ``END``
again and compare bit for bit (P8).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine_cases import ADAPTERS, CASES
from engine_refusals import refusals
from engine_runs import run

from tests.engine.ranks import be_a_rank
from tests.machine import FP16_MISSING


def results(root: Path) -> dict[str, Any]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Pipelines last: DeepSpeed keeps their grid for every later engine of the process.
    names = sorted(ADAPTERS, key=lambda name: name.startswith("pipe"))
    able = [name for name in names if "fp16" not in name or not FP16_MISSING]
    return {"refusals": refusals(), **{name: run(CASES[name], root / name) for name in able}}


if __name__ == "__main__":
    be_a_rank(results)
