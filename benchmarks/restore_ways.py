"""Ways to save a state once and to restore it often. Used in a rank of ``restore.py``."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import MIB, bytes_below
from slow_files import slow_loads
from stopwatch import Stopwatch
from training import inner_optimizer, masters

if TYPE_CHECKING:
    from restore import Rank

PLAIN_COPY = "plain_copy"
DEEPSPEED = "deepspeed_load_checkpoint"
SLOW_STORAGE = "deepspeed_slow_storage"
_COMPLETING = "completing"


class Way:
    """One way to save once and restore often."""

    name = ""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.engine = rank.engine
        self.folder = rank.space.disk / self.name

    def save(self) -> None:
        """Write the state once."""

    def before(self) -> None:
        """Not timed: play the failure, warm the page cache."""
        if os.environ["RANK"] == "0":
            for file in self.folder.rglob("*"):
                if file.is_file():
                    with file.open("rb") as stream:
                        while stream.read(16 * MIB):
                            pass

    def restore(self) -> dict[str, Any]:
        """Timed; returns facts about it."""
        return {}

    def bytes(self) -> int:
        return bytes_below(self.folder)


class DeepSpeedWay(Way):
    """DeepSpeed's own ``save_checkpoint`` and ``load_checkpoint``, without reft's part in it."""

    name = DEEPSPEED

    def save(self) -> None:
        type(self.engine).save_checkpoint(self.engine, str(self.folder), tag="bench")

    def restore(self) -> dict[str, Any]:
        path, _ = type(self.engine).load_checkpoint(self.engine, str(self.folder), tag="bench")
        if path is None:
            raise RuntimeError("DeepSpeed found nothing to load")
        return {}


class SlowStorageWay(DeepSpeedWay):
    """DeepSpeed's load of the same files, each rank at its share of a node's link to the
    storage."""

    name = SLOW_STORAGE

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.folder = rank.space.disk / DEEPSPEED
        self._rate = rank.options.storage_gbps * 1e9 / 8

    def save(self) -> None:
        """The files are there."""

    def restore(self) -> dict[str, Any]:
        with slow_loads(self._rate):
            return super().restore()


class TorchWay(Way):
    """``torch.save`` by the first replica (ZeRO-1: optimizers by all), ``torch.load`` by all."""

    name = "torch_load"

    def _files(self) -> tuple[Path, Path]:
        at = self.rank.session.context.coordinate
        owner = at.dp if self.rank.session.state.adapter.owned else 0
        return (
            self.folder / f"model-pp{at.pp}.pt",
            self.folder / f"optimizer-pp{at.pp}-dp{owner}.pt",
        )

    def save(self) -> None:
        import torch

        self.folder.mkdir(exist_ok=True)
        model, optimizer = self._files()
        dp = self.rank.session.context.coordinate.dp
        if dp == 0:
            torch.save(self.engine.module.state_dict(), model)
        if dp == 0 or self.rank.session.state.adapter.owned:
            torch.save((inner_optimizer(self.engine).state_dict(), masters(self.engine)), optimizer)

    def restore(self) -> dict[str, Any]:
        import torch

        model, optimizer = (torch.load(file, map_location="cpu") for file in self._files())
        self.engine.module.load_state_dict(model)
        inner_optimizer(self.engine).load_state_dict(optimizer[0])
        for name, live in masters(self.engine).items():
            live.copy_(optimizer[1][name])
        return {}


class DcpWay(Way):
    """``torch.distributed.checkpoint.save`` and ``load``, in place where tensors exist."""

    name = "dcp_load"

    def _state(self) -> dict[str, Any]:
        at = self.rank.session.context.coordinate
        suffix = f"pp{at.pp}" + (f".dp{at.dp}" if self.rank.session.state.adapter.owned else "")
        optimizer = inner_optimizer(self.engine)
        return {
            f"model.pp{at.pp}": self.engine.module.state_dict(),
            f"optimizer.{suffix}": optimizer,
            f"masters.{suffix}": masters(self.engine),
        }

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=self.folder)

    def restore(self) -> dict[str, Any]:
        import torch
        import torch.distributed.checkpoint as dcp

        optimizer = inner_optimizer(self.engine)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param not in optimizer.state:
                    optimizer.state[param] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.empty_like(param),
                        "exp_avg_sq": torch.empty_like(param),
                    }
        dcp.load(self._state(), checkpoint_id=self.folder)
        return {}


class PlainCopyWay(Way):
    """Every tensor of model and optimizer from a copy in memory."""

    name = PLAIN_COPY

    def _live(self) -> list[Any]:
        return [*self.engine.module.parameters(), *masters(self.engine).values()]

    def save(self) -> None:
        self._kept = [tensor.detach().clone() for tensor in self._live()]
        states = inner_optimizer(self.engine).state
        self._states = {
            param: {key: value.clone() for key, value in state.items()}
            for param, state in states.items()
        }

    def restore(self) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            for tensor, kept in zip(self._live(), self._kept, strict=True):
                tensor.copy_(kept)
            for param, kept_state in self._states.items():
                state = inner_optimizer(self.engine).state[param]
                for key, value in kept_state.items():
                    state[key] = torch.empty_like(value) if key not in state else state[key]
                    state[key].copy_(value)
        return {}

    def bytes(self) -> int:
        states = [value for state in self._states.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self._kept, *states))


@functools.cache
def _watch_parts(watch: Stopwatch) -> None:
    """Have the parts of a restore told apart."""
    from reft.engine import deepspeed
    from reft.engine.load_memory import MemoryRestorer
    from reft.recover.rebuild import ArenaRebuilder

    for stage in ("begin", "take", "seal"):
        watch.watch(ArenaRebuilder, stage, _COMPLETING)
    watch.watch(MemoryRestorer, "survey", "inventory_and_plan")
    watch.watch(deepspeed, "restore_host_state", "host_state")
    watch.watch(MemoryRestorer, "protect", "protect")


class ReftWay(Way):
    """A new incarnation of the job in the same process: all that survives is the nodes' memory."""

    name = "reft_all_local"

    def before(self) -> None:
        from reft.snapshot.device_engine import copy_engine_for

        session = self.rank.session
        session.worker.close(600.0)
        session.copying.engine = copy_engine_for(session.context.engine.device)
        session.worker = session.state.worker = session.fence.worker = None
        session.memory.incarnation += 1
        self.rank.barrier()

    def restore(self) -> dict[str, Any]:
        from reft.engine.load import Restorer
        from reft.engine.load_call import LoadCall
        from reft.engine.load_disk import CheckpointLoader

        rank, session = self.rank, self.rank.session
        _watch_parts(rank.watch)
        context, memory = session.context, session.memory_restorer()
        checkpoints = CheckpointLoader(context, context.engine, session, memory, session.memory)
        restorer = Restorer(context, session, memory, checkpoints)
        rank.watch.take()
        path, _ = restorer.load(LoadCall(_never, str(rank.space.disk / "nothing"), None, {}))
        taken = rank.watch.take()
        # Beside the transfer, by several threads: only their processor time adds up.
        _, completing = taken.pop(_COMPLETING, (0.0, 0.0))
        parts = {name: wall for name, (wall, _) in taken.items()}
        if not str(path).startswith("memory:"):
            raise RuntimeError(f"found {path}; expected the state to come from memory")
        return {
            "parts": parts,
            "completing_core_secs": completing,
            "bytes_from": rank.last_restored()["bytes_from"],
        }

    def bytes(self) -> int:
        return int(self.rank.session.stats.bytes_per_snapshot)


class ReftNodeLostWay(ReftWay):
    """As above, and the last node's memory is gone."""

    name = "reft_node_lost"

    def before(self) -> None:
        super().before()
        if self.rank.is_last_node:
            for arena in self.rank.session.memory.job_dir.path.glob("*.arena"):
                arena.unlink()
        self.rank.barrier()


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the state was to come from memory, not from a checkpoint")
