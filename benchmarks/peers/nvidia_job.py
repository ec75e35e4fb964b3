"""The training script of ``mttr.py`` with NVIDIA's local checkpoints in the place of DeepSpeed's:
``save_checkpoint`` writes to the memory of this node and of a peer's, ``load_checkpoint`` takes the
newest.

    nvidia_job.py PACKAGES ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
sys.path.append(sys.argv.pop(1))

import torch  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402

from examples.llama import pretrain  # noqa: E402
from peers.savers import nvidia_manager, on_cpu  # noqa: E402

COUNTERS = ("global_steps", "global_samples", "micro_steps")


def manager(engine: Any, made: list[Any] = []) -> Any:  # noqa: B006
    if not made:
        made.append(nvidia_manager(Path(os.environ["PEERS_MEMORY"])))
    return made[0]


def save(engine: Any, *args: Any, **options: Any) -> None:
    state = {
        "model": engine.module.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "scheduler": engine.lr_scheduler.state_dict(),
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "random": torch.get_rng_state(),
    }
    manager(engine).save(on_cpu(state), engine.global_steps)


def load(engine: Any, *args: Any, **options: Any) -> tuple[None, None]:
    if manager(engine).find_latest() != -1:
        on_cpu({})  # prepares its class
        state = manager(engine).load()[0].state_dict
        engine.module.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.lr_scheduler.load_state_dict(state["scheduler"])
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        torch.set_rng_state(state["random"])
    return None, None


if __name__ == "__main__":
    DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = save, load
    sys.exit(pretrain.main())
