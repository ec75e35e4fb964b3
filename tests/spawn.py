"""Calls a function in several processes, one per rank, as ``torch.multiprocessing.spawn`` does; they are forked
from the suite's server, and end without the interpreter's end, in which gloo's threads may abort ("terminate
called without an active exception")."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.prefork import Popen

_POLL_SECS = 0.01
_ROOT = Path(__file__).resolve().parents[1]


class RankError(Exception):
    """A rank failed; the message names it, how it ended, and the end of all output."""


def spawn(function: Callable[..., object], *args: Any, nprocs: int) -> None:
    """Call ``function(rank, *args)`` in ``nprocs`` processes. When one fails, the others are killed.
    ``function``: of a module that can be imported. ``args``: what JSON can carry."""
    call = [function.__module__, function.__qualname__, json.dumps(args)]
    path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryFile() as log:
        ranks = [
            Popen(
                [sys.executable, "-m", __name__, str(rank), *call], env=env, stdout=log, stderr=log
            )
            for rank in range(nprocs)
        ]
        try:
            while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
                time.sleep(_POLL_SECS)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            how = f"status {failed[1]}" if failed[1] > 0 else signal.Signals(-failed[1]).name
            log.seek(0)
            raise RankError(
                f"rank {failed[0]}: {how}\n{log.read().decode(errors='replace')[-6000:]}"
            )


def main(rank: str, module: str, name: str, args: str) -> None:
    getattr(importlib.import_module(module), name)(int(rank), *json.loads(args))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
