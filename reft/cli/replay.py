"""``reft replay``: repeats the last step of a stopped job, and compares the result with the job's
memory.

If peers were found to differ, it shows which of them hold a wrong state.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reft.cli.memory import EXIT_NOT_WELL, find_memory
from reft.env import ENV_PROFILE, ENV_REPLAY
from reft.errors import ConfigError, ReftError
from reft.grid import BlockKey, Coordinate, Section, VersionId
from reft.memory.arena import ARENA_SUFFIX, Arena, headers
from reft.memory.header import checksum
from reft.memory.jobdir import DAEMON_FILE, STATUS_FILE, JobDir, live_processes
from reft.refusal import Parser

_NAME = "reft replay"
_DESCRIPTION = (
    "Make the last step of a stopped job again: start every node with the options of 'reft launch' "
    "(--help-all lists them). From a copy of the version before the newest one the job trains to "
    "the newest one's step and stops. Each node compares the blocks of its ranks with those in "
    "memory, which stay as they are."
)
Blocks = Mapping[tuple[Coordinate, BlockKey], Mapping[str, int]]
"""For each block of a rank's state: the checksums of the tensors in the block, by tensor name."""


def main(argv: Sequence[str]) -> int:
    """Run the command ``reft replay``.

    Returns:
        The exit code: 0 if all blocks are equal, 1 if not; if the job itself fails, its exit code.

    Raises:
        ConfigError: the memory does not hold the required versions.
    """
    # Print the help without importing torch, which takes seconds.
    if argv[:1] in (["-h"], ["--help"]):
        own = Parser(prog=_NAME, words="SCRIPT [ARGUMENTS]...", description=_DESCRIPTION)
        _add_options(own)
        own.print_help()
        return 0
    from reft.job.launch import launch
    from reft.job.options import collect_options, make_parser

    parser = make_parser()
    parser.prog = _NAME
    parser.description = _DESCRIPTION
    _add_options(parser)
    args = parser.parse_args(["--help"] if argv[:1] == ["--help-all"] else list(argv))
    options = collect_options(args)
    try:
        kept = JobDir.open(find_memory([options.memory_dir], options.job_id)[0])
    except ReftError as error:
        raise ConfigError(
            f"{options.memory_dir} has no memory of job {options.job_id!r} ({error}); a replay "
            "needs the memory that the job left: start the job with --keep-memory, and this "
            "command with its --memory-dir and --job-id"
        ) from error
    if holders := live_processes(kept.path):
        raise ConfigError(
            f"job {kept.job_id} is alive ({', '.join(holders)}); stop it, with --keep-memory"
        )
    before, newest = _last_two(kept)
    os.environ[ENV_REPLAY] = str(newest.step)
    os.environ[ENV_PROFILE] = json.dumps(
        {"persist": {}}
    )  # Replayed versions must not go to storage
    memory = options.memory_dir.with_name(f"{options.memory_dir.name}-replay")
    if memory.exists():
        raise ConfigError(f"{memory} exists; a replay keeps its copy there: remove it")
    repeats: list[Blocks] = []
    try:
        for _ in range(2 if args.twice else 1):
            _copy(kept, memory / kept.path.name, before)
            if code := launch(replace(options, memory_dir=memory, keep_memory=True)):
                return code
            repeats.append(_blocks(JobDir.open(memory / kept.path.name), newest.step))
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    expected = _blocks(kept, newest.step)
    differ = _differing(expected, repeats[0])
    unsteady = _differing(repeats[0], repeats[-1])
    report: dict[str, Any] = {
        "from_step": before.step,
        "step": newest.step,
        "blocks": len(expected),
        "differ": [_format_report(block, expected, repeats[0]) for block in differ],
        "not_deterministic": None,
    }
    if args.twice:
        report["not_deterministic"] = [
            _format_report(block, repeats[0], repeats[-1]) for block in unsteady
        ]
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2))
    for key, what in (("differ", "not what is in memory"), ("not_deterministic", "never the same")):
        for block in report[key] or ():
            print(f"{what}: rank {block['at']}, {block['block']}: {', '.join(block['tensors'])}")
    print(f"step {newest.step} from {before.step}: {len(differ)} of {len(expected)} blocks differ")
    return EXIT_NOT_WELL if differ or unsteady else 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Replay")
    group.add_argument(
        "--twice", action="store_true", help="to see whether the step is deterministic"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")


def _last_two(job: JobDir) -> tuple[VersionId, VersionId]:
    """Return the version before the newest complete one, and the newest complete one."""
    arenas = headers(job.path, job.secret, job.job_id)
    labels = sorted({header.label for _, header in arenas if header.state.whole})
    if len(labels) < 2 or labels[-2].step >= labels[-1].step:
        steps = ", ".join(str(label.step) for label in labels) or "none"
        raise ConfigError(
            f"{job.path} holds versions of steps {steps}; a replay needs the newest one and one of "
            "a step before: start the job with --keep-memory"
        )
    return labels[-2], labels[-1]


def _copy(job: JobDir, target: Path, label: VersionId) -> None:
    """Copy a job's memory directory, with the arenas of one version only."""
    shutil.rmtree(target, ignore_errors=True)  # The copy of the first repetition, if any
    target.parent.mkdir(mode=0o700, exist_ok=True)
    target.mkdir(mode=0o700)
    versions = {
        path.name: header.label for path, header in headers(job.path, job.secret, job.job_id)
    }
    for path in job.path.iterdir():
        is_state = path.name not in (DAEMON_FILE, STATUS_FILE) and path.suffix != ARENA_SUFFIX
        if path.is_file() and (is_state or versions.get(path.name) == label):
            shutil.copy2(path, target / path.name)


def _blocks(job: JobDir, step: int) -> Blocks:
    """Compute the checksums of the tensors in all blocks of the version of one step."""
    from reft.state.blob import DecodedBlob
    from reft.state.catalogue import end_to_end

    blocks: dict[tuple[Coordinate, BlockKey], Mapping[str, int]] = {}
    for path, header in headers(job.path, job.secret, job.job_id):
        if header.label.step != step or not header.state.whole:
            continue
        own = next(e for e in header.entries if e.key.section is Section.HOST and e.owner)
        with Arena.open(path, job.secret) as arena:
            manifest = DecodedBlob(bytes(arena.read_block(own))).manifest
            specs = {Section.REPLICATED: manifest.replicated, Section.OWNED: manifest.owned}
            places = {s: end_to_end(spec.nbytes for spec in of)[0] for s, of in specs.items()}
            for e in header.entries:
                # Skip copies of other ranks' partitions: these are compared on the ranks that own
                # them.
                if e.key.section is Section.REPLICATED or (
                    e.key.section is Section.OWNED and e.owner
                ):
                    data, tensors = arena.read_block(e), dict[str, int]()
                    for t, at in zip(specs[e.key.section], places[e.key.section], strict=True):
                        begin, end = at - e.start_bytes, at + t.nbytes - e.start_bytes
                        if begin < e.nbytes and end > 0:
                            tensors[t.name] = checksum(data[max(0, begin) : end])
                    blocks[header.coordinate, e.key] = tensors
    return blocks


def _differing(kept: Blocks, made: Blocks) -> list[tuple[Coordinate, BlockKey]]:
    return sorted(at for at in kept.keys() | made.keys() if kept.get(at) != made.get(at))


def _format_report(at: tuple[Coordinate, BlockKey], kept: Blocks, made: Blocks) -> dict[str, Any]:
    coordinate, key = at
    block = f"{key.section} block {key.index} of member {key.member}"
    before, after = (blocks.get(at, {}) for blocks in (kept, made))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {"at": str(coordinate), "block": block, "tensors": names}
