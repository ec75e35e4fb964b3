"""The storm: ``python -m tests.attack.storm``, or ``make storm SEED= SECS=``.

Real jobs of several layouts and protections, struck at random: processes killed or stopped, power cut, memory
damaged, lost and filled, checkpoints damaged, strangers at the door. Every loss is compared, to the bit, with an
undisturbed run without reft; no commit may be lost within the tolerance; every launcher must end as it
should and leave nothing. The seed decides which attacks come, where and in which order; what they meet is
the machine's doing. Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from benchmarks.job_events import History
from benchmarks.local_cluster import LocalClusterError
from tests.attack.storm_attacks import ATTACKS, Attack, Strike, tell_to_stop
from tests.attack.storm_job import (
    SETUPS,
    BrokenPromiseError,
    StormJob,
    StormSetup,
    Verdict,
    judge,
    memory_of,
)
from tests.faults.job import Scratch

_MOST_COMMITS = 8  # Between two attacks
_IN_A_ROW = 0.35
"""How often an attack that costs no memory comes before the job has recovered from the last one."""
_IN_A_ROW_SECS = 8.0
_LAST_PART = 0.15
"""Of its steps; a job that is so near its end is left alone: who is quicker must not decide whether it ended."""
_GONE_SECS = 120.0
_REFERENCE_STEPS = 200
"""Undisturbed runs are a multiple of it long: the next job with the same numbers may be as long."""
_TOLD_TO_STOP = (
    0.6  # how often a job whose end is far is told to stop, so that others get their turn
)

console = Console(
    stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else 120
)


@dataclass
class Episode:
    setup: StormSetup
    directory: Path
    steps: int
    attacks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    ended: str = "broken off"
    secs: float = 0.0


class Storm:
    """``kinds``: attacks that may come; each comes once before any comes twice. ``most``: attacks on one job."""

    def __init__(
        self, scratch: Scratch, rng: Random, kinds: Sequence[Attack], steps: int | None, most: int
    ) -> None:
        self._scratch = scratch
        self._rng = rng
        self._kinds = kinds
        self._steps = steps
        self._most = most
        self._bag: list[Attack] = []

    def episode(self, setup: StormSetup, number: int, until: float) -> Episode:
        began = time.monotonic()
        name = f"{number:03d}-{setup.name}"
        with memory_of(setup, self._scratch.root / name) as (memory_root, fillable):
            job = StormJob(self._scratch, name, setup, self._steps or setup.steps, memory_root)
            episode = Episode(setup, job.directory, job.steps)
            try:
                with job:
                    self._strike_all(episode, job, fillable, until)
                    self._end(episode, job)
            except (BrokenPromiseError, LocalClusterError) as error:
                episode.problems.append(str(error))
        self._judge(episode, job)
        episode.secs = time.monotonic() - began
        return episode

    def _strike_all(self, episode: Episode, job: StormJob, fillable: bool, until: float) -> None:
        after = 0
        while len(episode.attacks) < self._most and time.monotonic() < until:
            attack = self.draw(job.setup, fillable)
            if episode.attacks and attack.any_time and self._rng.random() < _IN_A_ROW:
                time.sleep(self._rng.uniform(0, _IN_A_ROW_SECS))
            elif not job.wait_until_safe(after) or not job.wait_for_commits(
                self._rng.randint(1, _MOST_COMMITS)
            ):
                return
            if job.poll().last_step > job.steps * (1 - _LAST_PART) or job.ended:
                return
            after = self._strike(episode, job, attack, fillable)
        job.wait_until_safe(after)

    def _strike(self, episode: Episode, job: StormJob, attack: Attack, fillable: bool) -> int:
        step, chapters, began = job.poll().last_step, len(job.chapters), time.monotonic()
        strike = Strike(job, self._rng, fillable)
        facts: dict[str, Any] = {"kind": attack.name, "step": step}
        episode.attacks.append(facts)
        try:
            attack.strike(strike)
        finally:
            facts |= {"said": "; ".join(strike.said), "secs": round(time.monotonic() - began, 1)}
            console.print(f"    step {step}: {attack.name}: {facts['said']}")
        return job.under_way() if len(job.chapters) == chapters else job.restored

    def draw(self, setup: StormSetup, fillable: bool) -> Attack:
        for _ in range(2):
            for attack in self._bag:
                if attack.fits(setup, fillable):
                    self._bag.remove(attack)
                    return attack
            fresh = list(self._kinds)
            self._rng.shuffle(fresh)
            self._bag += fresh
        raise SystemExit(
            f"none of the chosen kinds of attack fits {setup.name}; choose others with --kinds"
        )

    def _end(self, episode: Episode, job: StormJob) -> None:
        """To its own end, or told to stop where that is far: then its memory has to hold the newest commit."""
        if self._rng.random() < _TOLD_TO_STOP and job.poll().last_step < job.steps / 2:
            codes = tell_to_stop(job, signal.SIGTERM)
            episode.ended = f"told to stop: {codes}"
            if all(codes):
                episode.problems += job.forgotten()
        else:
            job.wait(lambda: False, "the end of the job", job.steps * 2.0 + 600)
            episode.ended = "by itself"
        deadline = time.monotonic() + _GONE_SECS
        while (left := job.left_over()) and time.monotonic() < deadline:
            time.sleep(0.5)
        episode.problems += left

    def _judge(self, episode: Episode, job: StormJob) -> None:
        chapters = [(chapter, History.of(chapter.events_dir)) for chapter in job.all_chapters()]
        done = max([1, *(step for _, history in chapters for step in history.losses)])
        steps = min(job.steps, -(-done // _REFERENCE_STEPS) * _REFERENCE_STEPS)
        try:
            reference = self._scratch.reference(job.setup.shape, job.setup.optimizer, steps)
        except LocalClusterError as error:
            episode.problems.append(str(error))
            return
        episode.verdict = judge(chapters, reference)
        episode.problems += episode.verdict.problems


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # Told to end, the storm leaves no job behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setups = [s for s in SETUPS if not args.setups or s.name in args.setups]
    kinds = [ATTACKS[name] for name in ATTACKS if not args.kinds or name in args.kinds]
    root = args.keep_logs or Path(tempfile.mkdtemp(prefix="reft-storm-"))
    root.mkdir(parents=True, exist_ok=True)
    storm = Storm(
        Scratch(root, root / "references"), Random(args.seed), kinds, args.steps, args.attacks
    )
    began = time.monotonic()
    episodes: list[Episode] = []
    while not episodes or time.monotonic() - began < args.secs or attacks_of(episodes) < args.least:
        setup = setups[len(episodes) % len(setups)]
        console.print(f"[bold]{len(episodes)}[/] {setup.name}, {time.monotonic() - began:.0f} s")
        until = float("inf") if attacks_of(episodes) < args.least else began + args.secs
        episode = storm.episode(setup, len(episodes), until)
        episodes.append(episode)
        _show(episode)
        if args.json:
            _write(args.json, summarise(episodes, args, time.monotonic() - began))
    summary = summarise(episodes, args, time.monotonic() - began)
    if args.json == "-":
        print(json.dumps(summary, indent=2, default=str))
    if args.keep_logs is None and summary["good"]:
        shutil.rmtree(root, ignore_errors=True)
    else:
        console.print(f"logs: {root}")
    verdict = "[green]all as promised[/]" if summary["good"] else "[bold red]NOT as promised[/]"
    console.print(
        f"{verdict}: {summary['attacks']} attacks, {summary['losses_compared']} losses compared"
    )
    return 0 if summary["good"] else 1


def attacks_of(episodes: Sequence[Episode]) -> int:
    return sum(len(e.attacks) for e in episodes)


def summarise(episodes: Sequence[Episode], args: argparse.Namespace, secs: float) -> dict[str, Any]:
    recoveries = [r for e in episodes if e.verdict for r in e.verdict.recoveries]
    return {
        "good": not any(e.problems for e in episodes),
        "seed": args.seed,
        "secs": round(secs, 1),
        "cores": os.cpu_count(),
        "setups": sorted({e.setup.name for e in episodes}),
        "attacks": attacks_of(episodes),
        "attacks_by_kind": dict(
            sorted(Counter(a["kind"] for e in episodes for a in e.attacks).items())
        ),
        "recoveries": len(recoveries),
        "recoveries_by_source": dict(Counter(r.source for r in recoveries)),
        "commits_lost": sum(r.version < r.commit for r in recoveries),
        "losses_compared": sum(e.verdict.losses for e in episodes if e.verdict),
        "problems": [f"{e.directory.name}: {p}" for e in episodes for p in e.problems],
        "jobs": [asdict(e) for e in episodes],
    }


def _show(episode: Episode) -> None:
    losses = episode.verdict.losses if episode.verdict else 0
    said = "[bold red]BAD[/]" if episode.problems else "[green]good[/]"
    said += f" in {episode.secs:.0f} s: {len(episode.attacks)} attacks"
    console.print(f"    {said}, {losses} losses compared")
    for problem in episode.problems:
        console.print(f"    {problem}", style="red", markup=False)


def _write(target: str, summary: dict[str, Any]) -> None:
    """After every job: what was seen is kept if the storm itself is ended."""
    if target != "-":
        Path(target).write_text(json.dumps(summary, indent=2, default=str) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--secs", type=float, default=1800.0, help="attack for so long (default %(default)s)"
    )
    parser.add_argument("--least", type=int, default=0, help="and until there were so many attacks")
    parser.add_argument("--steps", type=int, help="of every job (default: what suits each)")
    parser.add_argument(
        "--attacks", type=int, default=6, help="most on one job (default %(default)s)"
    )
    parser.add_argument(
        "--setups", nargs="+", choices=[s.name for s in SETUPS], help="only these jobs"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(ATTACKS), help="only these attacks")
    parser.add_argument(
        "--json", metavar="FILE", help="write the result there; - is standard output"
    )
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep logs and events there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
