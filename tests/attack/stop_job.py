"""Two data-parallel ranks whose snapshot workers have lost each other, and that are told to stop."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import deepspeed
import torch

import reft
from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start
from reft.errors import TransferError
from tests.engine.traffic_job import make, train

avoid_build_at_start()


def main(root: Path) -> None:
    torch.set_num_threads(1)
    logging.basicConfig()
    deepspeed.init_distributed("gloo", verbose=False)
    rank = int(os.environ["RANK"])
    memory = root / f"memory{rank}"
    block = {"enabled": True, "job_id": "stop", "memory_dir": str(memory), "grace_secs": 4}
    engine = make(0, block)
    engine.load_checkpoint(str(root / "none"))
    train(engine)
    session = session_of(engine)
    assert session is not None
    assert session.worker is not None
    if rank == 1:

        def lose(*args: object, **options: object) -> None:
            raise TransferError("lost by the test")

        session.worker.control.rejoin = lose  # type: ignore[method-assign]
        session.worker.votes.cast = lose  # type: ignore[method-assign]
    train(engine)
    (root / f"ready-{rank}").write_text(str(os.getpid()))
    while True:
        train(engine)


if __name__ == "__main__":
    assert reft.__file__
    main(Path(sys.argv[1]))
