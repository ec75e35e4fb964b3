"""The process that makes checkpoint files, as its owner sees it: started once, asked many times.

Importing torch and DeepSpeed costs seconds of processor time, beside busy trainers a minute. A process for
every version never got done there, so one is kept (P6): what a version costs is the writing of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from reft.errors import PersistError
from reft.storage.assemble import NO_DEVICE, AssembleRequest

_POLL_SECS = 0.2
_LAST_SECS = 5.0
_IMPORT_SECS = 600.0
"""Longest time for the imports, on a machine that is busy."""


class Assembler:
    """Starts the process when it is first needed, and again when it has died. For one thread at a time; the
    process dies with the thread that started it, so that a killed owner leaves none behind."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._said = b""
        self._ready = False

    def __enter__(self) -> Assembler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process unless it runs. Does not wait until it is ready.

        Raises:
            OSError: it cannot be started.
        """
        if self.pid is not None:
            return
        self.close()
        # In memory: a full /tmp is no reason not to write a checkpoint. Closed with the process.
        self._errors = os.fdopen(os.memfd_create("reft-assembler-stderr"), "w+b")
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._said, self._ready = b"", False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reft.storage.assemble", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **NO_DEVICE},
        )

    def assemble(
        self, request: AssembleRequest, directory: Path, *, idle_secs: float, stop: threading.Event
    ) -> None:
        """Have the files of one request made.

        Args:
            request: which.
            directory: where they appear.
            idle_secs: give up when nothing has been written there for so long.
            stop: set to give up.

        Raises:
            PersistError: they were not made; says why. The next request finds a new process.
        """
        self.start()
        process = self._process
        assert process is not None
        try:
            if not self._ready:
                self._answer(process, directory, max(idle_secs, _IMPORT_SECS), stop)
                self._ready = True
            assert process.stdin is not None
            assert self._errors is not None
            self._errors.truncate(0)
            with suppress(BrokenPipeError):  # it has died: its last words are read below
                process.stdin.write(request.to_json().encode() + b"\n")
                process.stdin.flush()
            answer = self._answer(process, directory, idle_secs, stop)
        except BaseException:
            self.close()
            raise
        if not answer.get("ok"):
            raise PersistError(str(answer.get("error")))

    def close(self) -> None:
        """End the process. What it was making stays unfinished."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _answer(
        self, process: subprocess.Popen[bytes], directory: Path, idle_secs: float, stop: threading.Event
    ) -> dict[str, object]:
        assert process.stdout is not None
        written, deadline = -1, 0.0
        while b"\n" not in self._said:
            if stop.is_set():
                raise PersistError("writing was stopped while checkpoint files were made")
            if (now := _bytes_in(directory)) != written:
                written, deadline = now, time.monotonic() + idle_secs
            if time.monotonic() > deadline:
                raise PersistError(
                    f"no byte of the checkpoint files was written in {idle_secs:g} s; check the file system "
                    f"of {directory.parent}, or raise persist.timeout_secs"
                )
            if select.select([process.stdout], [], [], _POLL_SECS)[0]:
                data = os.read(process.stdout.fileno(), 2**16)
                if not data:
                    raise PersistError(self._last_words(process))
                self._said += data
        line, _, self._said = self._said.partition(b"\n")
        answer: dict[str, object] = json.loads(line)
        return answer

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(_LAST_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = " / ".join(lines[-3:]) or "it said nothing"
        return f"the process that makes the checkpoint files ended with status {code}: {said}"


def _bytes_in(directory: Path) -> int:
    """Bytes of the files in a directory, finished or not."""
    with suppress(OSError), os.scandir(directory) as entries:
        return sum(e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False))
    return 0
