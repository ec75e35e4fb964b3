"""DLRover's flash checkpoint into memory, as one of the ways to save that are compared. Used in a rank.

It is not a dependency: where it lies is an option of the benchmark. It takes no checksum and keeps one
version, which is overwritten in place.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from common import Scratch
from savers import FileSaver

HOW_TO_INSTALL = "python -m pip install --target DIR dlrover==0.6.1 grpcio protobuf"


class DlroverSaver(FileSaver):
    """``DdpCheckpointer.save_checkpoint`` with ``StorageType.MEMORY``: the training thread copies model and
    optimizer into shared memory. Each rank is a node of its own, with a saver process of its own.

    Args:
        where: folder of its packages, looked at after those of this environment.
    """

    name = "dlrover"
    every_step = True

    def __init__(self, engine: Any, session: Any, space: Scratch, where: Path) -> None:
        super().__init__(engine, session, space)
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        # Sockets and shared memory are named by the run, and both ranks are on this host.
        own = {
            "TORCHELASTIC_RUN_ID": f"{run_name(space)}-{rank}",
            "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": world,
        }
        kept = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        sys.path.append(str(where))
        try:
            from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
            from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

            _quieten()
            self.checkpointer = DdpCheckpointer(str(self.folder))
        except ImportError as error:
            raise SystemExit(f"{where} has no DLRover ({error}); fill it: {HOW_TO_INSTALL}") from error
        finally:
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._memory = StorageType.MEMORY
        self._step = 0
        self._bytes = 0

    @property
    def processes(self) -> tuple[int, ...]:
        """Of what runs beside the rank."""
        saver = self.checkpointer._engine.saver_proc
        return () if saver is None else (saver.pid,)

    def start(self) -> None:
        self._step += 1
        self.checkpointer.save_checkpoint(self._step, self.state(), storage_type=self._memory)
        if self.checkpointer._engine._cached_step != self._step:
            raise RuntimeError(f"DLRover did not save step {self._step}; its log says why (--verbose)")

    def clean(self) -> int:
        return int(self.checkpointer._engine._shm_handler.shared_memory.size)

    def close(self) -> None:
        """End its process."""
        saver = self.checkpointer._engine.saver_proc
        if saver is not None:
            saver.kill()
            saver.join()


def _quieten() -> None:
    """It tells of every version, and configures the root logger so that everybody else does."""
    logging.getLogger().setLevel(logging.WARNING)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("dlrover"):
            logging.getLogger(name).setLevel(logging.ERROR)


def run_name(space: Scratch) -> str:
    """What the names of its sockets and its memory begin with, in one run of the benchmark."""
    return f"dlrover-{space.shm.name}"


def clean_up(space: Scratch) -> None:
    """Remove what lies outside of the scratch folders; after the ranks have ended."""
    for parent in (Path("/dev/shm"), Path("/tmp/ckpt_sock")):
        for left in parent.glob(f"{run_name(space)}-*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
