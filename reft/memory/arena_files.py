"""The arena files of a job's directory: how they are named, what they hold."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from reft.errors import ArenaError
from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.header import ArenaHeader
from reft.naming import Label

ARENA_SUFFIX = ".arena"
_DECODED = "decoded-"


def arena_name(local_rank: int, slot: int) -> str:
    """File name of an arena. It says nothing about its content: identity is in the header."""
    return f"rank{local_rank}-slot{slot}{ARENA_SUFFIX}"


def decoded_name(coordinate: str, number: int) -> str:
    """File name of an arena with blocks that a recovery decoded from parity."""
    return f"{_DECODED}{coordinate}-{number}{ARENA_SUFFIX}"


def is_decoded(name: str) -> bool:
    """Whether an arena was written by a recovery, not by a rank's snapshots."""
    return name.startswith(_DECODED)


def coordinate_in(path: Path, secret: bytes) -> Coordinate | None:
    """Whose bytes an arena file holds; None if there is none, or no version in it."""
    try:
        with Arena.open(path, secret) as arena:
            header = arena.header()
    except (ArenaError, OSError):
        return None
    return header.coordinate if header is not None and header.state.whole else None


def set_aside(path: Path, local_rank: int, slots: int) -> Path:
    """Rename an arena to a slot that its local rank does not use: there a recovery finds it, and it goes
    after the next commit, like those of an earlier start with more slots.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = next(p for n in count(slots) if not (p := path.with_name(arena_name(local_rank, n))).exists())
    path.rename(aside)
    return aside


def scan(job_dir: Path, secret: bytes | None, job_id: str | None = None) -> list[tuple[Path, Arena | str]]:
    """Open every arena of a job directory for reading.

    Returns:
        Per arena file, in name order, the open arena or the reason why it cannot be read. The caller
        closes the arenas.
    """
    found: list[tuple[Path, Arena | str]] = []
    for path in sorted(job_dir.glob(f"*{ARENA_SUFFIX}")):
        try:
            found.append((path, Arena.open(path, secret, job_id=job_id)))
        except FileNotFoundError:
            continue
        except (ArenaError, OSError, ValueError) as error:
            found.append((path, str(error)))
    return found


def slots_with(job_dir: Path, secret: bytes, local_rank: int, label: Label) -> dict[int, ArenaHeader]:
    """The slots of a local rank that hold ``label`` whole, by the files found on this node."""
    found = {}
    prefix = arena_name(local_rank, 0).removesuffix("0.arena")
    for path, arena in scan(job_dir, secret):
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
                holds = header is not None and header.state.whole and header.label == label
                if header is not None and holds and path.name.startswith(prefix):
                    found[int(path.stem.removeprefix(prefix))] = header
    return found
