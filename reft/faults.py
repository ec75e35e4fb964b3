"""Injects faults for tests and demonstrations.

Code that can fail calls a :class:`FaultPlan` at every fault point. If a fault is configured for
that point, the rank is killed by SIGKILL (nothing is flushed, as in a real failure) or raises an
error.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from reft.config import FaultConfig, FaultPoint
from reft.env import ENV_NODE_ID
from reft.errors import ReftError
from reft.grid import Coordinate

logger = logging.getLogger(__name__)


class InjectedFaultError(ReftError):
    """Raised by a fault with ``action: raise``."""


class FaultPlan:
    """The faults of one rank in one start of the job.

    Args:
        faults: all configured faults.
        coordinate: this rank's coordinate; None: faults for any coordinate apply.
        incarnation: number of this start of the job.
        kill_node: function that kills all processes on this node and removes its memory; needed
            only for the action ``kill_node``.
    """

    def __init__(
        self,
        faults: Sequence[FaultConfig] = (),
        coordinate: Coordinate | None = None,
        incarnation: int = 1,
        kill_node: Callable[[], None] | None = None,
    ) -> None:
        self._faults = [f for f in faults if self._mine(f, coordinate, incarnation)]
        self._kill_node = kill_node

    @staticmethod
    def _mine(fault: FaultConfig, at: Coordinate | None, incarnation: int) -> bool:
        if fault.incarnation not in (None, incarnation):
            return False
        return at is None or all(
            wanted in (None, have)
            for wanted, have in ((fault.pp, at.pp), (fault.dp, at.dp), (fault.tp, at.tp))
        )

    def reach(self, point: FaultPoint, step: int) -> None:
        """Fail if a fault is configured for this point and step."""
        for fault in self._faults:
            if fault.point is point and fault.step == step:
                self._fire(fault)

    def _fire(self, fault: FaultConfig) -> None:
        if fault.action == "raise":
            raise InjectedFaultError(f"injected at {fault.point} of step {fault.step}")
        if fault.action == "kill_node" and self._kill_node is not None:
            self._kill_node()
        os.kill(os.getpid(), signal.SIGKILL)


def kill_this_node(job_dir: Path) -> None:
    """Simulate the loss of this node: kill all its processes, and remove the job's memory on it.

    The processes are the launcher, the daemon, all trainers and this process. If the job was not
    started by ``reft launch`` (REFT_NODE_ID is not set), only this process is killed, because its
    parent does not belong to the job.
    """
    me = psutil.Process()
    launcher = me.parent()
    if os.environ.get(ENV_NODE_ID) and launcher is not None:
        with suppress(psutil.NoSuchProcess):
            # Suspend the launcher first, so that it restarts nothing. Kill it last, because the
            # kernel kills this process together with it.
            launcher.suspend()
            for process in launcher.children(recursive=True):
                if process.pid != me.pid:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        shutil.rmtree(job_dir, ignore_errors=True)
        with suppress(psutil.NoSuchProcess):
            launcher.kill()
    me.kill()
