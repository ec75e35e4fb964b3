"""Runs a job twice undisturbed and twice with a trainer or node killed, compares, and cleans up."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from reft.env import ENV_PROFILE, ENV_REHEARSE
from reft.errors import ConfigError
from reft.job.local import LocalNode, LocalNodes
from reft.job.rendezvous.server import RendezvousServer
from reft.rehearse.compare import (
    STATE,
    TRAINED,
    ComparedStep,
    Difference,
    advise,
    advise_unsteady,
    compare,
    repeated_steps,
    split_unsteady,
)
from reft.rehearse.keep import MADE, SAVED
from reft.rehearse.record import BETWEEN, KILLED, SAID, RunPlan, Where

EQUAL, DIFFERENT, UNSTEADY = 0, 1, 3
_POLL_SECS = 0.05
_END_SECS = 20.0  # Time for the other launchers to end after one has failed
_LOG_LINES = 25
_MOST_DIFFERENCES = 50
_RESTARTS = 2  # Allowed restarts of a killed run: the one after the kill, and one more
_BLOCK = {
    "persist": {},
    "profile": {},
    "interval_steps": 1,
    "max_lost_steps": None,
    "allow_unprotected": True,
}
"""Keys that replace those of the job's ``reft`` block: a version of every step, none on storage."""

_ADVICE = re.compile(r"\b[Ww]rite\b")
_PREFIX = re.compile(r"^reft \[[^]]*\] ")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Rehearsal:
    """The job to rehearse, and how to rehearse it."""

    launch: tuple[str, ...]  # Options for ``reft launch``
    program: tuple[str, ...]  # The script and its arguments
    job_id: str  # Name of the rehearsal's memory
    memory_parent: Path  # Directory in which the rehearsal's memory directory is created
    steps: int = 12  # Number of steps to train
    kill_after: int = 5  # Number of steps after which a trainer is killed
    kills_node: bool = False  # Whether everything on a node is killed instead
    overwrites: bool = False  # Whether the script may overwrite existing files
    nodes: int = 0  # Nodes to start on this machine; 0: this machine is one node of a cluster
    # Directory in which records, logs and checkpoints are kept; None: they are removed at the end
    directory: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.kill_after < self.steps:
            raise ConfigError(
                f"--kill is {self.kill_after} and --steps {self.steps}; write a step to kill after "
                f"from 1 to {self.steps - 1}, so that there are steps to compare after the failure"
            )
        if self.kills_node and self.nodes == 1:
            raise ConfigError(
                "--node kills a node, but the job has one, and its memory would be lost with it; "
                "write --nnodes 2 or more: the nodes are started on this machine unless "
                "--rdzv-endpoint is given"
            )


@dataclass
class RehearsalRun:
    """One run of the job, and its results."""

    name: str
    plan: RunPlan
    codes: list[int] = field(default_factory=list)  # Exit codes of the run's launchers
    events: list[dict[str, Any]] = field(default_factory=list)  # What trainers have recorded
    log: str = ""
    secs: float = 0.0

    @property
    def records(self) -> list[ComparedStep]:
        kinds = (TRAINED, STATE)
        names = ("rank", "life", "step", "values")
        found = [event for event in self.events if event["event"] in kinds]
        records = [
            ComparedStep(event["event"], *(event[name] for name in names)) for event in found
        ]
        if not self.plan.kill_after or not records:
            return records
        # Leave out states that are newer than the kill: ranks that outlive the killed one may
        # capture a state when they end, but no version is taken of it.
        last = min(r.step for r in records) - 1 + self.plan.kill_after
        last -= self.plan.kill_at != "step"  # The kill came before the step's version was taken
        return [r for r in records if r.kind == TRAINED or r.life > 1 or r.step <= last]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def newest_step(self) -> int:
        return max((event["step"] for event in self.of_kind(TRAINED)), default=0)

    @property
    def back_secs(self) -> float | None:
        """Seconds from the kill to the beginning of the next step; None if none began."""
        killed = self.of_kind(KILLED)
        began = [event["began"] for event in self.of_kind(TRAINED) if event["life"] > 1]
        return min(began) - killed[0]["time"] if killed and began else None


def rehearse(what: Rehearsal, progress: Say, say: Say) -> dict[str, Any]:
    """Run the job undisturbed and with kills, and compare the runs.

    Args:
        what: the rehearsal.
        progress: called several times a second with a text on the current run and step.
        say: called with a line of text when a run begins.

    Returns:
        The report, an object for JSON; ``exit_code`` is EQUAL, DIFFERENT or UNSTEADY.

    Raises:
        ConfigError: the job cannot be rehearsed: it fails undisturbed, or no step was recorded.
    """
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="reft-rehearse-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        temporary, directory = scratch / "tmp", what.directory or scratch / "runs"
        for path in (temporary, directory):
            path.mkdir(parents=True, exist_ok=True)
        what.memory_parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory = Path(tempfile.mkdtemp(prefix="rehearse-", dir=what.memory_parent))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        # Give launchers a temporary directory that is removed: killed ones leave files there.
        environment = {"TMPDIR": str(temporary), ENV_PROFILE: json.dumps(_BLOCK)}
        return _Runs(
            what,
            directory=directory,
            memory=memory,
            environment=environment,
            progress=progress,
            say=say,
        ).report()


class _Runs:
    """All runs of one rehearsal, one after another in the same directories."""

    def __init__(
        self,
        what: Rehearsal,
        *,
        directory: Path,
        memory: Path,
        environment: Mapping[str, str],
        progress: Say,
        say: Say,
    ) -> None:
        self._what, self._directory, self._memory = what, directory, memory
        self._environment = environment
        self._progress, self._say = progress, say
        self._number = 0

    def report(self) -> dict[str, Any]:
        what = self._what
        undisturbed = RunPlan(what.steps, overwrites=what.overwrites)
        first, second = (self._run(f"undisturbed-{n}", undisturbed) for n in (1, 2))
        unsteady, unseeded = split_unsteady(self._compare(first, second))
        steps = sorted({r.step for r in first.records if r.kind == TRAINED})
        tries: list[dict[str, Any]] = []
        if not unsteady:
            for name, plan in self._kills(first, undisturbed, steps[0] - 1, len(steps)):
                run = self._run(name, plan)
                tries.append(_judge(first, run, self._compare(first, run, unseeded)))
        code = EQUAL if all(t["equal"] for t in tries) else DIFFERENT
        if unsteady:
            code = UNSTEADY
        made = self._directory / MADE
        # Report only warnings that contain advice; others concern only this run.
        said = (
            _PREFIX.sub("", e["text"]) for e in first.of_kind(SAID) if _ADVICE.search(e["text"])
        )
        return {
            "exit_code": code,
            "steps": len(steps),
            "first_step": steps[0],
            "deterministic": not unsteady,
            "unsteady": _to_json(unsteady),
            "not_compared": sorted(key for _, key in unseeded),
            "advice": advise_unsteady(unsteady[0]) if unsteady else "",
            "tries": tries,
            "said": list(dict.fromkeys(said)),
            "written": sorted(set(made.read_text().splitlines())) if made.exists() else [],
        }

    def _compare(
        self, one: RehearsalRun, other: RehearsalRun, but: Collection[tuple[str, str]] = ()
    ) -> list[Difference]:
        return compare(one.records, other.records, but, partial=self._what.nodes == 0)

    def _kills(
        self, first: RehearsalRun, undisturbed: RunPlan, base: int, made: int
    ) -> Iterable[tuple[str, RunPlan]]:
        """Plan the killed runs: in the first, a trainer dies within a step, in the second between
        two steps.

        Args:
            first: the first undisturbed run.
            undisturbed: plan of the undisturbed runs.
            base: step at which the job began.
            made: number of steps that the undisturbed run made.

        Yields:
            Name and plan of each run.
        """
        what = self._what
        if made <= what.kill_after:
            raise ConfigError(
                f"the job made {made} steps and ended; --kill {what.kill_after} is not one of them "
                "with a step after it. Give a smaller --kill, or let the script make more steps"
            )
        plan = replace(undisturbed, kill_after=what.kill_after, kills_node=what.kills_node)
        yield f"killed-after-{what.kill_after}", plan
        # Prefer a kill while the script evaluates or saves between two steps: it reveals more.
        pauses: list[tuple[int, Where]] = [
            (event["step"] - base, event["what"]) for event in first.of_kind(BETWEEN)
        ]
        fitting = [pause for pause in pauses if 0 < pause[0] < made]
        step, where = min(
            fitting,
            key=lambda pause: (abs(pause[0] - what.kill_after), pause[1]),
            default=(what.kill_after, "boundary"),
        )
        yield f"killed-in-{where}-after-{step}", replace(plan, kill_after=step, kill_at=where)

    def _run(self, name: str, plan: RunPlan) -> RehearsalRun:
        """Run the job once; raise ConfigError if it fails although nothing is killed."""
        self._number += 1
        records = self._directory / name
        for path in (records, self._directory / SAVED):
            shutil.rmtree(path, ignore_errors=True)
        records.mkdir()
        plan.write(records)
        run = RehearsalRun(name, plan)
        self._say(f"run {self._number}: {name}")
        began = time.monotonic()
        with ExitStack() as stack:
            restarts = _RESTARTS if plan.kill_after else 0
            nodes = LocalNodes({**self._environment, ENV_REHEARSE: str(records)})
            run_id = f"{self._what.job_id}-{self._number}"
            job = _Job(
                self._what,
                nodes,
                run_id=run_id,
                records=records,
                memory=self._memory,
                restarts=restarts,
            )
            stack.callback(job.end)
            job.start(stack)
            reader = Reader(records)
            while job.runs():
                run.events += reader.read()
                job.replace_lost(run.of_kind(KILLED))
                self._progress(f"run {self._number}: {name}, step {run.newest_step}")
                time.sleep(_POLL_SECS)
        run.events += reader.read()
        run.codes, run.log, run.secs = job.codes(), job.log(), time.monotonic() - began
        if not plan.kill_after:
            self._check(run)
        return run

    def _check(self, run: RehearsalRun) -> None:
        if any(run.codes):
            raise ConfigError(
                f"the job fails undisturbed, with exit code {', '.join(map(str, run.codes))}: "
                f"nothing can be compared. Fix this first:\n{_read_end(run.log)}"
            )
        if not run.of_kind(TRAINED):
            raise ConfigError(
                "the job ended well, but reft has seen no step of it: it trains with no engine of "
                "deepspeed.initialize, and calls neither reft.attach nor reft.attach_megatron. The "
                f"end of its output:\n{_read_end(run.log)}"
            )


def _judge(
    undisturbed: RehearsalRun, run: RehearsalRun, differences: Sequence[Difference]
) -> dict[str, Any]:
    """Make the report on one killed run.

    Args:
        undisturbed: the first undisturbed run.
        run: the killed run.
        differences: differences between both.
    """
    killed = run.of_kind(KILLED)
    resumed = min((r.step for r in run.records if r.kind == TRAINED and r.life > 1), default=None)
    failed = ""
    if any(run.codes):
        codes = ", ".join(map(str, run.codes))
        failed = f"the job did not continue to its end (exit code {codes}):\n{_read_end(run.log)}"
    elif resumed is None and not killed:  # On a cluster, the killed trainer may be on another node
        failed = "the kill did not happen"
    elif resumed == min(r.step for r in undisturbed.records if r.kind == TRAINED):
        failed = "the job was not resumed: it made its first step again"
    return {
        "name": run.name,
        "killed_after": run.plan.kill_after,
        "killed_at": run.plan.kill_at,
        "node": run.plan.kills_node,
        "equal": not failed and not differences,
        "failed": failed,
        "back_secs": run.back_secs,
        "resumed_with_step": resumed,
        "repeated_steps": repeated_steps(run.records),
        "different": len(differences),
        "differences": _to_json(differences),
        "advice": advise(differences[0]) if differences and not failed else "",
        "secs": run.secs,
    }


def _to_json(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(one) | {"text": str(one)} for one in differences[:_MOST_DIFFERENCES]]


def _read_end(log: str) -> str:
    return "\n".join(log.splitlines()[-_LOG_LINES:])


class Reader:
    """Reads the events that the trainers of a run append to their files."""

    def __init__(self, records: Path) -> None:
        self._records = records
        self._offsets = Counter[Path]()

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were written since the last call, in the order of their times."""
        found: list[dict[str, Any]] = []
        for path in self._records.glob("rank-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path] += len(whole) + 1
                found += map(json.loads, whole.split(b"\n"))
        return sorted(found, key=lambda event: float(event["time"]))


class _Job:
    """The launchers of one run on this machine."""

    def __init__(
        self,
        what: Rehearsal,
        nodes: LocalNodes,
        *,
        run_id: str,
        records: Path,
        memory: Path,
        restarts: int,
    ) -> None:
        self._what, self._nodes, self._records, self._memory = what, nodes, records, memory
        self._meeting = [
            "--job-id",
            what.job_id,
            "--rdzv-id",
            run_id,
            "--max-restarts",
            str(restarts),
        ]
        self._current: dict[str, LocalNode] = {}
        self._failed_at: float | None = None

    def start(self, stack: ExitStack) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)
        self._memory.mkdir(mode=0o700)
        if self._what.nodes > 1:
            # Serve the store in this process, so that even a SIGKILL leaves no store behind.
            store = stack.enter_context(closing(RendezvousServer("127.0.0.1", 0)))
            self._meeting += ["--rdzv-endpoint", store.endpoint, "--local-addr", "127.0.0.1"]
        for number in range(max(1, self._what.nodes)):
            self._start_node(f"node{number}")

    def _start_node(self, name: str) -> None:
        what = self._what
        words = [*what.launch, *self._meeting]
        if what.nodes > 1:
            words += ["--node-id", name]
        memory, log = self._memory / name, self._records / f"{name}.log"
        self._current[name] = self._nodes.start(name, memory, log, words, what.program)

    def replace_lost(self, killed: Sequence[dict[str, Any]]) -> None:
        """If a trainer waits for its node to be killed, kill the node and start a replacement. Done
        once.

        Args:
            killed: the events of kind KILLED so far.
        """
        if not self._what.kills_node or not killed or len(self._nodes.started) > len(self._current):
            return
        name = self._node_of(killed[0])
        self._nodes.lose(self._current[name])
        self._start_node(name)

    def _node_of(self, killed: dict[str, Any]) -> str:
        """Return the node on which a killed trainer runs, found by its memory directory."""
        lost = Path(killed["memory_dir"])
        return next(
            name for name, node in self._current.items() if lost.is_relative_to(node.memory_dir)
        )

    def runs(self) -> bool:
        codes = [node.process.poll() for node in self._current.values()]
        if any(codes):
            self._failed_at = self._failed_at or time.monotonic()
        late = self._failed_at is not None and time.monotonic() - self._failed_at > _END_SECS
        return None in codes and not late

    def codes(self) -> list[int]:
        return [node.process.returncode for node in self._current.values()]

    def log(self) -> str:
        paths = sorted(self._records.glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def end(self) -> None:
        self._nodes.kill(*self._nodes.started)


def new_job_id() -> str:
    return f"rehearse-{os.getuid()}-{uuid.uuid4().hex[:8]}"
