"""``reft replay``: makes the last step of a stopped job again, from the version before, and compares."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reft.cli.memory import EXIT_NOT_WELL
from reft.env import ENV_PROFILE, ENV_REPLAY
from reft.errors import ConfigError
from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.header import ArenaHeader, Entry
from reft.memory.jobdir import DAEMON_FILE, STATUS_FILE, JobDir
from reft.naming import Label
from reft.protect.blocks import BlockKey, Section
from reft.recover.inspect import find_job_dirs

_NAME = "reft replay"
_COMPARED = (Section.REPLICATED, Section.OWNED)
Blocks = Mapping[tuple[Coordinate, BlockKey], "Stored"]


@dataclass(frozen=True)
class Stored:
    """A block in a rank's memory, and the names of the tensors in it."""

    checksum: int
    tensors: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft replay``; returns the exit code: 0 if all is equal, 1 if not, else what
    ``reft launch`` returns. Raises ConfigError: memory does not hold what is needed."""
    from reft.job.launch import launch
    from reft.job.options import make_parser, options_of

    parser = make_parser()
    parser.prog = _NAME
    parser.description = (
        "Make the last step of a stopped job again: start every node with the options of 'reft launch'. From "
        "a copy of the version before the newest one the job trains to the newest one's step and stops. Each "
        "node compares the blocks of its ranks with those in memory, which stay as they are."
    )
    group = parser.add_argument_group("replay")
    group.add_argument("--twice", action="store_true", help="to see whether the step is deterministic")
    group.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    args = parser.parse_args(list(argv))
    options = options_of(args)
    found = find_job_dirs([options.memory_dir]).get(options.job_id)
    if not found:
        raise ConfigError(
            f"no memory of job {options.job_id} in {options.memory_dir}: give --job-id, --memory-dir"
        )
    kept = JobDir.open(found[0])
    before, newest = _last_two(kept)
    os.environ[ENV_REPLAY] = str(newest.step)
    os.environ[ENV_PROFILE] = json.dumps({"persist": {}})  # what is replayed does not go to storage
    memory = options.memory_dir.with_name(f"{options.memory_dir.name}-replay")
    made: list[Blocks] = []
    try:
        for _ in range(2 if args.twice else 1):
            _copy(kept, memory / kept.path.name, before)
            if code := launch(replace(options, memory_dir=memory, keep_memory=True)):
                return code
            made.append(_blocks(JobDir.open(memory / kept.path.name), newest.step))
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    expected = _blocks(kept, newest.step)
    differ, unsteady = _differing(expected, made[0]), _differing(made[0], made[-1])
    told: dict[str, Any] = {
        "from_step": before.step,
        "step": newest.step,
        "blocks": len(expected),
        "differ": [_said(at, made[0]) for at in differ],
        "not_deterministic": [_said(at, made[0]) for at in unsteady] if args.twice else None,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=2))
    for key, what in (("differ", "not what is in memory"), ("not_deterministic", "never the same")):
        for block in told[key] or ():
            print(f"{what}: rank {block['at']}, {block['block']}: {', '.join(block['tensors'])}")
    print(f"step {newest.step} from {before.step}: {len(differ)} of {len(expected)} blocks differ")
    return EXIT_NOT_WELL if differ or unsteady else 0


def _last_two(job: JobDir) -> tuple[Label, Label]:
    labels = sorted({header.label for _, header, _ in _arenas(job) if header.state.whole})
    if len(labels) < 2:
        steps = ", ".join(str(label.step) for label in labels) or "none"
        raise ConfigError(
            f"{job.path} holds versions of steps {steps}; a replay needs the newest one and the one before: "
            f"start the job with --keep-memory"
        )
    return labels[-2], labels[-1]


def _arenas(job: JobDir) -> list[tuple[Path, ArenaHeader, Mapping[BlockKey, bytes]]]:
    """What the node's arenas hold; of host blocks the bytes."""
    found: list[tuple[Path, ArenaHeader, Mapping[BlockKey, bytes]]] = []
    for path, arena in job.scan():
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
                if header is not None:
                    host = [e for e in header.entries if e.key.section is Section.HOST and e.owner]
                    found.append((path, header, {e.key: bytes(arena.read_block(e)) for e in host}))
    return found


def _copy(job: JobDir, target: Path, label: Label) -> None:
    """A directory of the same job that holds one version alone."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True, mode=0o700)
    target.parent.chmod(0o700)
    versions = {path.name: header.label for path, header, _ in _arenas(job)}
    for path in job.path.iterdir():
        known = path.name not in (DAEMON_FILE, STATUS_FILE) and path.suffix != ".arena"
        if path.is_file() and (known or versions.get(path.name) == label):
            shutil.copy2(path, target / path.name)


def _blocks(job: JobDir, step: int) -> Blocks:
    from reft.state.blob import DecodedBlob
    from reft.state.catalogue import end_to_end

    found: dict[tuple[Coordinate, BlockKey], Stored] = {}
    for _, header, host in _arenas(job):
        if header.label.step != step or not header.state.whole:
            continue
        manifest = DecodedBlob(next(iter(host.values()))).manifest
        specs = {Section.REPLICATED: manifest.replicated, Section.OWNED: manifest.owned}
        places = {s: end_to_end(spec.nbytes for spec in of)[0] for s, of in specs.items()}
        for e in header.entries:
            if e.key.section in _COMPARED:
                pairs = zip(specs[e.key.section], places[e.key.section], strict=True)
                tensors = tuple(t.name for t, at in pairs if at < _end(e) and at + t.nbytes > e.start_bytes)
                found[header.coordinate, e.key] = Stored(e.checksum, tensors)
    return found


def _end(entry: Entry) -> int:
    return entry.start_bytes + entry.nbytes


def _differing(kept: Blocks, made: Blocks) -> list[tuple[Coordinate, BlockKey]]:
    return sorted(
        (at for at in kept.keys() | made.keys() if kept.get(at) != made.get(at)),
        key=lambda at: (at[0].pp, at[0].dp, at[0].tp, at[1]),
    )


def _said(at: tuple[Coordinate, BlockKey], blocks: Blocks) -> dict[str, Any]:
    coordinate, key = at
    block = f"{key.section} block {key.index} of member {key.member}"
    return {"at": str(coordinate), "block": block, "tensors": blocks[at].tensors if at in blocks else ()}
