"""Names of jobs: the job's own where nobody gave one, and found again when the same start is
repeated (P7).

The name is that of the job's memory. It starts with the program's, so that people recognise it, and
holds a digest of what makes two starts the same: user, directory, program, arguments. Standard
library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def committed_key(job_id: str) -> str:
    """Where the rendezvous store holds the newest committed version of a job."""
    return f"reft/{job_id}/committed"


BLOCK_NAME = "reft"  # key of the block in DeepSpeed's JSON

_MOST_CHARACTERS = 128
JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""What names a job's memory: a directory's name, which cannot lead out of the one above it."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_CHARACTERS = 40
_PROGRAM_DIGITS, _ARGUMENTS_DIGITS = 8, 6
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def is_name(text: str) -> bool:
    """Whether ``text`` can be a job's name."""
    return JOB_ID.fullmatch(text) is not None


def safe_name(text: str) -> str:
    """``text`` itself where it is a name, else a readable one that no other text gives."""
    if is_name(text):
        return text
    digits = _digest(text)[:_PROGRAM_DIGITS]
    kept = _UNFIT.sub("-", text).strip("-.")[: _MOST_CHARACTERS - _PROGRAM_DIGITS - 1]
    return f"{kept or 'job'}-{digits}"


def own_name(program: str, arguments: Sequence[str], *, module: bool = False) -> str:
    """A name for the job that this user starts in this directory with this program and these
    arguments. ``program``: path of the script or program, or the name of a module. ``arguments``:
    of the program. ``module``: ``program`` is a module's name."""
    where = program if module else os.path.realpath(program)
    stem = program.rpartition(".")[2] if module else Path(program).stem
    stem = _UNFIT.sub("-", stem).strip("-.")[:_STEM_CHARACTERS] or "job"
    same = _digest(str(os.geteuid()), os.path.realpath(os.curdir), where)[:_PROGRAM_DIGITS]
    return f"{stem}-{same}-{_digest(*arguments)[:_ARGUMENTS_DIGITS]}"


def find_process_name() -> str:
    """:func:`own_name` of the running Python process, by the command line that it was started
    with."""
    program, module = own_program()
    command = sys.orig_argv[1:]
    behind = 0
    if module and "-m" in command:
        behind = command.index("-m") + 2
    elif sys.argv[0] in command:
        behind = command.index(sys.argv[0]) + 1
    return own_name(program, command[behind:], module=module)


def own_program() -> tuple[str, bool]:
    """The running process's script, or the name of the module it was started as, and whether it is
    that."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name:
        return spec.name.removesuffix(".__main__"), True
    return os.path.realpath(file or "python"), False


def make_run_name(environ: Mapping[str, str]) -> str | None:
    """The name that the launcher's run id in a trainer's environment gives a job; None where it is
    nobody's in particular.

    ``torchrun`` says "none" where no id was given, and makes a new random one at every start with
    ``--standalone``, under which memory would never be found again.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    single_node = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if not run_id or run_id == "none" or (single_node and _UUID4.fullmatch(run_id)):
        return None
    return safe_name(run_id)


def _digest(*parts: str) -> str:
    joined = b"\0".join(os.fsencode(part) for part in parts)
    return hashlib.blake2b(joined, digest_size=16).hexdigest()


def kernel_id() -> str:
    """The running kernel's own id, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
