"""Injected faults: objects that are passed in or set by config, never patches.

A :class:`FaultPlan` is asked at every fault point; where a configured fault matches, the rank dies
by SIGKILL (nothing is flushed, as in a real loss) or raises.
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
    """The faults of one rank in one incarnation. ``faults``: configured faults. ``coordinate``:
    where this rank sits. ``incarnation``: the running incarnation of the job. ``kill_node``: kills
    everything on this node, memory included; needed for ``kill_node`` only."""

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
        """Called where ``point`` is passed for ``step``; fails there if a fault says so."""
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
    """Die as a lost host does: SIGKILL of the launcher, the daemon and every sibling, the job's
    memory gone.

    Only for processes started by ``reft launch`` (REFT_NODE_ID is set); elsewhere the parent is
    somebody else's and is left alone.
    """
    me = psutil.Process()
    launcher = me.parent()
    if os.environ.get(ENV_NODE_ID) and launcher is not None:
        with suppress(psutil.NoSuchProcess):
            # Stopped it starts nothing anew. Its end comes last: the kernel ends this process with
            # it.
            launcher.suspend()
            for process in launcher.children(recursive=True):
                if process.pid != me.pid:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        shutil.rmtree(job_dir, ignore_errors=True)
        with suppress(psutil.NoSuchProcess):
            launcher.kill()
    me.kill()
