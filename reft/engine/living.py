"""The sessions of this process. Two that live in one job would each take the other's memory (P3)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from reft.errors import ConfigError

if TYPE_CHECKING:
    from reft.engine.session import Session

_newest: WeakValueDictionary[str, Session] = WeakValueDictionary()
"""By the job's memory on this node."""


def note_session(memory: Path, session: Session) -> None:
    """``session`` has the memory until it is closed."""
    _newest[os.path.realpath(memory)] = session


def require_no_other(memory: Path) -> None:
    """Refuse a second engine of a job, under a launcher's lock as well as without one.

    Raises:
        ConfigError: this process has an engine whose session has this memory and is not closed.
    """
    other = _newest.get(os.path.realpath(memory))
    if other is not None and not other.closed:
        raise ConfigError(
            f"a second engine asks for reft in job {other.job_id!r}, but a job's memory has room for the "
            f"state of one engine, and another one of this process has it ({memory}). Leave the block to one "
            f'of them: write "reft": {{"enabled": false}} into the configuration of the other, or, where the '
            f"first engine is done with, call reft.attach(engine).close() before the second is made"
        )
