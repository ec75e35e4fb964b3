"""Three data-parallel ranks. A node's memory is lost, the state is restored, and before any step is trained the
next node's memory is lost too: what was restored has to be as well protected as before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reft.engine.deepspeed import session_of
from reft.recover.inventory import take_inventory
from tests.engine.aor_job import USUAL, make, train
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of, images_of

RANK = int(os.environ.get("RANK", "0"))
PROTECTIONS = ("arc", "aec")
LOST = (1, 2, 0)  # Nodes, in the order in which they are lost, each before a step is trained
STEPS = 3


def lose(memory: Path, node: int) -> None:
    if node == RANK:
        shutil.rmtree(memory)
    dist.barrier()


def run(root: Path, protection: str) -> dict[str, Any]:
    block = block_of(root / protection, protection, block_bytes=4096, protection=protection)

    def begin() -> tuple[Any, Any]:
        engine = make(USUAL, block)
        path, _ = engine.load_checkpoint(str(root / "none"))
        return engine, path

    engine, _ = begin()
    train(engine, STEPS)
    session = session_of(engine)
    session.worker.drain(60)
    trained = images_of(engine)
    session.close()
    restored = []
    for node in LOST:
        lose(Path(block["memory_dir"]), node)
        engine, path = begin()
        session = session_of(engine)
        job = session.memory.job_dir
        newest = max(r.header.label for r in take_inventory(job.path, "here", job.secret).arenas if r.usable)
        restored.append({"path": path, "digest": images_of(engine), "incarnation": newest.incarnation})
        session.close()
        dist.barrier()
    return {"trained": trained, "restored": restored}


if __name__ == "__main__":
    be_a_rank(lambda root: {protection: run(root, protection) for protection in PROTECTIONS})
