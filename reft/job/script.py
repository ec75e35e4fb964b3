"""Runs a training script as ``python`` would, with reft ready for the moment it imports DeepSpeed.

    python -m reft.job.script script.py ARGS...
    python -m reft.job.script -m package.module ARGS...

``reft launch`` starts trainers this way. Nothing heavy is imported before the script runs: scripts set
environment variables first. When the script fails, it is noted whether by its own cause or because a
peer vanished (:mod:`reft.job.exits`); the traceback and, but for the latter, the exit code are the
script's own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from reft.engine import on_import
from reft.engine.on_import import hook_imports
from reft.env import ENV_EXIT_DIR, ENV_LAUNCHER_PID
from reft.job.exits import EX_PEER_FAILED, EXIT_CODES, Cause, ExitNote
from reft.refusal import is_refusal, say, write_error_file

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
    """Run a script, a directory or an archive as ``__main__``; ``sys.argv`` is already the script's."""
    if not os.path.isfile(path):
        if os.path.exists(path):
            runpy.run_path(path, run_name="__main__")
            return
        raise _not_runnable(f"can't open file {os.path.abspath(path)!r}: no such file")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
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
    spec, code = _find_module(name)
    main = _new_main(file=spec.origin or name)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__cached__ = spec.cached  # type: ignore[attr-defined]
    sys.argv[0] = main.__file__ or name
    exec(code, main.__dict__)


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_runnable(f"error while finding module {name!r}: {error}") from error
    if spec is None or spec.loader is None:
        raise _not_runnable(f"no module named {name!r}, or it is a package that cannot be run")
    code = spec.loader.get_code(name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise _not_runnable(f"module {name!r} has no code to run")
    return spec, code


def _new_main(file: str) -> ModuleType:
    """A fresh ``__main__`` that stays: exit handlers, threads and spawned children still find it."""
    main = ModuleType("__main__")
    main.__file__ = file
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _not_runnable(reason: str) -> SystemExit:
    print(f"{sys.executable}: {reason}", file=sys.stderr)
    return SystemExit(2)


def run_and_classify(run: Callable[[], None]) -> int:
    """Run the script; report and note how it failed. Returns the exit code: 0, 1 for an exception, 2 for what
    reft refuses, 75 for lost peers, 130 for Ctrl-C. Raises SystemExit: the script's own."""
    try:
        run()
    except SystemExit as stop:
        if stop.code not in (None, 0) and stop.__context__ is not None:
            _note(stop)
        raise
    except KeyboardInterrupt as error:
        _show(error)
        return _INTERRUPTED
    except BaseException as error:
        _show(error)
        write_error_file(error)
        cause = _note(error)
        return 1 if cause is Cause.REFUSED and not is_refusal(error) else EXIT_CODES.get(cause, 1)
    return 0


def _show(error: BaseException) -> None:
    """Print the traceback as ``python`` itself would; what reft refuses says itself what to change."""
    if is_refusal(error):
        say(error)
    else:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _note(error: BaseException) -> Cause:
    note = ExitNote.of(error)
    directory = os.environ.get(ENV_EXIT_DIR)
    # A script that prints lost communication and exits by itself has still lost a peer; one that
    # just exits says nothing more than its code does.
    if directory and not (isinstance(error, SystemExit) and note.cause is Cause.OWN):
        with contextlib.suppress(OSError):
            note.write(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
    return note.cause


def main(argv: list[str]) -> int:
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        print("usage: python -m reft.job.script (script.py | -m module) [ARGS...]", file=sys.stderr)
        return 2
    die_with_launcher()
    return run(argv)


def leave(code: int) -> NoReturn:
    """End this process. After the loss of a peer the interpreter is not taken apart: with torch loaded that
    takes a second, in which all nodes wait for the next round. Threads and exit handlers have their turn."""
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
    """Run a script, or behind ``-m`` a module, with the hook; returns as :func:`run_and_classify` does."""
    on_import.mark(on_import.BEGAN)
    hook_imports()
    if argv[0] == "-m":
        name = argv[1]
        sys.argv = ["-m", *argv[2:]]
        return run_and_classify(lambda: run_module(name))
    sys.argv = list(argv)
    return run_and_classify(lambda: run_script(argv[0]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
