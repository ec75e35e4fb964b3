"""What this machine can do, asked once per process."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from typing import Final

import torch

_FIRST_PORT, _LAST_PORT = 20000, 32000
_random = random.SystemRandom()


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
    """A TCP port that nobody listens on.

    It lies below the kernel's range for outgoing connections: a port of that range may be taken by any
    connection of a test that runs beside this one, between this call and its use.
    """
    while True:
        port = _random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
