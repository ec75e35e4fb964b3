"""Trains several layouts one after the other in one process group; run by ``torchrun``.

Usage: worker.py CASES.json OUT_DIR. Each case is {"name", "argv", "steps"}; every rank writes
``OUT_DIR/<name>-<rank>.pt`` with its losses, its coordinate and its weights before and after.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from examples.llama import train
from examples.llama.model_config import degrees_for
from examples.llama.options import parse
from examples.llama.tensor_parallel import RowParallelLinear, sharded_parameters
from reft.tools.planning.job import Layout


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in module.named_parameters()}


def shard_dims(module: torch.nn.Module) -> dict[str, int]:
    rows = {m.weight for m in module.modules() if isinstance(m, RowParallelLinear)}
    sharded = sharded_parameters(module)
    return {n: int(p in rows) for n, p in module.named_parameters() if p in sharded}


def run(case: dict, out: Path) -> None:
    options = parse(case["argv"])
    config = options.model_config()
    layout: Layout = train.choose_layout(
        options, degrees_for(dist.get_world_size(), options.pp, options.tp, options.dp)
    )
    samples = train.training_samples(options, config)
    engine = train.build_engine(options, config, layout)
    data = train.micro_batch_iterator(engine, options, config, layout, samples)
    result = {
        "at": layout.coordinate(dist.get_rank()),
        "initial": weights(engine.module),
        "shards": shard_dims(engine.module),
        "losses": [float(engine.train_batch(data)) for _ in range(case["steps"])],
        "final": weights(engine.module),
    }
    torch.save(result, out / f"{case['name']}-{dist.get_rank()}.pt")


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    train.import_deepspeed(verbose=False)
    options = parse(cases[0]["argv"])
    samples = train.training_samples(options, options.model_config())
    train.init_processes(options, samples)
    for case in cases:
        try:
            run(case, out)
        except Exception:
            print(f"rank {os.environ['RANK']}: case {case['name']} failed", file=sys.stderr)
            raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
