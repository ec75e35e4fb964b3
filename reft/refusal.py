"""Ends a process that reft refuses to run: one message that says what to change, and exit code 2.

This works under any launcher. The module imports only the standard library, because trainers load
it before the training script sets environment variables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from reft import __version__
from reft.env import ENV_ERROR_FILE

EX_REFUSED = 2  # Exit code of a refused trainer, as for wrong usage of a command

_REFUSALS = frozenset(
    {"ConfigError", "UnsupportedStateError", "FingerprintError", "UnrecoverableError"}
)
_IN_USE = "JobInUseError"


def is_refusal(error: BaseException) -> bool:
    """Whether ``error`` is a refusal by reft, which a restart cannot fix.

    The cause is the script, its ``reft`` block, or the state that is left of the job. If another
    job holds the memory directory, that is no refusal, because the directory may be free later.
    """
    names = {c.__name__ for c in type(error).__mro__ if c.__module__ == "reft.errors"}
    return bool(names & _REFUSALS) and _IN_USE not in names


def write_refusal(error: BaseException) -> None:
    """Print the message of a refusal to stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"reft: {error}", file=sys.stderr, flush=True)


def write_error_file(error: BaseException) -> None:
    """Write TorchElastic's error file, unless torch's decorator ``@record`` has written it.

    torchrun prints the traceback in the file or, if the file has none, the message.
    """
    path = os.environ.get(ENV_ERROR_FILE)
    if not path or os.path.exists(path):
        return
    extra = {"timestamp": str(int(time.time()))}
    if not is_refusal(error):
        extra["py_callstack"] = "".join(traceback.format_exception(error))
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": message}, file)


class _Hook:
    """A ``sys.excepthook`` for refusals; passes other exceptions to the previous hook."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not is_refusal(error):
            self._before(kind, error, trace)
            return
        write_refusal(error)
        write_error_file(error)
        # Raise SystemExit, so that Python runs the exit handlers and then exits with this code.
        raise SystemExit(EX_REFUSED)


def end_in_words() -> None:
    """Let an uncaught refusal end this process with its message and exit code 2, without a
    traceback.

    Further calls have no effect.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Formatter(argparse.HelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


class Parser(argparse.ArgumentParser):
    """Argument parser for sub-commands that typer does not parse; has ``-h`` and ``--version``.

    Args:
        words: text after the options in the usage line.
        others: arguments of :class:`argparse.ArgumentParser`; ``prog`` is the command, such as
            ``reft demo``.
    """

    def __init__(self, *, words: str = "", **others: Any) -> None:
        usage = " ".join(["%(prog)s [OPTIONS]", *([words] if words else [])])
        super().__init__(usage=usage, formatter_class=_Formatter, **others)
        # Use the same titles as typer does for the other commands
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self.add_argument(
            "--version", action="version", version=f"reft {__version__}", help="print the version"
        )

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"Try '{self.prog} -h' for help.\n\nError: {message}\n")
