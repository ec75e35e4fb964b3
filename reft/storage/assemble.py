"""The process that turns staged images into checkpoint files: ``python -m reft.storage.assemble``.

It is a process of its own because it needs torch and DeepSpeed, which the node daemon does without,
and because it may be slow: it runs at low priority, sees no device and dies with whoever started it.
It imports them once, then serves one JSON request after the other, a line each: read from standard input,
answered on standard output (:class:`reft.storage.assembler.Assembler`).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reft.blocks import Section
from reft.errors import PersistError, ReftError
from reft.grid import Coordinate
from reft.naming import Label
from reft.storage.staging import LEADER, Part, StagedImages, WorkDir, read_record, write_record

logger = logging.getLogger(__name__)

NICENESS = 5
"""Trainers come first, but beside busy ones a checkpoint must still be done within its interval."""
NO_DEVICE = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of the process: it must neither touch a device nor take the trainer's cores.

AMD's runtime takes an empty list for none given, and shows every device; -1 is no device to both."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class AssembleRequest:
    """Which files to make.

    Attributes:
        root: the working directory.
        job_id: job whose state it is.
        incarnation: of the version.
        step: of the version.
        secret: the job's secret, in hex.
        coordinates: (pp, dp, tp) whose files are made.
    """

    root: str
    job_id: str
    incarnation: int
    step: int
    secret: str
    coordinates: tuple[tuple[int, int, int], ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AssembleRequest:
        content = json.loads(text)
        content["coordinates"] = tuple(tuple(c) for c in content["coordinates"])
        return cls(**content)


def assemble(work: WorkDir, coordinates: Sequence[Coordinate], secret: bytes) -> None:
    """Make the checkpoint files of ``coordinates`` and put their ``done`` records.

    The parts of every sharding group concerned must be there.

    Raises:
        PersistError: if what was staged is not whole, or cannot be turned into a checkpoint.
        OSError: if it cannot be written.
    """
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


def _write_files(work: WorkDir, coordinate: Coordinate, images: StagedImages) -> dict[str, list[int]]:
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
    written = write_checkpoint(template, images.read, blob.state, work.root, coordinate)
    return {name: [file.nbytes, file.checksum] for name, file in written.items()}


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


def _die_with(parent: int) -> None:
    """A killed daemon takes this process along."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    """Serve requests until standard input ends."""
    _die_with(int(sys.argv[1]))
    # Batch systems signal every process of a job; what is being written is the daemon's to give up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _import_all()
    os.nice(NICENESS)  # now: at this priority the imports alone took a minute beside busy trainers
    answers.write(json.dumps({"ok": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_serve(AssembleRequest.from_json(line))) + "\n")
        answers.flush()
    return 0


def _import_all() -> None:
    import reft.state.blob
    import reft.state.deepspeed_format  # noqa: F401

    with suppress(ImportError):
        import deepspeed  # noqa: F401


def _serve(request: AssembleRequest) -> dict[str, Any]:
    work = WorkDir(Path(request.root), request.job_id, Label(request.incarnation, request.step))
    try:
        assemble(work, [Coordinate(*c) for c in request.coordinates], bytes.fromhex(request.secret))
    except (ReftError, OSError) as error:
        return {"ok": False, "error": " ".join(str(error).split())}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {"ok": True}


if __name__ == "__main__":
    sys.exit(main())
