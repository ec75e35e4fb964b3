"""Every log line of reft begins in the same way: ``reft [job/pp0.dp1.tp0 step 12]``.

Modules log through ``logging.getLogger(__name__)``. One handler, on the logger ``reft``, puts the
prefix before the message and leaves the rest to the handlers of the program or, where it has none,
to Python's last resort (warnings to stderr). The launcher and the node daemon have no coordinate
and write what they
are: ``reft [job/launcher node0]``.
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


_PLACE = _Place()  # where this process is: it is one rank, one launcher or one daemon


def set_place(job: str, who: str, step: int | None = None) -> None:
    """Say whose lines these are. ``job``: the job's id. ``who``: the coordinate of a rank, or what
    else this process is. ``step``: as for :func:`set_step`."""
    _PLACE.job, _PLACE.who, _PLACE.step = job, who, step


def set_step(step: int) -> None:
    """Say which step was finished last; a line about another step's version names that step
    itself."""
    _PLACE.step = step


class PrefixHandler(logging.Handler):
    """Writes the prefix into every record of reft's loggers that passes on its way to the other
    handlers."""

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
    """Writes to what sys.stderr is when a line comes: the one of its making may be closed by
    then."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def install() -> None:
    """Have the lines of this process begin with the prefix, and go to stderr where REFT_LOGLEVEL
    asks for a level. Doing it twice does no harm."""
    if os.environ.get(ENV_LOG_LEVEL):
        to_stderr()
        return
    logger = logging.getLogger(NAME)
    if not any(isinstance(handler, PrefixHandler) for handler in logger.handlers):
        logger.handlers.insert(0, PrefixHandler())


def to_stderr() -> None:
    """Log to stderr, for a process that is reft's own: what REFT_LOGLEVEL says, else INFO. Replaces
    what an earlier call set up."""
    logger = logging.getLogger(NAME)
    logger.handlers = [PrefixHandler(), StderrHandler()]
    logger.propagate = False
    wanted = os.environ.get(ENV_LOG_LEVEL) or "INFO"
    known = logging.getLevelNamesMapping()
    logger.setLevel(known.get(wanted.upper(), logging.INFO))
    if wanted.upper() not in known:
        logger.warning("%s is %r; write DEBUG, INFO, WARNING or ERROR", ENV_LOG_LEVEL, wanted)
        os.environ[ENV_LOG_LEVEL] = "INFO"  # processes that inherit it need not say so again


logger = logging.getLogger(__name__)


class EventLog:
    """Appends events of one rank; a line is written with one ``write`` and survives a SIGKILL.
    Events that cannot be written are lost, which is said once, and nothing else happens (P6).
    ``rank``: of the process; -1 for a launcher. ``writer``: who writes, the first word of the
    file's name: ``reft``, or ``rank`` for a training script."""

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
        """Whether anybody wants events."""
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
