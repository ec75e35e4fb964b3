"""Saves and loads by DeepSpeed alone, in one process. Tells for every engine what reft says of its checkpoints, from the
engine and from its table of releases, and how loading one ended."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from reft.checks.preflight import unloadable
from reft.state.supported import explain_not_loadable
from tests.engine.ranks import be_a_rank, mse

BF16, ZERO1 = {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}
CONFIGS: dict[str, dict[str, Any]] = {
    "pipeline fp32 0": {},
    "pipeline bf16 0": BF16,
    "pipeline bf16 1": {**BF16, **ZERO1},
    "pipeline bf16 1 fp32": {**BF16, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
    "plain bf16 0": BF16,
}


def save_and_load(name: str, directory: Path) -> dict[str, str | None]:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = name.startswith("pipeline")
    module: Any = nn.Sequential(*layers)
    if pipeline:
        module = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=mse)
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9}
    config |= {"zero_allow_untested_optimizer": True, **copy.deepcopy(CONFIGS[name])}
    optimizer = torch.optim.Adam(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    said = {
        "said": explain_not_loadable(engine),
        "listed": unloadable(CONFIGS[name], deepspeed.__version__),
    }
    batch = torch.ones(2, 4, dtype=torch.bfloat16 if "bf16" in CONFIGS[name] else torch.float32)
    with torch.set_grad_enabled(True):
        if pipeline:
            engine.train_batch(iter([(batch, batch)]))
        else:
            engine.backward(mse(engine(batch), batch))
            engine.step()
    engine.save_checkpoint(str(directory))
    try:
        engine.load_checkpoint(str(directory))
    except (AttributeError, KeyError) as error:
        return {**said, "failed": repr(error)}
    return {**said, "failed": None}


def results(root: Path) -> dict[str, Any]:
    return {name: save_and_load(name, root / name.replace(" ", "-")) for name in CONFIGS}


if __name__ == "__main__":
    be_a_rank(results)
