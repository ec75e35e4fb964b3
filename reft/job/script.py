"""Runs a training script as ``python`` would, with reft's import hook for DeepSpeed installed.

    python -P -m reft.job.script script.py ARGS...
    python -P -m reft.job.script -m package.module ARGS...

``-P`` keeps the working directory out of ``sys.path`` while reft is imported: a module there, for
example ``logging.py``, is meant for the script only. Before the script runs, ``sys.path`` is set to
what ``python`` would give it.

``reft launch`` starts trainers this way. Neither torch nor DeepSpeed is imported before the script
runs, because scripts set environment variables that these read at import. The traceback and the
exit code are the script's own, except after the loss of a peer.

TorchElastic counts every failed worker group against ``--max-restarts``, so one lost node would use
up a restart on each of its peers. Here a trainer records whether it failed for its own reason or
because a peer vanished (:class:`ExitNote`), and the agent, the part of the launcher that watches
trainers, judges all trainers of the node together (:func:`judge`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from reft.engine.marks import BEGAN, mark
from reft.engine.on_import import hook_imports
from reft.env import ENV_EXIT_DIR, ENV_LAUNCHER_PID
from reft.refusal import EX_REFUSED, is_refusal, write_error_file, write_refusal

EX_PEER_FAILED = 75
"""Exit code of a trainer that lost a peer (``EX_TEMPFAIL``: try again)."""

EX_FENCED = 76
"""Exit code of a launcher that was cut off while the job continued without its node."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop a launcher. Its exit code is then 128 + n, whatever its trainers return."""


def not_ignored(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals among ``numbers`` that this process does not ignore.

    A signal that the parent set to be ignored (``nohup``, or a shell for a background process) must
    stay ignored.
    """
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


_LAUNCHER_CODES = frozenset({EX_FENCED, *(128 + number for number in STOP_SIGNALS)})
"""Exit codes with a meaning of their own for a launcher; not passed on from a failed trainer."""

STOPPED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a trainer that ended in good order after a stop signal."""


class ExitCause(StrEnum):
    """The cause of a trainer's end."""

    REFUSED = "refused"
    """reft refused what the script requests, or the state that it would restore; or the script
    cannot be run. Every restart would end in the same way, so the job ends at once."""
    SIZE = "size"
    """reft refused the number of nodes. Not counted against ``--max-restarts``: another number of
    nodes may work.
    """
    OWN = "own"
    """The trainer's own error, exit code or signal. Counted against ``--max-restarts``."""
    PEER = "peer"
    """Communication failed because another rank vanished. Not counted as a restart."""
    STOPPED = "stopped"
    """A peer was stopped, and the job exited after a last commit. Not counted as a restart."""
    ENDED = "ended"
    """The trainer ended well while other ranks were still training. The reports of the other nodes
    decide whether their trainers failed because this one was gone."""
    UNCLEAR = "unclear"
    """The trainer was aborted, by a communication library's watchdog or by its own code. The
    reports of the other nodes decide which (:func:`reft.job.rendezvous.membership.agree`)."""


EXIT_CODES = {
    ExitCause.PEER: EX_PEER_FAILED,
    ExitCause.REFUSED: EX_REFUSED,
    ExitCause.SIZE: EX_REFUSED,
}
"""Exit code of a trainer that an exception ended, by cause; for causes not listed it is 1."""
_SCRIPT_ERRORS = (SyntaxError, ModuleNotFoundError)  # Every start of the script fails with these
_ERROR_CHARS = 240
_PEER_TYPES = frozenset({"DistNetworkError", "DistStoreError", "TransferError"})
_OWN_BACKEND_ERRORS = re.compile(
    r"ncclInvalid(Usage|Argument)|Duplicate GPU|unhandled (cuda|hip) error|(CUDA|HIP) error"
    r"|out of memory",
    re.I,
)
_STAGES_ERROR = re.compile(r"num_stages \(\d+\) must divide distributed world size")  # By DeepSpeed
_PEER_MESSAGES = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe"
    r"|socket (timeout|closed|error)"
    r"|failed to recv, got 0 bytes|connectFullMesh failed"
    r"|Application timeout caused pair closure"
    r"|gloo.*time[ds]? ?out|timed out waiting \d+ ?ms for (recv|send)|monitoredBarrier"
    r"|nccl(System|Remote|Internal|InProgress)Error|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
    r"|remote process exited or there was a network error"
    r"|collective operation timeout|MPI_ERR_PROC_FAILED",
    re.I | re.S,
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception, or one in its chain of causes, means that communication was lost.

    Err towards True: a false positive costs a bounded number of restarts that do not count, but a
    false negative may end the job.
    """
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in visited:
            continue
        if _is_communication_error(current):
            return True
        visited.add(id(current))
        pending.append(current.__cause__)
        if not current.__suppress_context__:
            pending.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
    return False


def _is_communication_error(error: BaseException) -> bool:
    # Types are compared by name, so that this process need not import torch.
    names = {c.__name__ for c in type(error).__mro__ if c.__module__.split(".")[0] in _PACKAGES}
    if names & _PEER_TYPES:
        return True
    if "DistBackendError" in names:
        return not _OWN_BACKEND_ERRORS.search(str(error))
    # gloo and torch's C++ code raise plain RuntimeErrors. A ConnectionError, which the script's own
    # connections may raise, is an OSError and does not count.
    return isinstance(error, RuntimeError) and bool(_PEER_MESSAGES.search(str(error)))


_PACKAGES = ("torch", "reft")


@dataclass(frozen=True)
class ExitNote:
    """A trainer's own record of why it ended."""

    cause: ExitCause
    error: str  # Type of the exception and first line of its message, shortened

    @classmethod
    def from_error(cls, error: BaseException) -> ExitNote:
        """Return the note of a trainer that was ended by an exception."""
        cause = ExitCause.PEER if is_peer_failure(error) else ExitCause.OWN
        if is_refusal(error) or isinstance(error, _SCRIPT_ERRORS):
            cause = ExitCause.REFUSED
        is_size_error = any(
            c.__name__ == "SizeError" and c.__module__ == "reft.errors" for c in type(error).__mro__
        )
        if is_size_error or _STAGES_ERROR.match(str(error)):
            cause = ExitCause.SIZE
        text = type(error).__name__
        lines = str(error).strip().splitlines()
        if lines:
            # A first line that ends with a colon introduces the following lines, which are omitted.
            text = f"{text}: {lines[0].rstrip(': ')}"
        if len(text) > _ERROR_CHARS:
            text = text[: _ERROR_CHARS - 1] + "…"
        return cls(cause, text)

    def write(self, directory: Path, local_rank: int) -> None:
        from reft.durable import whole_file

        # No fsync: the reader is on this host, and after a crash of the host nobody reads the note.
        with whole_file(directory / f"{local_rank}.json", sync=False) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path, local_rank: int) -> ExitNote | None:
        """Return the note of a trainer; None if there is none or it cannot be read."""
        try:
            fields = json.loads((directory / f"{local_rank}.json").read_text())
            return cls(ExitCause(fields["cause"]), str(fields["error"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class WorkerExit:
    """The end of one local trainer: exit code and exit note."""

    exit_code: int | None  # As ``Popen.returncode``: -n for signal n; None: still shutting down
    note: ExitNote | None

    @property
    def cause(self) -> ExitCause:
        if self.note is not None:
            return self.note.cause
        if self.exit_code == EX_PEER_FAILED:
            return ExitCause.PEER
        if self.exit_code == EX_REFUSED:
            return ExitCause.REFUSED
        if self.exit_code in STOPPED_CODES:
            return ExitCause.STOPPED
        if self.exit_code == -signal.SIGABRT:
            return ExitCause.UNCLEAR
        return ExitCause.OWN

    def __str__(self) -> str:
        if self.note is not None:
            return self.note.error
        if self.exit_code is None:
            return "still ending"
        if self.exit_code < 0:
            names = {number.value: number.name for number in signal.Signals}
            number = -self.exit_code
            return f"killed by {names.get(number, f'signal {number}')}"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True)
class TrainerFailure:
    """The cause of a node's failure, judged by the trainers that the agent did not end."""

    cause: ExitCause
    local_rank: int
    exit_code: int  # Exit code of the launcher if it does not restart the trainers
    reason: str
    ended_early: bool = False  # Whether a rank ended well before its peers had finished


def judge(exits: Mapping[int, WorkerExit]) -> TrainerFailure:
    """Find the trainer that caused the failure.

    Args:
        exits: the failed trainers of one node by local rank, without those that the agent ended
            because of others; not empty.
    """
    severity = (
        ExitCause.REFUSED,
        ExitCause.SIZE,
        ExitCause.OWN,
        ExitCause.UNCLEAR,
        ExitCause.PEER,
        ExitCause.STOPPED,
    )
    rank, worst = min(exits.items(), key=lambda item: (severity.index(item[1].cause), item[0]))
    return TrainerFailure(worst.cause, rank, shell_code(worst), f"local rank {rank}: {worst}")


def name_ended_early(failure: TrainerFailure, ended: Mapping[int, str]) -> TrainerFailure:
    """Blame a rank that ended well before the others, if nothing else explains the failure.

    The other ranks then failed because they lost the connection to that rank.

    Args:
        failure: the failure of this node's trainers.
        ended: this node's trainers that ended well, by global rank: text with exit code and step.

    Returns:
        The corrected failure, or ``failure`` itself.
    """
    if not ended or failure.cause not in (ExitCause.PEER, ExitCause.UNCLEAR):
        return failure
    rank = min(ended)
    others = f" (and {len(ended) - 1} more on this node)" if len(ended) > 1 else ""
    reason = f"rank {rank} ended with {ended[rank]} while other ranks trained on{others}"
    return TrainerFailure(ExitCause.UNCLEAR, failure.local_rank, 1, reason, ended_early=True)


def shell_code(end: WorkerExit) -> int:
    """Return the exit code of a launcher that gives up because of this trainer.

    It is the trainer's code as a shell reports it: 128 + n for signal n. Codes that would mean that
    the launcher itself was stopped or cut off are replaced by 1. A trainer that failed without a
    code of its own, or with code 0, gives the code of its cause (``EXIT_CODES``, otherwise 1).
    """
    if end.exit_code is None or end.exit_code == 0:
        return EXIT_CODES.get(end.cause, 1)
    code = 128 - end.exit_code if end.exit_code < 0 else end.exit_code
    return 1 if code in _LAUNCHER_CODES else code


# -- the trainer -----------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 128 + signal.SIGINT


def die_with_launcher() -> None:
    """Let the kernel kill this process when its launcher dies."""
    launcher = os.environ.get(ENV_LAUNCHER_PID)
    if launcher is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the launcher died before the call of prctl, the kernel sends no signal.
    if os.getppid() != int(launcher):
        os._exit(1)


def run_script(path: str) -> None:
    """Run a script, a directory or an archive as ``__main__``; ``sys.argv`` is already set."""
    if not os.path.isfile(path):
        if os.path.exists(path):
            runpy.run_path(path, run_name="__main__")
            return
        raise _not_runnable(f"can't open file {os.path.abspath(path)!r}: no such file")
    absolute = os.path.abspath(path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        raise _not_runnable(f"can't open file {absolute!r}: {error.strerror}") from error
    if source.startswith(b"PK\x03\x04"):
        runpy.run_path(path, run_name="__main__")
        return
    main = _new_main(file=absolute)
    exec(compile(source, absolute, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str) -> None:
    """Run a module, or a package's ``__main__``, as ``__main__``."""
    module_name = name
    try:
        spec = importlib.util.find_spec(module_name)
        if spec is not None and spec.submodule_search_locations is not None:
            module_name += ".__main__"
            spec = importlib.util.find_spec(module_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_runnable(f"error while finding module {module_name!r}: {error}") from error
    if spec is None or spec.loader is None:
        raise _not_runnable(
            f"no module named {module_name!r}, or it is a package that cannot be run"
        )
    code = spec.loader.get_code(module_name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise _not_runnable(f"module {module_name!r} has no code to run")
    main = _new_main(file=spec.origin or name)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__cached__ = spec.cached  # type: ignore[attr-defined]
    sys.argv[0] = main.__file__ or name
    exec(code, main.__dict__)


def _new_main(file: str) -> ModuleType:
    """Install a new module ``__main__``, which remains after the script has returned.

    Exit handlers, threads and spawned children of the script still use that module. The one that
    ``runpy`` installs is removed when the script returns.
    """
    main = ModuleType("__main__")
    main.__file__ = file
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _not_runnable(reason: str) -> SystemExit:
    print(f"{sys.executable}: {reason}", file=sys.stderr)
    return SystemExit(2)


def run_and_classify(run: Callable[[], None]) -> int:
    """Run the script; print its error if it fails, and record how it ended.

    Returns:
        The exit code: 0; 1 after an exception; 2 after a refusal by reft; 75 after the loss of
        peers; 130 after Ctrl-C.

    Raises:
        SystemExit: raised by the script.
    """
    try:
        run()
    except SystemExit as stop:
        if stop.code in (None, 0):
            _note_good_end()
        elif stop.__context__ is not None:
            _note(stop)
        raise
    except KeyboardInterrupt as error:
        _show(error)
        return _INTERRUPTED
    except BaseException as error:
        _show(error)
        write_error_file(error)
        cause = _note(error)
        if cause is ExitCause.REFUSED and not is_refusal(error):
            return 1
        return EXIT_CODES.get(cause, 1)
    _note_good_end()
    return 0


def _show(error: BaseException) -> None:
    """Print the traceback as ``python`` would; if reft refused, only the message and the remedy."""
    if is_refusal(error):
        write_refusal(error)
    else:
        own_files = (__file__, runpy.__file__, "<frozen runpy>")
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in own_files:
            trace = trace.tb_next
        error.__traceback__ = trace
        # Set the same variables as the interpreter: exit handlers recognize a failed script by
        # them.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def _note(error: BaseException) -> ExitCause:
    note = ExitNote.from_error(error)
    # A script may catch a communication error and call sys.exit; the cause is still a lost peer,
    # so a note is written. For any other call of sys.exit the exit code says enough.
    if not (isinstance(error, SystemExit) and note.cause is ExitCause.OWN):
        _write_note(note)
    return note.cause


def _note_good_end() -> None:
    """Record a good end before the interpreter shuts down.

    The shutdown takes seconds. Peers that fail meanwhile because this rank is gone need the record.
    """
    # If the module was never imported, this trainer has no progress page to read the step from.
    progress = sys.modules.get("reft.node.progress")
    step = progress.newest_step() if progress is not None else 0
    end = f"exit code 0 at step {step}" if step else "exit code 0"
    _write_note(ExitNote(ExitCause.ENDED, end))


def _write_note(note: ExitNote) -> None:
    if directory := os.environ.get(ENV_EXIT_DIR):
        with contextlib.suppress(OSError):
            note.write(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))


def main(argv: list[str]) -> int:
    """Run this module's command line and return the exit code."""
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        print(
            "usage: python -P -m reft.job.script (script.py | -m module) [ARGS...]",
            file=sys.stderr,
        )
        return 2
    die_with_launcher()
    return run(argv)


def leave(code: int) -> NoReturn:
    """Exit this process.

    With torch loaded, a complete shutdown of the interpreter takes a second. After the loss of a
    peer the restart of the job would wait for the shutdown, so this process then skips it. Threads
    are joined and exit handlers run nevertheless.
    """
    if code == EX_PEER_FAILED:
        python_threads: Any = threading
        try:
            python_threads._shutdown()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        finally:
            os._exit(code)
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run a script, or after ``-m`` a module, with the import hook installed.

    The first entry of ``sys.path`` becomes the one that ``python`` would put there.

    Args:
        argv: the script or ``-m`` and the module, followed by its arguments.

    Returns:
        The exit code of :func:`run_and_classify`.
    """
    mark(BEGAN)
    hook_imports()
    # The option -P of this process is not meant for the script, but a PYTHONSAFEPATH that the user
    # has set is.
    if not os.environ.get("PYTHONSAFEPATH"):
        if argv[0] == "-m":
            sys.path.insert(0, os.getcwd())
        elif os.path.isfile(argv[0]):  # For a directory, runpy adds the entry
            sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    if argv[0] == "-m":
        name = argv[1]
        sys.argv = ["-m", *argv[2:]]
        return run_and_classify(lambda: run_module(name))
    sys.argv = list(argv)
    return run_and_classify(lambda: run_script(argv[0]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
