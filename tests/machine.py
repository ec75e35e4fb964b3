"""What this machine can do, asked once per process."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from typing import Final

import torch

_FIRST_PORT, _LAST_PORT = 20000, 32000
_NEXT_PORT_FILE = f"reft-tests-port-{os.getuid()}"


def _fp16_missing() -> str | None:
    if torch.cuda.is_available():
        return None
    try:
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return None
    except (AttributeError, RuntimeError):
        pass
    return "this processor has no fp16 arithmetic (AVX512-FP16 or AMX-FP16)"


FP16_MISSING: Final = _fp16_missing()
"""Why fp16 cannot be computed here (trap 16); None: it can. DeepSpeed asks the same of a CPU."""


def can_give_away(uid: int) -> bool:
    """Whether files can be given to that user: not without being root, nor in a container that lacks the user."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            os.chown(directory, uid, -1)
            os.chown(directory, os.geteuid(), -1)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port that nobody listens on, and that no other test on this machine was given lately.

    It lies below the kernel's range for outgoing connections: a port of that range may be taken by any
    connection of a test that runs beside this one, between this call and its use. Each call gives the next port,
    also over processes: chosen by chance, two tests would now and then be given the same one before either listens.
    """
    with open(os.path.join(tempfile.gettempdir(), _NEXT_PORT_FILE), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = file.read()
        port = int(last) if last else random.SystemRandom().randint(_FIRST_PORT, _LAST_PORT)
        while True:
            port = port + 1 if port < _LAST_PORT else _FIRST_PORT
            if _is_free(port):
                file.truncate(0)
                file.write(str(port))
                return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Clock:
    """Goes on by what it is told."""

    def __init__(self) -> None:
        self.nanos = 100 * 10**9

    def sleep(self, secs: float) -> None:
        self.nanos += round(secs * 1e9)

    def monotonic_ns(self) -> int:
        return self.nanos

    def monotonic(self) -> float:
        return self.nanos / 1e9

    def time(self) -> float:
        return 1e9 + self.monotonic()
