"""Set-up of logging: every line of reft has a prefix such as ``reft [job/pp0.dp1.tp0 step 12]``.

Modules log through ``logging.getLogger(__name__)``. A handler on the logger ``reft`` adds the
prefix to the message. In trainers, the handlers of the training script then output the line; if
there are none, Python's last-resort handler prints warnings to stderr. The launcher and the node
daemon have no coordinate and use their role instead: ``reft [job/launcher node0]``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from reft.env import ENV_EVENTS, ENV_LOG_LEVEL

NAME = "reft"


@dataclass
class _Place:
    job: str = ""
    who: str = ""
    step: int | None = None

    def prefix(self) -> str:
        who = "/".join(part for part in (self.job, self.who) if part)
        step = "" if self.step is None else f"step {self.step}"
        inside = " ".join(part for part in (who, step) if part)
        return f"reft [{inside}]" if inside else "reft:"


_PLACE = _Place()  # Job, role and step in the prefix of this process's lines


def set_place(job: str, who: str, step: int | None = None) -> None:
    """Set the prefix of this process's log lines.

    Args:
        job: id of the job.
        who: coordinate of the rank, or role of the process.
        step: last finished step; None: not shown.
    """
    _PLACE.job, _PLACE.who, _PLACE.step = job, who, step


def set_step(step: int) -> None:
    """Set the last finished step, which the prefix shows."""
    _PLACE.step = step


class PrefixHandler(logging.Handler):
    """Adds the prefix to every record of reft's loggers, before other handlers receive it."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = _PLACE.prefix()
        record.msg = f"{prefix.replace('%', '%%') if record.args else prefix} {record.msg}"
        nobody_else = not logging.root.handlers and logging.getLogger(NAME).handlers == [self]
        if (
            nobody_else
            and logging.lastResort is not None
            and record.levelno >= logging.lastResort.level
        ):
            logging.lastResort.handle(record)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the present value of sys.stderr; an earlier stream may have been closed."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def install() -> None:
    """Set up logging in a trainer: add the prefix; if REFT_LOGLEVEL is set, log to stderr.

    Further calls have no effect.
    """
    if os.environ.get(ENV_LOG_LEVEL):
        to_stderr()
        return
    logger = logging.getLogger(NAME)
    if not any(isinstance(handler, PrefixHandler) for handler in logger.handlers):
        logger.handlers.insert(0, PrefixHandler())


def to_stderr() -> None:
    """Log to stderr, at the level in REFT_LOGLEVEL or at INFO; used in reft's own processes.

    A further call replaces the handlers of the earlier one.
    """
    logger = logging.getLogger(NAME)
    logger.handlers = [PrefixHandler(), StderrHandler()]
    logger.propagate = False
    wanted = os.environ.get(ENV_LOG_LEVEL) or "INFO"
    known = logging.getLevelNamesMapping()
    logger.setLevel(known.get(wanted.upper(), logging.INFO))
    if wanted.upper() not in known:
        logger.warning("%s is %r; write DEBUG, INFO, WARNING or ERROR", ENV_LOG_LEVEL, wanted)
        os.environ[ENV_LOG_LEVEL] = "INFO"  # So that child processes do not repeat the warning


logger = logging.getLogger(__name__)


class EventLog:
    """Appends a process's events, as JSON lines, to a file in the directory ``REFT_EVENTS``.

    Each line is written by one unbuffered ``write`` call, so a SIGKILL loses none. If events cannot
    be written, one warning is logged, and they are dropped (P6).

    Args:
        rank: rank of the process; -1 for a launcher.
        writer: first word of the file's name: ``reft``, or ``rank`` for events of a script.
    """

    def __init__(self, rank: int, writer: str = "reft") -> None:
        self._fd: int | None = None
        self._rank = rank
        self._told = False
        directory = os.environ.get(ENV_EVENTS)
        if directory:
            path = Path(directory)
            name = path / f"{writer}-{rank}-{os.getpid()}.jsonl"
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError as error:
                self._notify(error)

    @property
    def enabled(self) -> bool:
        """Whether events are written to a file."""
        return self._fd is not None

    def write(self, event: str, **fields: Any) -> None:
        if self._fd is None:
            return
        try:
            line = json.dumps({"event": event, "time": time.time(), "rank": self._rank, **fields})
            os.write(self._fd, line.encode() + b"\n")
        except (OSError, TypeError, ValueError) as error:
            self._notify(error)

    def _notify(self, error: Exception) -> None:
        if not self._told:
            logger.warning("events cannot be written to %s: %s", os.environ.get(ENV_EVENTS), error)
        self._told = True
