"""Checkpoint files of staged images, made by a process of its own: ``python -m reft.storage.assemble``.

It needs torch and DeepSpeed, which the node daemon does without, and may be slow: it runs at low priority,
sees no device and dies with whoever started it. Importing them costs seconds of processor time, with busy
trainers a minute. A process for every version never got done there, so one is kept (P6): :class:`Assembler`
starts it once and sends it one JSON request after the other, a line each; it answers on its standard output.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reft.errors import PersistError, ReftError
from reft.grid import Coordinate
from reft.naming import Label
from reft.protect.blocks import Section
from reft.storage.staging import LEADER, Part, StagedImages, WorkDir, read_record, write_record

NICENESS = 5  # Trainers come first, but with busy ones a checkpoint must still be done within its interval
NO_DEVICE = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of the process: it must neither touch a device nor take the trainer's cores.

AMD's runtime takes an empty list for none given, and shows every device; -1 is no device to both."""

_PR_SET_PDEATHSIG = 1


_POLL_SECS = 0.2
_LAST_SECS = 5.0
_IMPORT_SECS = 600.0  # Longest time for the imports, on a machine that is busy


class Assembler:
    """Starts the process when it is first needed, and again when it has died. For one thread at a time; the
    process dies with the thread that started it, so that a killed owner leaves none behind."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._said = b""
        self._ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process unless it runs. Does not wait until it is ready."""
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
        self,
        work: WorkDir,
        coordinates: Sequence[Coordinate],
        secret: bytes,
        *,
        idle_secs: float,
        stop: threading.Event,
    ) -> None:
        """Have the files of coordinates made. ``idle_secs``: give up when nothing has been written there for
        so long."""
        request = {
            "root": str(work.root),
            "job_id": work.job_id,
            "label": [work.label.incarnation, work.label.step],
            "secret": secret.hex(),
            "coordinates": [[c.pp, c.dp, c.tp] for c in coordinates],
        }
        self.start()
        process = self._process
        assert process is not None
        try:
            if not self._ready:
                self._answer(process, work.root, max(idle_secs, _IMPORT_SECS), stop)
                self._ready = True
            assert process.stdin is not None
            assert self._errors is not None
            self._errors.truncate(0)
            with suppress(BrokenPipeError):  # it has died: its last words are read below
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            answer = self._answer(process, work.root, idle_secs, stop)
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
    with suppress(OSError), os.scandir(directory) as entries:
        return sum(e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False))
    return 0


# -- in the process ---------------------------------------------------------------------------------


def assemble(work: WorkDir, coordinates: Sequence[Coordinate], secret: bytes) -> None:
    """Make the checkpoint files of ``coordinates`` and put their ``done`` records.

    The parts of every sharding group concerned must be there."""
    for coordinate in coordinates:
        own = read_part(work, coordinate, secret)
        group = [Coordinate(coordinate.pp, d, coordinate.tp) for d in range(own.degrees.dp)]
        images = StagedImages(work, coordinate, [read_part(work, c, secret) for c in group])
        try:
            files = _write_files(work, coordinate, images)
        finally:
            images.close()
        content = {"files": files, "coordinate": [coordinate.pp, coordinate.dp, coordinate.tp]}
        write_record(work.done(coordinate), content, secret)


def _write_files(work: WorkDir, coordinate: Coordinate, images: StagedImages) -> dict[str, tuple[int, int]]:
    from reft.state.blob import DecodedBlob
    from reft.state.deepspeed_format import (
        TRACKER_NAME,
        Template,
        tracker_of,
        write_checkpoint,
        write_recovery_scripts,
    )

    blob = DecodedBlob(images.read(Section.HOST, 0, images.image_bytes(Section.HOST)))
    template = Template.decode(blob.template)
    if template.recovery_scripts:
        write_recovery_scripts(work.scripts)
    tracker = tracker_of(blob.state)
    if coordinate == LEADER and tracker is not None:
        work.pointers.mkdir(exist_ok=True)
        (work.pointers / TRACKER_NAME).write_bytes(tracker)
    return write_checkpoint(template, images.read, blob.state, work.root, coordinate)


def read_part(work: WorkDir, coordinate: Coordinate, secret: bytes) -> Part:
    """The record of a coordinate's image file, which must be there and of this version."""
    content = read_record(work.part(coordinate), secret)
    if content is None:
        raise PersistError(f"{work.part(coordinate)}: is gone; the checkpoint was given up by another node")
    part = Part.from_json(content)
    if (part.coordinate, part.label) != (coordinate, work.label):
        raise PersistError(
            f"{work.part(coordinate)}: is of {part.coordinate} at {part.label}; expected {coordinate} at "
            f"{work.label}"
        )
    return part


def main() -> int:
    # A killed daemon takes this process along.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    # Batch systems signal every process of a job; what is being written is the daemon's to give up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import reft.state.blob
    import reft.state.deepspeed_format  # noqa: F401

    with suppress(ImportError):
        import deepspeed  # noqa: F401
    os.nice(NICENESS)  # now: at this priority the imports alone took a minute beside busy trainers
    answers.write(json.dumps({"ok": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()
    return 0


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    work = WorkDir(Path(request["root"]), request["job_id"], Label(*request["label"]))
    try:
        assemble(work, [Coordinate(*c) for c in request["coordinates"]], bytes.fromhex(request["secret"]))
    except (ReftError, OSError) as error:
        return {"ok": False, "error": " ".join(str(error).split())}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"ok": True}


if __name__ == "__main__":
    sys.exit(main())
