"""Names of jobs, which identify their memory. Standard library only.

If the user gives no name, it is derived from how the job is started, so that the same start again
gives the same name (P7). Such a name begins with the program's name, so that users recognise it,
and contains a digest of the user, directory, program and arguments.
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
    """Return the key of a job's newest committed version in the rendezvous store."""
    return f"reft/{job_id}/committed"


BLOCK_NAME = "reft"  # Key of reft's configuration in DeepSpeed's JSON

_MOST_CHARACTERS = 128
JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Pattern of job ids: a valid directory name that cannot refer to a place outside its parent."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_CHARACTERS = 40
_PROGRAM_DIGITS, _ARGUMENTS_DIGITS = 8, 6
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def is_name(text: str) -> bool:
    """Whether ``text`` can be a job's name."""
    return JOB_ID.fullmatch(text) is not None


def safe_name(text: str) -> str:
    """Return ``text`` if it is a valid name, otherwise a readable name that is unique to it."""
    if is_name(text):
        return text
    digits = _digest(text)[:_PROGRAM_DIGITS]
    kept = _UNFIT.sub("-", text).strip("-.")[: _MOST_CHARACTERS - _PROGRAM_DIGITS - 1]
    return f"{kept or 'job'}-{digits}"


def own_name(program: str, arguments: Sequence[str], *, module: bool = False) -> str:
    """Derive a job's name from the user, the current directory, the program and its arguments.

    Args:
        program: path of the script or program, or the name of a module.
        arguments: arguments of the program.
        module: whether ``program`` is the name of a module.
    """
    where = program if module else os.path.realpath(program)
    stem = program.rpartition(".")[2] if module else Path(program).stem
    stem = _UNFIT.sub("-", stem).strip("-.")[:_STEM_CHARACTERS] or "job"
    same = _digest(str(os.geteuid()), os.path.realpath(os.curdir), where)[:_PROGRAM_DIGITS]
    return f"{stem}-{same}-{_digest(*arguments)[:_ARGUMENTS_DIGITS]}"


def find_process_name() -> str:
    """Derive a job's name from the command of the running Python process, by :func:`own_name`."""
    program, module = own_program()
    command = sys.orig_argv[1:]
    behind = 0
    if module and "-m" in command:
        behind = command.index("-m") + 2
    elif sys.argv[0] in command:
        behind = command.index(sys.argv[0]) + 1
    return own_name(program, command[behind:], module=module)


def own_program() -> tuple[str, bool]:
    """Return the script or module that this process runs, and whether it is a module."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name:
        return spec.name.removesuffix(".__main__"), True
    return os.path.realpath(file or "python"), False


def make_run_name(environ: Mapping[str, str]) -> str | None:
    """Derive a job's name from the launcher's run id in a trainer's environment.

    Returns:
        The name; None if the run id does not identify the job: ``torchrun`` uses "none" if no id
        was given, and with ``--standalone`` a new random id for every start.
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
    """Return the boot id of the running kernel; if that is unknown, the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
