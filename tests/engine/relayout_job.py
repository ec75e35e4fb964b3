"""One life of a job that goes on in another layout, from what reft persisted; and the same steps by a job of that
layout that DeepSpeed itself loaded: from its universal checkpoint, or where it has none, from its checkpoint
if the replicas alone are others, and else from what the ranks had said of their parameters.

``root/life.json`` says which life it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reft
from reft.engine.deepspeed import session_of
from tests.engine.ranks import be_a_rank
from tests.engine.shared import commit_every_version, images_of
from tests.job.grid_job import BATCH, CONFIG, MICRO, RANK, Samples, engine_of
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {},
    "zero1-bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
if BF16_OPTIMIZER_IS_NEVER_MADE:
    del CASES["zero1-bf16"]
TIED = ("norm.weight", "norm.bias", "up.weight", "down.weight")
"""Parameters of the block that is the first and the last one."""
TIED_CASES = {f"tied-{case}": settings for case, settings in CASES.items()}
SETTINGS = CASES | TIED_CASES
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40}}}


def train(engine: Any, said: Any, until: int) -> list[str]:
    losses: list[str] = []
    said.tell = lambda ids, of_step: losses.append(" ".join(of_step))
    data, dp = Samples(), engine.grid.get_data_parallel_id()
    replicas = BATCH // MICRO // engine.gradient_accumulation_steps()
    means = []
    while engine.global_steps < until:
        first = BATCH * engine.global_steps
        micro = [
            range(first + MICRO * m, first + MICRO * (m + 1)) for m in range(dp, BATCH // MICRO, replicas)
        ]
        batches = [torch.utils.data.default_collate([data[i % len(data)] for i in ids]) for ids in micro]
        mean = float(engine.train_batch(iter(batches)))
        means.append(f"{mean.hex()} {engine.global_samples} {engine.get_lr()}")
    return [*means, *losses]


def said_of_parameters(engine: Any) -> dict[str, Any]:
    """Of an optimizer whose parameters are the model's own: each with its state, by name."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer = engine.optimizer
    return {
        "stage": engine.grid.get_stage_id(),
        "state": {
            names[id(p)]: (p.detach(), optimizer.state[p])
            for g in optimizer.param_groups
            for p in g["params"]
        },
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "engine": {n: vars(engine)[n] for n in ("global_steps", "global_samples")},
        "scheduler": engine.lr_scheduler.state_dict(),
    }


def set_parameters(engine: Any, said: list[dict[str, Any]], tp: int) -> None:
    """Cut each parameter, and what the optimizer has for it, for this rank."""
    slices: dict[str, list[Any]] = {}
    first: dict[str, int] = {}
    for rank in said:
        for name, value in rank["state"].items():
            if first.setdefault(name, rank["stage"]) == rank["stage"]:  # what is tied is on several
                slices.setdefault(name, []).append(value)
    part = RANK % tp

    def cut(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        if ".down." in name:
            return torch.cat(tensors, 1).chunk(tp, 1)[part].contiguous()
        if ".up." not in name:
            return tensors[0]
        both = zip(*(t.chunk(2) for t in tensors), strict=True)
        return torch.cat([torch.cat(matrix).chunk(tp)[part] for matrix in both])

    for name, p in engine.module.named_parameters():
        p.data.copy_(cut(name, [value for value, _ in slices[name]]))
        states = [state for _, state in slices[name]]
        engine.optimizer.state[p] = {
            key: value.clone() if value.dim() == 0 else cut(name, [state[key] for state in states])
            for key, value in states[0].items()
        }
    for live, group in zip(engine.optimizer.param_groups, said[0]["groups"], strict=True):
        live.update(group)
    vars(engine).update(said[0]["engine"])
    engine.lr_scheduler.load_state_dict(said[0]["scheduler"])
    vars(engine.lr_scheduler)["_last_lr"] = [g["lr"] for g in said[0]["groups"]]


def reference(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    universal = not case.endswith("zero0")
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    config = {**CONFIG, **SCHEDULER, **SETTINGS[case], **more}
    engine, said = engine_of(config, life["pp"], life["tp"], tied=tied_in(case, life))
    if universal or life["was"] == [life["pp"], life["tp"]]:
        engine.load_checkpoint(str(root / case / "checkpoint"), tag=life["since"] + "-universal" * universal)
    else:
        files = sorted((root / case / f"said-{life['since']}").glob("*.pt"))
        told = [torch.load(file, weights_only=False) for file in files]
        set_parameters(engine, told, life["tp"])
    return {"losses": train(engine, said, life["until"]), "images": images_of(engine)}


def tied_in(case: str, life: dict[str, Any]) -> tuple[str, ...]:
    return life.get("tied", TIED) if case in TIED_CASES else ()


def with_reft(root: Path, case: str, life: dict[str, Any], **model: Any) -> tuple[Any, Any]:
    torch.manual_seed(100)
    world = dist.get_world_size()
    nodes = life["nodes"] or world
    node, local = divmod(RANK, world // nodes)
    os.environ |= {"REFT_NODE_ID": f"node{node}", "LOCAL_RANK": str(local)}
    of = "memory" if life["nodes"] else f"memory-{life['until']}"
    block = {"enabled": True, "job_id": case, "memory_dir": str(root / case / of / f"node{node}")}
    block |= {"tolerance": 0, "block_bytes": 4096} | life["block"]
    if not life["nodes"]:
        block["persist"] = {"dir": str(root / case / "persisted")}
    config = {**CONFIG, **SCHEDULER, **SETTINGS[case], "reft": block}
    engine, said = engine_of(config, life["pp"], life["tp"], **{"tied": tied_in(case, life), **model})
    reft.attach(engine)
    return engine, said


def refused(root: Path, case: str, life: dict[str, Any], **model: Any) -> str:
    engine, _ = with_reft(root, case, life, **model)
    before = images_of(engine)
    with pytest.raises(reft.ReftError) as error:
        engine.load_checkpoint(str(root / "none"))
    assert images_of(engine) == before, "nothing was written"
    session_of(engine).close()
    dist.barrier()
    return str(error.value)


def digest_of_tied(engine: Any) -> dict[str, str]:
    """Of what this stage has of the block that is the first and the last one."""
    return {
        name: hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()
        for name, p in engine.module.tied_modules.named_parameters()
    }


def live(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    told = refused(root, case, life, blocks=8) if life["since"] else ""
    engine, said = with_reft(root, case, life)
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = session_of(engine)
    if session.config.recompute:
        commit_every_version(session)
    out = {
        "refused": told,
        "path": path,
        "begins": engine.global_steps,
        "losses": train(engine, said, life["until"]),
    }
    out["images"] = images_of(engine)
    out["tied"] = digest_of_tied(engine)
    session.worker.drain(60)
    out["recomputed"] = session.stats.to_json()["recomputed"]
    session.close()
    dist.barrier()
    tag = f"step{life['until']}"
    engine.save_checkpoint(str(root / case / "checkpoint"), tag=tag)
    if case.endswith("zero0") and engine.grid.get_data_parallel_id() == 0:
        folder = root / case / f"said-{tag}"
        folder.mkdir(exist_ok=True)
        torch.save(said_of_parameters(engine), folder / f"{engine.grid.get_stage_id():02d}-{RANK:02d}.pt")
    dist.barrier()
    if life["since"]:
        out["reference"] = reference(root, case, life)
    return out


def main(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    if life.get("refuse"):
        return {case: refused(root, case, life) for case in life["cases"]}
    return {case: live(root, case, life) for case in life["cases"]}


if __name__ == "__main__":
    be_a_rank(main)
