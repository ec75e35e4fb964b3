"""Runs a training script several times within the test process: undisturbed, and cut off where a step begins."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from reft.engine.attach import find_session
from reft.wrapping import wrap

SECS = 30.0
Row = tuple[str, ...]
Script = Callable[["Life"], None]


class CutOffError(Exception):
    """The life ends here, as by SIGKILL: nothing of it is finished."""


@contextmanager
def one_rank(root: Path) -> Iterator[None]:
    """This process is the only rank of a gloo job."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "REFT_NODE_ID": "node0"}
    before = dict(os.environ)
    os.environ.update(world)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.distributed.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        os.environ.clear()
        os.environ.update(before)


def mlp(width: int = 16) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 8))


def batch(step: int, samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(step))


class Life:
    """One start of a script. ``until``: the step after which it is cut off, where the next one begins; or None.

    Attributes:
        rows: what the script has computed, by step.
    """

    def __init__(self, root: Path, job: str, steps: int, until: int | None) -> None:
        self.root, self.job, self.steps, self.until = root, job, steps, until
        self.rows: dict[int, Row] = {}
        self.engine: Any = None
        self._begun = -1  # the step that a training forward has begun last

    def initialize(
        self,
        model: nn.Module,
        *,
        zero: int = 0,
        config: dict[str, Any] | None = None,
        accept: tuple[str, ...] = (),
        **how: Any,
    ) -> Any:
        block = {
            "enabled": True,
            "allow_unprotected": True,
            "job_id": self.job,
            "memory_dir": str(self.root / "memory"),
            "interval_steps": 1000,  # a version is taken where the life is cut off, and nowhere else
            "accept_changes": list(accept),
        }
        full: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "reft": block,
            **copy.deepcopy(config or {}),
        }
        if "optimizer" not in how:
            full.setdefault(
                "optimizer", {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
            )
            how.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
        self.engine = deepspeed.initialize(model=model, config=full, **how)[0]
        wrap(self.engine, "forward", self._forward)
        return self.engine

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        begins = engine.training and engine.global_steps != self._begun
        self._begun = engine.global_steps if engine.training else self._begun
        if self.until is not None and begins and engine.global_steps >= self.until:
            session = find_session(engine)
            assert session is not None
            assert session.flush(SECS)
            assert session.stats.committed_step == engine.global_steps, session.stats.last_error
            raise CutOffError
        return original(*args, **kwargs)

    def note(self, *values: Any) -> None:
        self.rows[self.engine.global_steps] = tuple(float(value).hex() for value in values)

    def train(
        self, loss_of: Callable[[torch.Tensor], torch.Tensor], step: int | None = None
    ) -> torch.Tensor:
        """One step on one micro-batch, which is a function of the step."""
        engine = self.engine
        loss = loss_of(engine(batch(engine.global_steps if step is None else step)))
        engine.backward(loss)
        engine.step()
        return loss


def square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def live(root: Path, script: Script, job: str, steps: int, until: int | None = None) -> Life:
    life = Life(root, job, steps, until)
    try:
        script(life)
    except CutOffError:
        pass
    finally:
        session = find_session(life.engine) if life.engine is not None else None
        if session is not None:
            session.close(1.0)
        life.engine = None
        gc.collect()
    return life


def resumed(
    root: Path, script: Script, cuts: tuple[int, ...] = (7,), steps: int = 12
) -> tuple[dict[int, Row], dict[int, Row]]:
    """What the script computes undisturbed, and what it computes when it is cut off after these steps."""
    undisturbed = live(root, script, "undisturbed", steps).rows
    rows: dict[int, Row] = {}
    for cut in (*cuts, None):
        rows |= live(root, script, "cut", steps, cut).rows
    return undisturbed, rows


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
