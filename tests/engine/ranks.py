"""Starts the ranks of a job script, each a node of its own, and is what such a script calls."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reft.state.adapters import adapter_for
from reft.state.idle import GRADIENT, MASTER_GRADIENT
from tests.machine import free_port
from tests.prefork import Popen

if TYPE_CHECKING:
    import torch


def run_ranks(
    job: Path, root: Path, world: int = 2, timeout_secs: float = 500, *, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Run ``job`` once per rank, all on this machine and on this type of device, and return what each of them wrote.
    Raises AssertionError: a rank failed; the message is the end of its output."""
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("REFT_", "TORCHELASTIC"))}
    shared = {
        **clean,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            p for p in (clean.get("PYTHONPATH"), str(job.parents[2])) if p
        ),
        "LOCAL_RANK": "0",
        "TEST_DEVICE": device,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        Popen(
            [sys.executable, str(job), str(root)],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        # Of all at once: a rank whose pipe is full waits, and the others wait for it.
        with ThreadPoolExecutor(world) as readers:
            logs = list(readers.map(lambda r: r.communicate(timeout=timeout_secs)[0], ranks))
    finally:
        for r in ranks:
            r.kill()
    # The last one may have failed first, and taken the others along.
    failed = [log[-4000:] for r, log in zip(ranks, logs, strict=True) if r.returncode]
    assert not failed, "\n".join(failed)
    return [json.loads((root / f"result-{rank}.json").read_text()) for rank in range(world)]


def run_life(job: Path, root: Path, world: int = 2, **life: Any) -> list[dict[str, Any]]:
    """Run a ``job`` that reads which life it is from ``root/life.json``."""
    (root / "life.json").write_text(json.dumps(life))
    return run_ranks(job, root, world)


def mse(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean squared error, in fp32: torch 2.4 has none in bf16 on a CPU."""
    return (found.float() - wanted.float()).square().mean()


def join_group() -> None:
    """Make this process a rank of a gloo job of single-threaded processes, on the device of :func:`run_ranks`,
    without the operator that DeepSpeed would build for its group, which takes minutes."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    backend, device = "gloo", os.environ.get("TEST_DEVICE", "cpu")
    if device != "cpu":
        from tests.device.accelerator import use_device

        backend = use_device(device)
    deepspeed.init_distributed(backend, verbose=False)


def be_a_rank(main: Callable[[Path], dict[str, Any]]) -> None:
    """The body of a job script: call ``main`` with the directory of the run, as a rank of a job, and leave what
    it returns to :func:`run_ranks`."""
    import torch

    join_group()
    os.environ["REFT_NODE_ID"] = f"node{os.environ['RANK']}"
    root = Path(sys.argv[1])
    result = main(root)
    (root / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)


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
    """Where it is taken: none is left out on a busy machine. ``committed`` is called after each."""
    submit = session.worker.submit

    def submit_and_wait(request: Any) -> None:
        request.required = True
        submit(request)
        session.worker.drain(60)
        assert request.done.wait(60)
        committed()

    session.worker.submit = submit_and_wait


def images_of(engine: Any) -> str:
    """Of the model, the masters and the moments on this rank, by name: DeepSpeed makes the moments of a universal
    checkpoint in the order of a set. Without the gradients of idle parameters, which only a protected engine records."""
    total = hashlib.sha256()
    for image in adapter_for(engine).images():
        for spec, offset in sorted(zip(image.specs, image.offsets, strict=True), key=str):
            if spec.name.startswith((GRADIENT, MASTER_GRADIENT)):
                continue
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
