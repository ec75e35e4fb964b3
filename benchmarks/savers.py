"""The ways to save that are compared: reft's, a plain copy, and checkpoint files. Used in a
rank."""

from __future__ import annotations

import os
import shutil
from typing import Any

from common import Scratch, bytes_below
from training import inner_optimizer, masters, synchronize

PLAIN = "none"
REFT = "reft"


class Saver:
    """One way to save. ``start`` and ``finish`` are timed, ``clean`` is not."""

    name = PLAIN
    every_step = False
    """Whether it saves before every step of a unit, or once."""

    def start(self) -> None:
        """Save, on the training thread, between two steps."""

    def stall_secs(self, call_secs: float) -> float:
        """Seconds stolen from the training thread, known after the step that followed."""
        return call_secs

    def finish(self) -> None:
        """Wait for what still runs in the background."""

    def clean(self) -> int:
        """Remove what was written; returns its bytes, of this rank or (files) of all."""
        return 0

    def close(self) -> None:
        """The last version was saved."""


class ReftSaver(Saver):
    """The hook's own path: submit after the step, fence before the optimizer of the next one."""

    name = REFT
    every_step = True

    def __init__(self, session: Any) -> None:
        self.session = session

    def start(self) -> None:
        self.session.submit(required=False)

    def stall_secs(self, call_secs: float) -> float:
        return float(self.session.stats.stalls_secs.newest)

    def finish(self) -> None:
        self.session.flush(600.0)

    def clean(self) -> int:
        return int(self.session.stats.bytes_per_snapshot)


class BlockingCopySaver(Saver):
    """A plain copy of the bytes that reft copies from this rank into touched shared memory."""

    name = "blocking_copy"

    def __init__(self, session: Any, space: Scratch) -> None:
        import torch

        from reft.snapshot.plan import shard_cuts

        images = replicated, owned = session.state.adapter.images()
        dp, size = session.context.coordinate.dp, session.context.topology.degrees.dp
        cuts = shard_cuts(replicated.nbytes, size)
        members = {dp, (dp + 1) % size} if session.context.config.scheme.copies else {dp}
        ranges = [(0, cuts[m], cuts[m + 1]) for m in sorted(members)] + [(1, 0, owned.nbytes)]
        self.nbytes = sum(stop - start for _, start, stop in ranges)
        folder = space.shm / f"copy{os.environ['RANK']}"
        folder.mkdir()
        memory, at = torch.from_file(str(folder / "copy"), True, self.nbytes, dtype=torch.uint8), 0
        memory.zero_()
        session.copying.engine.register(memory)
        self.pieces = []
        for image, start, stop in ranges:
            self.pieces += images[image].pieces_into(start, memory[at : at + stop - start])
            at += stop - start

    def start(self) -> None:
        for source, target in self.pieces:
            target.copy_(source, non_blocking=True)
        synchronize()

    def clean(self) -> int:
        return self.nbytes


class FileSaver(Saver):
    """A saver that writes below one folder."""

    def __init__(self, engine: Any, session: Any, space: Scratch) -> None:
        import torch.distributed as dist

        self.engine = engine
        self.at = session.context.coordinate
        self.owned = bool(session.state.adapter.owned)
        self.folder = space.disk / self.name
        self._barrier = dist.barrier

    def state(self) -> dict[str, Any]:
        """Model and optimizer, under names that are equal exactly where the content is."""
        part = f"pp{self.at.pp}" + (f".dp{self.at.dp}" if self.owned else "")
        return {
            f"model.pp{self.at.pp}": self.engine.module.state_dict(),
            f"optimizer.{part}": inner_optimizer(self.engine).state_dict(),
            f"masters.{part}": masters(self.engine),
        }

    def clean(self) -> int:
        self._barrier()
        written = bytes_below(self.folder)
        self._barrier()
        if os.environ["RANK"] == "0":
            shutil.rmtree(self.folder, ignore_errors=True)
        return written


class TorchSaver(FileSaver):
    """``torch.save``: the first replica writes, under ZeRO-1 every replica its optimizer."""

    name = "torch_save"

    def start(self) -> None:
        import torch

        state = self.state()
        if self.at.dp:
            state = {k: v for k, v in state.items() if self.owned and not k.startswith("model")}
        if state:
            self.folder.mkdir(exist_ok=True)
            torch.save(state, self.folder / f"pp{self.at.pp}-dp{self.at.dp}.pt")


class DcpSaver(FileSaver):
    """``torch.distributed.checkpoint.async_save`` with its defaults."""

    name = "dcp_async_save"

    def __init__(self, engine: Any, session: Any, space: Scratch) -> None:
        import torch.distributed as dist

        super().__init__(engine, session, space)
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def start(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.future = dcp.async_save(
            self.state(), checkpoint_id=self.folder, process_group=self.group
        )

    def finish(self) -> None:
        self.future.result()


class DeepSpeedSaver(FileSaver):
    """DeepSpeed's own ``save_checkpoint``, without reft's part in it."""

    name = "deepspeed_save_checkpoint"

    def start(self) -> None:
        type(self.engine).save_checkpoint(self.engine, str(self.folder), tag="bench")
