"""One rank on DeepSpeed's plain engine whose script loads more than once, in every order.

A life is what a process does between its start and its end: an engine, loads, steps. The lives of a job share
its memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import reft
from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start
from reft.memory.arena import Arena
from reft.memory.header import ArenaState
from reft.protect.blocks import Section
from tests.engine.ranks import be_a_rank

avoid_build_at_start()

Loads = Callable[[Any], Any]
FIRST_LIFE, STEPS = 5, 8


class Heard(logging.Handler):
    """Warnings of reft."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def make(block: dict[str, Any] | None, weights: int = 7) -> Any:
    torch.manual_seed(weights)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "steps_per_print": None,
    }
    initialize = deepspeed.initialize if block is None else reft.initialize
    config |= {} if block is None else {"reft": block}
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(int(engine.global_steps)))
        loss = nn.functional.mse_loss(engine(x), x.flip(0))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    return losses


class Job:
    """A job whose script calls ``loads`` at its start."""

    def __init__(self, root: Path, name: str, loads: Loads, heard: Heard) -> None:
        self._block = {"enabled": True, "job_id": name, "memory_dir": str(root / "memory")}
        self._loads, self._heard = loads, heard
        self.memory = root / "memory" / name
        self.secret = b""

    def live(self, until: int, save_at: tuple[Path, int] | None = None) -> dict[str, Any]:
        """Start, load, train, die: the memory is left as a killed process would leave it."""
        self._heard.lines.clear()
        engine = make(self._block)
        session = session_of(engine)
        out: dict[str, Any] = {}
        try:
            loaded = self._loads(engine)
            out["returned"] = [str(x) for x in loaded] if isinstance(loaded, tuple) else loaded
            out["resumed_at"], out["incarnation"] = int(engine.global_steps), session.memory.incarnation
            if save_at is not None:
                train(engine, save_at[1])
                engine.save_checkpoint(str(save_at[0]))
            out["losses"] = train(engine, until)
            session.worker.drain(60)
            out["committed"] = session.stats.committed_step
        except reft.ReftError as error:
            out["refused"] = str(error)
        finally:
            self.secret = session.memory.job_dir.secret
            session.close()
        out["heard"] = list(self._heard.lines)
        return out


def base_weights(root: Path) -> str:
    engine = make(None, weights=1)
    train(engine, 3)
    engine.save_checkpoint(str(root / "base"), client_state={"of": "base"})
    return str(root / "base")


def reference(base: str | None) -> list[str]:
    """Losses of the undisturbed run, without reft."""
    engine = make(None)
    if base is not None:
        engine.load_checkpoint(base, load_module_only=True)
    return train(engine, STEPS)


def main(root: Path) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger("reft").addHandler(heard)
    logging.getLogger("reft").setLevel(logging.INFO)
    base = base_weights(root)
    out: dict[str, Any] = {"reference": reference(base), "from_scratch": reference(None)}

    def scripts(own: str) -> dict[str, Loads]:
        def base_first(engine: Any) -> Any:
            engine.load_checkpoint(base, load_module_only=True)
            return engine.load_checkpoint(own)

        def base_last(engine: Any) -> Any:
            found = engine.load_checkpoint(own)
            engine.load_checkpoint(base, load_module_only=True)
            return found

        def base_without_optimizer(engine: Any) -> Any:
            engine.load_checkpoint(base, load_optimizer_states=False, load_lr_scheduler_states=False)
            return engine.load_checkpoint(own)

        def base_by_tag(engine: Any) -> Any:
            engine.load_checkpoint(base, tag="global_step3")
            return engine.load_checkpoint(own)

        def twice(engine: Any) -> Any:
            engine.load_checkpoint(own)
            return engine.load_checkpoint(own)

        def only_base(engine: Any) -> Any:
            return engine.load_checkpoint(base, load_module_only=True)

        def nothing(engine: Any) -> Any:
            return None

        return {
            f.__name__: f
            for f in (base_first, base_last, base_without_optimizer, base_by_tag, twice, only_base, nothing)
        }

    for name in scripts(""):
        own = root / f"own-{name}"
        job = Job(root, name, scripts(str(own))[name], heard)
        # The script also saves, at a step that the memory is beyond.
        lives = [job.live(FIRST_LIFE, save_at=(own, 4)), job.live(STEPS)]
        out[name] = lives

    out["positional"] = positional(root, base)
    job = Job(root, "never_committed", lambda engine: engine.load_checkpoint(str(root / "none")), heard)
    out["never_committed"] = [job.live(1), uncommit(job), job.live(STEPS)]
    return out


def uncommit(job: Job) -> int:
    """Every version is whole but was never committed, and its weights are damaged. Returns how many are."""
    number = 0
    for path in job.memory.glob("*.arena"):
        with Arena.open(path, job.secret, writable=True) as arena:
            header = arena.header()
            if header is None or header.state is not ArenaState.COMMITTED:
                continue
            entries = list(header.entries)
            arena.begin(replace(header, state=ArenaState.WRITING, entries=()))
            weights = next(e for e in entries if e.key.section is Section.REPLICATED)
            arena.data[weights.arena_offset] ^= 0x40
            arena.seal(entries)
            number += 1
    return number


def positional(root: Path, base: str) -> dict[str, Any]:
    """Everything that DeepSpeed takes by position."""
    engine = make({"enabled": True, "job_id": "positional", "memory_dir": str(root / "memory")})
    out: dict[str, Any] = {}
    try:
        # load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        path, _ = engine.load_checkpoint(base, None, True, True, True, True)
        out["base"] = [Path(path).parent.name, int(engine.global_steps)]
        engine.load_checkpoint(load_dir=str(root / "none"))
        train(engine, 2)
        engine.save_checkpoint(str(root / "saved"), "mine", {"epoch": 4}, False)
        out["latest"] = (root / "saved" / "latest").exists()
        path, client = engine.load_checkpoint(str(root / "saved"), "mine", True)
        out["loaded"] = [Path(path).parent.name, client["epoch"], int(engine.global_steps)]
        try:
            engine.load_checkpoint(str(root / "saved"), load_everything=True)
        except TypeError as error:
            out["unknown"] = str(error)
    except TypeError as error:
        out["error"] = str(error)
    finally:
        session_of(engine).close()
    return out


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    be_a_rank(main)
