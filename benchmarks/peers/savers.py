"""What others do in the place of reft's versions, as ways to save that are compared. Used in a
rank.

None of them is a dependency: ``make peers`` fills a folder with their packages, which is looked at
after those of this environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

from common import Scratch
from savers import DcpSaver, FileSaver


class DlroverSaver(FileSaver):
    """DLRover's flash checkpoint, ``DdpCheckpointer.save_checkpoint`` with ``StorageType.MEMORY``:
    the training thread copies model and optimizer into shared memory, without a checksum, over the
    last version. Each rank is a node of its own, with a saver process of its own."""

    name = "dlrover"
    every_step = True

    def __init__(self, engine: Any, session: Any, space: Scratch) -> None:
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
        # Forked from a process with threads, its saver does not come up every time.
        multiprocessing.set_start_method("spawn", force=True)
        try:
            from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
            from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

            _quieten()
            self.checkpointer = DdpCheckpointer(str(self.folder))
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
            raise RuntimeError(
                f"DLRover did not save step {self._step}; its log says why (--verbose)"
            )

    def clean(self) -> int:
        return int(self.checkpointer._engine._shm_handler.shared_memory.size)

    def close(self) -> None:
        """End its process."""
        saver = self.checkpointer._engine.saver_proc
        if saver is not None:
            saver.kill()
            saver.join()


class NvidiaSaver(FileSaver):
    """NVIDIA's resiliency extension, ``LocalCheckpointManager`` with a replica on the other node,
    by files in tmpfs. Its asynchronous way asks for CUDA; this is the other one."""

    name = "nvidia"
    every_step = True

    def __init__(self, engine: Any, session: Any, space: Scratch) -> None:
        super().__init__(engine, session, space)
        self.folder = space.shm / f"nvidia{os.environ['RANK']}"
        self.manager = nvidia_manager(self.folder)
        self._step = 0

    def start(self) -> None:
        self._step += 1
        self.manager.save(on_cpu(self.state()), self._step)

    def clean(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*.pt"))


def nvidia_manager(folder: Path, jump: int = 1) -> Any:
    """Of a rank: a replica of what it saves is ``jump`` ranks away."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    logging.getLogger().setLevel(logging.WARNING)
    strategy = CliqueReplicationStrategy.from_replication_params(
        replication_jump=jump, replication_factor=2
    )
    return LocalCheckpointManager(folder, repl_strategy=strategy)


def on_cpu(state: dict[str, Any]) -> Any:
    """A state of tensors on the CPU, which ``BasicTensorAwareStateDict`` does not take."""
    from nvidia_resiliency_ext.checkpointing.local import basic_state_dict

    kind = basic_state_dict.BasicTensorAwareStateDict
    # They are there: the file and the replica are copies.
    kind.copy_tensors_to_cpu = kind.restore_tensor_device = lambda self, non_blocking=False: None
    made = kind.__new__(kind)
    made.state_dict, made._is_hollow = _containers(state), False
    return made


def _containers(value: Any) -> Any:
    """Dictionaries and lists copied, in which it will put something else; tensors as they are."""
    if isinstance(value, dict):
        return {key: _containers(item) for key, item in value.items()}
    return [_containers(item) for item in value] if isinstance(value, list) else value


class DcpEveryStep(DcpSaver):
    """torch's ``async_save`` before every step, which first waits for the last one."""

    name = "dcp"
    every_step = True

    def start(self) -> None:
        if self.future is not None:
            self.finish()
        super().start()


PEERS = (DlroverSaver, NvidiaSaver, DcpEveryStep)


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
