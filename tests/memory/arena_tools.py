"""Arenas with real content, for the tests of the store."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reft.grid import BlockKey, Coordinate, Degrees, Section, VersionId
from reft.memory.arena import Arena
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum

SECRET = bytes(range(32))
BLOCK_BYTES = 1000


def header(
    step: int, incarnation: int = 1, job_id: str = "job", node: str = "node0"
) -> ArenaHeader:
    return ArenaHeader(
        job_id=job_id,
        node=node,
        degrees=Degrees(2, 2, 1),
        coordinate=Coordinate(1, 0, 0),
        label=VersionId(incarnation, step),
        state=ArenaState.EMPTY,
        layout="ab" * 16,
    )


def fill(arena: Arena, blocks: int) -> list[Entry]:
    entries = []
    for index in range(blocks):
        offset = index * 1024
        arena.data[offset : offset + BLOCK_BYTES] = random.Random(index).randbytes(BLOCK_BYTES)
        key = BlockKey(list(Section)[index % 3], index % 2, index)
        digest = checksum(arena.data[offset : offset + BLOCK_BYTES])
        image_bytes = blocks * BLOCK_BYTES
        entries.append(
            Entry(
                key, index * BLOCK_BYTES, BLOCK_BYTES, image_bytes, offset, digest, index % 2 == 0
            )
        )
    return entries


def make(path: Path, blocks: int = 4, secret: bytes = SECRET) -> Arena:
    return Arena.create(path, data_bytes=blocks * 1024, max_entries=blocks, secret=secret)


def write_version(
    arena: Arena, step: int, state: ArenaState = ArenaState.COMMITTED, blocks: int = 4
) -> None:
    if state is ArenaState.EMPTY:
        arena.clear()
        return
    arena.begin(header(step))
    entries = fill(arena, blocks)
    if state is ArenaState.WRITING:
        return
    arena.seal(entries)
    if state is ArenaState.COMMITTED:
        arena.commit()


def read_back(path: Path) -> ArenaHeader | None:
    with Arena.open(path, SECRET) as arena:
        return arena.header()


@contextmanager
def holder(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from arena_tools import SECRET, fill, header
        from reft.memory.arena import Arena
        path = Path(sys.argv[1])
        arena = Arena.open(path, SECRET, writable=True)
        result = {how}
        print(result, flush=True)
        sys.stdin.read()
        """
    )
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def answer(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()
