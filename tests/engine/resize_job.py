"""One life of a job that goes on with fewer or more replicas. Every rank is a node; the memory of a node that is
not of this life is out of reach. Behind a resize the same steps are made by a job of this layout that DeepSpeed
itself loaded: from its checkpoint, or its universal one where it cuts partitions.

``root/life.json`` says which life it is, and whether it goes on from the checkpoint that the script saved instead of
from memory.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reft
from reft.engine.deepspeed import session_of
from reft.engine.load.memory import MemoryRestorer
from reft.recover.inventory import Place
from tests.engine.ranks import be_a_rank
from tests.engine.shared import Mlp, groups, images_of
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE

RANK_GIVEN = "RANK" in os.environ
RANK = int(os.environ.get("RANK", "0"))
STEPS = 3  # of every life
BATCH, MICRO = 12, 2
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero1-bf16": {**BF16, "zero_optimization": {"stage": 1}},
    "zero1-bf16-accumulated": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}
if BF16_OPTIMIZER_IS_NEVER_MADE:
    del CASES["zero1-bf16"]
ROUND_ROBIN = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
"""What is refused at another degree."""
LIFE = json.loads((Path(sys.argv[1]) / "life.json").read_text()) if RANK_GIVEN else {}
DISK = LIFE.get("disk", False)
WIDTH = 16


def config(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40}},
        "gradient_clipping": 0.1,
        "steps_per_print": None,
        **case,
        **more,
    }


def block(root: Path, case: str) -> dict[str, Any]:
    # Blocks that cut the partitions at odd places.
    memory = str(root / case / (f"memory{RANK}" + f"-{LIFE['until']}" * DISK))
    return {"enabled": True, "job_id": case, "memory_dir": memory, "block_bytes": 4096, "tolerance": 0}


def make(settings: dict[str, Any]) -> Any:
    model = Mlp(
        WIDTH, 301
    )  # two groups of odd sizes: their parts are padded, and differently at every degree
    return reft.initialize(model=model, model_parameters=groups(model), config=settings)[0]


def batches(engine: Any) -> Iterator[torch.Tensor]:
    """This rank's micro-batches of the next step; those of all ranks are the same twelve samples at every
    degree."""
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    samples = torch.randn(BATCH, WIDTH, generator=generator)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for first in range(0, BATCH, MICRO * dist.get_world_size()):
        at = first + MICRO * RANK
        yield samples[at : at + MICRO].to(dtype)


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        total = torch.zeros(1)
        for batch in list(batches(engine)):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(f"{float(total).hex()} {engine.global_samples} {engine.get_lr()}")
    return losses


def reference(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    """A job of this layout, as DeepSpeed loads it."""
    universal = "zero_optimization" in CASES[case]
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = make(config(CASES[case], **more))
    engine.load_checkpoint(str(root / case / "checkpoint"), tag=life["tag"] + "-universal" * universal)
    return {"losses": train(engine, life["until"]), "images": images_of(engine)}


def interrupted(root: Path, case: str) -> None:
    """A start that fails when the state is restored, and not protected yet."""

    def fail(self: MemoryRestorer) -> None:
        raise InterruptedError

    engine = make({**config(CASES[case]), "reft": block(root, case)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryRestorer, "protect", fail)
        with pytest.raises(InterruptedError):
            engine.load_checkpoint(str(root / "none"))
    session_of(engine).close()
    dist.barrier()


def refusal(root: Path, case: str, settings: dict[str, Any]) -> str:
    """What a start with these settings says; the memory stays."""
    engine = make({**settings, "reft": block(root, case)})
    with pytest.raises(reft.ReftError) as refused:
        engine.load_checkpoint(saved_in(root, case))
    session_of(engine).close()
    dist.barrier()
    return f"{type(refused.value).__name__}: {refused.value}"


def saved_in(root: Path, case: str) -> str:
    return str(root / case / "checkpoint" if DISK else root / "none")


def undivided(root: Path) -> str:
    with pytest.raises(reft.ConfigError) as refused:
        make({**config({"train_batch_size": 14}), "reft": block(root, "zero1")})
    return str(refused.value)


def refused(root: Path, life: dict[str, Any]) -> dict[str, Any]:
    """What must not be taken up: the memory of ``zero1`` under another global batch and with another model, and
    that of a job which deals its parameters out by the degree."""
    case, settings = "round-robin", config(ROUND_ROBIN)
    if not life["tag"] or life["until"] > 2 * STEPS:
        engine = make({**settings, "reft": block(root, case)})
        path, _ = engine.load_checkpoint(str(root / "none"))
        train(engine, STEPS)
        session_of(engine).worker.drain(60)
        session_of(engine).close()
        dist.barrier()
        return {"path": path}
    more = config(CASES["zero1"], gradient_accumulation_steps=2)
    del more["train_batch_size"]
    return {
        "batch": refusal(root, "zero1", more),
        "division": undivided(root),
        "optimizer": refusal(root, "zero1", config(CASES["zero1"], gradient_clipping=0.5)),
        case: refusal(root, case, settings),
    }


def live(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(100 + RANK)
    random.seed(200 + RANK)
    if life["tag"] and not DISK:
        interrupted(root, case)
    engine = make({**config(CASES[case]), "reft": block(root, case)})
    path, _ = engine.load_checkpoint(saved_in(root, case))
    session = session_of(engine)
    job = session.memory.job_dir
    found = [r.header for r in Place(job.path, "here", job.secret).inventory().arenas if r.usable]
    out = {
        "path": path,
        "begins": engine.global_steps,
        "degrees": sorted({h.degrees.dp for h in found}),
        "losses": train(engine, life["until"]),
        "images": images_of(engine),
        "micro_steps": engine.micro_steps,
    }
    session.worker.drain(60)
    out["committed"] = session.stats.committed_step
    if not DISK:
        session.close()
    dist.barrier()
    engine.save_checkpoint(str(root / case / "checkpoint"), tag=f"step{life['until']}")
    session.close()
    dist.barrier()
    if life["tag"]:
        out["reference"] = reference(root, case, life)
    return out


def main(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {} if DISK else {"refused": refused(root, LIFE)}
    if DISK and LIFE["tag"]:
        more = config(CASES["zero0"], gradient_accumulation_steps=4)
        del more["train_batch_size"]
        out["refused"] = refusal(root, "zero0", more)
    return {**out, **{case: live(root, case, LIFE) for case in LIFE["cases"]}}


if __name__ == "__main__":
    be_a_rank(main)
