"""As ``engine_job.py``, with DeepSpeed's own Adam for the host, whose operator is built by then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine_cases import COMPILED
from engine_runs import run

from tests.engine.ranks import be_a_rank
from tests.machine import FP16_MISSING


def results(root: Path) -> dict[str, Any]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    able = [name for name in COMPILED if "fp16" not in name or not FP16_MISSING]
    return {name: run(COMPILED[name], root / name) for name in able}


if __name__ == "__main__":
    be_a_rank(results)
