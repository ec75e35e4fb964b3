"""What the kernel shows of a forked process: as command and environment it shows its parent's.

``ps``, py-spy and whoever looks for a process by its environment read ``/proc/PID/cmdline`` and
``/proc/PID/environ``, which are the memory into which the kernel wrote both when the program was started. A
server that forks programs takes that memory for itself, and what it forks writes its own there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from reft.env import ENV_ROOM

_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)
"""Where ``/proc/PID/stat`` says begin and end of each: its fields, counted from behind the name."""


def with_room(environ: Mapping[str, str], room_bytes: int) -> dict[str, str]:
    """An environment for a server, in which there is room for a larger one."""
    return {**environ, ENV_ROOM: "x" * room_bytes}


class ProcEntry:
    """This process's entry in /proc, to be written anew. Make it before anything keeps pointers into the
    environment: before libraries are loaded, and while there is one thread."""

    def __init__(self) -> None:
        # The C library's strings lie there, too: from here on they lie elsewhere.
        kept = dict(os.environ)
        os.environ.clear()
        kept.pop(ENV_ROOM, None)
        os.environ.update(kept)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._arguments, self._environment = (
            (int(fields[begin]), int(fields[end]) - int(fields[begin]))
            for begin, end in (_ARGUMENTS, _ENVIRONMENT)
        )

    def show(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Show these from now on, in this process and in what it forks; what does not fit is left out."""
        _write(*self._environment, (f"{name}={value}" for name, value in environ.items()))
        _write(*self._arguments, argv)


def _write(begin: int, room: int, texts: Iterable[str]) -> None:
    shown = b""
    for text in texts:
        more = os.fsencode(text) + b"\0"
        if len(shown) + len(more) > room:
            continue
        shown += more
    ctypes.memmove(begin, shown.ljust(room, b"\0"), room)
