"""Trains small models through real DeepSpeed engines and resumes them from captured state.

Run by ``test_engines.py`` as one process per rank: ``engine_job.py OUT_DIR CASE...``. For every case:
train to step ``SNAP``, copy both images and the host state away, train on to ``END``; then build a fresh
engine with other random numbers, restore, train to ``END`` again and compare bit for bit (P8). Writes
``OUT_DIR/<case>.<rank>.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from engine_cases import CASES
from engine_refusals import refusals
from engine_runs import run

from reft.engine.install import avoid_build_at_start


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    avoid_build_at_start()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), verbose=False)
    rank = int(os.environ["RANK"])
    for name in names:
        try:
            result = refusals() if name == "refusals" else run(CASES[name], out / name)
        except Exception:
            result = {"error": traceback.format_exc()}
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            os._exit(1)  # the peers may be waiting for this rank: end them too
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's groups take seconds to tear down


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
