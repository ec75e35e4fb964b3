"""What the job scripts share: a small model, its groups, reft's block, and a digest of what a rank holds."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reft.state.adapters import adapter_for
from tests.engine.ranks import mse


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, *, last_bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width, bias=last_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mse(self.second(self.first(x).relu()), x)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]


def block_of(root: Path, job_id: str, **options: Any) -> dict[str, Any]:
    """reft's block, with a memory of this rank's own."""
    memory = root / f"memory{os.environ['RANK']}"
    return {"enabled": True, "job_id": job_id, "memory_dir": str(memory), **options}


def commit_every_version(session: Any, committed: Callable[[], object] = lambda: None) -> None:
    """Before the next step: none is left out on a busy machine. ``committed`` is called behind each."""
    submit = session.worker.submit

    def submit_and_wait(request: Any) -> None:
        request.must = True
        submit(request)
        assert request.done.wait(60)
        committed()

    session.worker.submit = submit_and_wait


def images_of(engine: Any) -> str:
    """Of the model, the masters and the moments on this rank, by name: DeepSpeed makes the moments of a universal
    checkpoint in the order of a set."""
    total = hashlib.sha256()
    for image in adapter_for(engine).images():
        for spec, offset in sorted(zip(image.specs, image.offsets, strict=True), key=str):
            memory = torch.zeros(spec.nbytes, dtype=torch.uint8)
            image.read_into(offset, memory)
            total.update(f"{spec}".encode() + memory.numpy().tobytes())
    return total.hexdigest()


class Told(logging.Handler):
    """Collects what a logger is told of this level while it is entered, with the names of the errors whose
    tracebacks are told."""

    def __init__(self, logger: str, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._logger = logging.getLogger(logger)
        self.texts: list[str] = []
        self.tracebacks: list[str] = []

    def __enter__(self) -> Told:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if record.exc_info and record.exc_info[0] is not None:
            self.tracebacks.append(record.exc_info[0].__name__)
