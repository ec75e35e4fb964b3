"""Runs a training script as ``python`` would, with reft ready for the moment it imports DeepSpeed.

    python -P -m reft.job.script script.py ARGS...
    python -P -m reft.job.script -m package.module ARGS...

``-P`` keeps the working directory out of ``sys.path`` while reft is imported: a ``logging.py``
there is the script's. The script gets the path that ``python`` itself would give it.

``reft launch`` starts trainers this way. Nothing heavy is imported before the script runs: scripts
set environment variables first. The traceback and, but for a lost peer, the exit code are the
script's own.

TorchElastic counts every failed worker group against ``--max-restarts``, so one lost node uses up a
restart on each of its peers. Here the trainer notes whether it died of its own cause or because a
peer vanished (:class:`ExitNote`), and the agent judges all trainers of the node together
(:func:`judge`).
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

EX_PEER_FAILED = 75  # Exit code of a trainer that lost a peer (``EX_TEMPFAIL``: try again)

EX_FENCED = 76
"""Exit code of a launcher that was cut off while another node took its place: the job goes on
without it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that tell a launcher to stop; its exit code is then 128 + n, whatever its trainers' are."""


def not_ignored(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Signals that this process may handle. Whoever started it with a signal ignored (``nohup``; a
    shell, for what it starts in the background) wants it to continue when that signal arrives."""
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


_LAUNCHERS_CODES = frozenset({EX_FENCED, *(128 + number for number in STOP_SIGNALS)})
"""What they say of a launcher, a trainer's end cannot mean."""

STOPPED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a trainer that was told to stop and did so in good order."""


class ExitCause(StrEnum):
    REFUSED = "refused"
    """reft refused what the script asks for or what is left of the job, or the script cannot run
    (exit code 2 of a command line): the same in every life, so that the job ends at once."""
    SIZE = "size"  # Refused for the number of nodes: free, another number may do
    OWN = "own"  # Its own error, exit code or signal: uses one of ``--max-restarts``
    PEER = "peer"  # Communication broke because another rank vanished: free
    STOPPED = "stopped"  # a peer was told to stop and took the whole job to a last commit: free
    ENDED = "ended"
    """Ended well while other ranks trained on. It is to blame only if they lost it: decided by what
    the other nodes report, as the next."""
    UNCLEAR = "unclear"
    """Aborted by a communication library's watchdog, or by its own code: decided by what the other
    nodes report (:func:`reft.job.rendezvous.membership.agree`)."""


EXIT_CODES = {
    ExitCause.PEER: EX_PEER_FAILED,
    ExitCause.REFUSED: EX_REFUSED,
    ExitCause.SIZE: EX_REFUSED,
}
"""Of a trainer that ended by an exception; any other: 1."""
_OF_THE_SCRIPT = (SyntaxError, ModuleNotFoundError)  # Errors that every start of it ends with
_ERROR_CHARS = 240
_PEER_TYPES = frozenset({"DistNetworkError", "DistStoreError", "TransferError"})
_OWN_BACKEND_ERRORS = re.compile(
    r"ncclInvalid(Usage|Argument)|Duplicate GPU|unhandled (cuda|hip) error|(CUDA|HIP) error|out "
    r"of memory",
    re.I,
)
_OF_DEEPSPEEDS_STAGES = re.compile(r"num_stages \(\d+\) must divide distributed world size")
_PEER_MESSAGES = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket "
    r"(timeout|closed|error)"
    r"|failed to recv, got 0 bytes|connectFullMesh failed|Application timeout caused pair closure"
    r"|gloo.*time[ds]? ?out|timed out waiting \d+ ?ms for (recv|send)|monitoredBarrier"
    r"|nccl(System|Remote|Internal|InProgress)Error|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout|remote process exited or there was a network "
    r"error"
    r"|collective operation timeout|MPI_ERR_PROC_FAILED",
    re.I | re.S,
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether ``error``, or anything it was raised from or while handling, is lost communication. A
    wrong "yes" costs a bounded number of free restarts, a wrong "no" may end the job."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        if _is_communication_error(current):
            return True
        seen.add(id(current))
        waiting.append(current.__cause__)
        if not current.__suppress_context__:
            waiting.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)
    return False


def _is_communication_error(error: BaseException) -> bool:
    # Told by name, so that torch need not be imported.
    names = {
        c.__name__ for c in type(error).__mro__ if c.__module__.split(".")[0] in ("torch", "reft")
    }
    if names & _PEER_TYPES:
        return True
    if "DistBackendError" in names:
        return not _OWN_BACKEND_ERRORS.search(str(error))
    # gloo and torch's C++ raise plain RuntimeErrors; a user's own ConnectionError is an OSError.
    return isinstance(error, RuntimeError) and bool(_PEER_MESSAGES.search(str(error)))


@dataclass(frozen=True)
class ExitNote:
    """What a trainer says about its end; ``error``: type and first line of the message,
    shortened."""

    cause: ExitCause
    error: str

    @classmethod
    def of(cls, error: BaseException) -> ExitNote:
        cause = ExitCause.PEER if is_peer_failure(error) else ExitCause.OWN
        if is_refusal(error) or isinstance(error, _OF_THE_SCRIPT):
            cause = ExitCause.REFUSED
        ours = any(
            c.__name__ == "SizeError" and c.__module__ == "reft.errors" for c in type(error).__mro__
        )
        if ours or _OF_DEEPSPEEDS_STAGES.match(str(error)):
            cause = ExitCause.SIZE
        lines = str(error).strip().splitlines()
        # A first line that announces a list ends with a colon, and so does what is put in front of
        # the rest.
        text = f"{type(error).__name__}: {lines[0].rstrip(': ')}" if lines else type(error).__name__
        return cls(cause, text if len(text) <= _ERROR_CHARS else text[: _ERROR_CHARS - 1] + "…")

    def write(self, directory: Path, local_rank: int) -> None:
        from reft.durable import whole_file

        with whole_file(directory / f"{local_rank}.json", sync=False) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path, local_rank: int) -> ExitNote | None:
        try:
            fields = json.loads((directory / f"{local_rank}.json").read_text())
            return cls(ExitCause(fields["cause"]), str(fields["error"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class WorkerExit:
    """How one local trainer ended: ``exit_code`` as ``Popen.returncode`` (negative: signal), None:
    it is still ending; and what it said, if it could."""

    exit_code: int | None
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
            named = {number.value: number.name for number in signal.Signals}
            return f"killed by {named.get(-self.exit_code, f'signal {-self.exit_code}')}"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True)
class TrainerFailure:
    """The judgement over the trainers of a node that ended before the agent stopped the rest;
    ``exit_code`` is what the launcher exits with if nothing restarts."""

    cause: ExitCause
    local_rank: int
    exit_code: int
    reason: str
    ended_early: bool = False  # a rank that ended well left the others alone


def judge(exits: Mapping[int, WorkerExit]) -> TrainerFailure:
    """Judge the trainers of one node that failed by themselves, at least one, by local rank."""
    order = (
        ExitCause.REFUSED,
        ExitCause.SIZE,
        ExitCause.OWN,
        ExitCause.UNCLEAR,
        ExitCause.PEER,
        ExitCause.STOPPED,
    )
    rank, worst = min(exits.items(), key=lambda item: (order.index(item[1].cause), item[0]))
    return TrainerFailure(worst.cause, rank, shell_code(worst), f"local rank {rank}: {worst}")


def name_ended_early(failure: TrainerFailure, ended: Mapping[int, str]) -> TrainerFailure:
    """Name a rank that ended well where other ranks lost it and nothing else explains their
    failure.

    Args:
        failure: of this node's trainers.
        ended: this node's trainers that ended well, by global rank, with their exit code and step.
    """
    if not ended or failure.cause not in (ExitCause.PEER, ExitCause.UNCLEAR):
        return failure
    rank = min(ended)
    others = f" (and {len(ended) - 1} more on this node)" if len(ended) > 1 else ""
    reason = f"rank {rank} ended with {ended[rank]} while other ranks trained on{others}"
    return TrainerFailure(ExitCause.UNCLEAR, failure.local_rank, 1, reason, ended_early=True)


def shell_code(end: WorkerExit) -> int:
    """What a launcher exits with that gives up because of a trainer: its code as a shell reports
    it, 128 + n for signal n; 1 where that is 0, or says of a launcher that it was told to stop or
    cut off."""
    if end.exit_code is None or end.exit_code == 0:
        return EXIT_CODES.get(end.cause, 1)
    code = 128 - end.exit_code if end.exit_code < 0 else end.exit_code
    return 1 if code in _LAUNCHERS_CODES else code


_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 128 + signal.SIGINT


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher is killed, so that it does not linger."""
    launcher = os.environ.get(ENV_LAUNCHER_PID)
    if launcher is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)


def run_script(path: str) -> None:
    """Run a script, a directory or an archive as ``__main__``; ``sys.argv`` is already the
    script's."""
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
    found = name
    try:
        spec = importlib.util.find_spec(found)
        if spec is not None and spec.submodule_search_locations is not None:
            found += ".__main__"
            spec = importlib.util.find_spec(found)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_runnable(f"error while finding module {found!r}: {error}") from error
    if spec is None or spec.loader is None:
        raise _not_runnable(f"no module named {found!r}, or it is a package that cannot be run")
    code = spec.loader.get_code(found) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise _not_runnable(f"module {found!r} has no code to run")
    main = _new_main(file=spec.origin or name)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__cached__ = spec.cached  # type: ignore[attr-defined]
    sys.argv[0] = main.__file__ or name
    exec(code, main.__dict__)


def _new_main(file: str) -> ModuleType:
    """A fresh ``__main__`` that stays: exit handlers, threads and spawned children still find
    it."""
    main = ModuleType("__main__")
    main.__file__ = file
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _not_runnable(reason: str) -> SystemExit:
    print(f"{sys.executable}: {reason}", file=sys.stderr)
    return SystemExit(2)


def run_and_classify(run: Callable[[], None]) -> int:
    """Run the script; report and note how it failed. Returns the exit code: 0, 1 for an exception,
    2 for what reft refuses, 75 for lost peers, 130 for Ctrl-C. Raises SystemExit: the script's
    own."""
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
        return (
            1 if cause is ExitCause.REFUSED and not is_refusal(error) else EXIT_CODES.get(cause, 1)
        )
    _note_good_end()
    return 0


def _show(error: BaseException) -> None:
    """Print the traceback as ``python`` itself would; what reft refuses says itself what to
    change."""
    if is_refusal(error):
        write_refusal(error)
    else:
        own, trace = (__file__, runpy.__file__, "<frozen runpy>"), error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        error.__traceback__ = trace
        # As the interpreter does: exit handlers see by it that the script has failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def _note(error: BaseException) -> ExitCause:
    note = ExitNote.of(error)
    # A script that prints lost communication and exits by itself has still lost a peer; one that
    # just exits says nothing more than its code does.
    if not (isinstance(error, SystemExit) and note.cause is ExitCause.OWN):
        _leave(note)
    return note.cause


def _note_good_end() -> None:
    """Before the interpreter is taken apart, which takes seconds: peers may fail at once."""
    # Without the module there is no page: nothing is imported for it.
    progress = sys.modules.get("reft.node.progress")
    step = progress.newest_step() if progress is not None else 0
    _leave(ExitNote(ExitCause.ENDED, f"exit code 0 at step {step}" if step else "exit code 0"))


def _leave(note: ExitNote) -> None:
    if directory := os.environ.get(ENV_EXIT_DIR):
        with contextlib.suppress(OSError):
            note.write(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))


def main(argv: list[str]) -> int:
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        print(
            "usage: python -P -m reft.job.script (script.py | -m module) [ARGS...]", file=sys.stderr
        )
        return 2
    die_with_launcher()
    return run(argv)


def leave(code: int) -> NoReturn:
    """End this process. After the loss of a peer the interpreter is not taken apart: with torch
    loaded that takes a second, in which all nodes wait for the next round. Threads and exit
    handlers have their turn."""
    if code == EX_PEER_FAILED:
        of_python: Any = threading
        try:
            of_python._shutdown()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        finally:
            os._exit(code)
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run a script, or behind ``-m`` a module, with the hook; returns as :func:`run_and_classify`
    does. ``sys.path`` gets the first entry that ``python`` would give it."""
    mark(BEGAN)
    hook_imports()
    if not os.environ.get("PYTHONSAFEPATH"):  # the flag is reft's own
        if argv[0] == "-m":
            sys.path.insert(0, os.getcwd())
        elif os.path.isfile(argv[0]):  # runpy adds a directory itself
            sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    if argv[0] == "-m":
        name = argv[1]
        sys.argv = ["-m", *argv[2:]]
        return run_and_classify(lambda: run_module(name))
    sys.argv = list(argv)
    return run_and_classify(lambda: run_script(argv[0]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
