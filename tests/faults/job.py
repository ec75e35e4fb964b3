"""Real jobs on local nodes that die, and what they must have kept to in the end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks.job_events import History, Incarnation
from benchmarks.local_cluster import LocalCluster, LocalClusterError, LocalNode
from examples.llama import PRETRAIN
from tests.commands import newest_protection
from tests.faults.cases import Optimizer, PlannedJob, Shape

MODEL = (
    *("--layers", "2", "--hidden", "32", "--heads", "2", "--kv-heads", "2", "--ffn", "64"),
    *(
        "--vocab",
        "320",
        "--seq",
        "32",
        "--dropout",
        "0.1",
        "--micro-batch",
        "1",
        "--micro-batches",
        "2",
    ),
    # The learning rate must not depend on how long a run is.
    *("--warmup", "5", "--decay-steps", "1000", "--log-interval", "20"),
)
SECS_PER_LIFE = 150.0  # Far more than a start of the job takes; a busy machine must not fail a test
_POLL_SECS = 0.02
_SIGKILLED = -9

Losses = Mapping[int, str]


def write_corpus(directory: Path) -> Path:
    """A few kilobytes of text that is the same everywhere: this package's own sources."""
    path = directory / "corpus.txt"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        sources = sorted(Path(__file__).parent.glob("*.py"))
        draft = path.with_suffix(".tmp")
        draft.write_text("\n".join(source.read_text() for source in sources))
        draft.replace(path)
    return path


@dataclass
class Scratch:
    root: Path  # of everything
    shared: (
        Path  # where undisturbed runs are kept, and found by other suites and workers of this run
    )

    @classmethod
    def of_the_run(cls, factory: pytest.TempPathFactory, name: str) -> Scratch:
        base = factory.getbasetemp()
        shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
        return cls(factory.mktemp(name), shared)

    def arguments(
        self, shape: Shape, optimizer: Optimizer, steps: int, save_dir: Path
    ) -> list[str]:
        return [
            *(PRETRAIN, *MODEL, *shape.arguments, *optimizer.arguments),
            *("--steps", str(steps), "--save-dir", str(save_dir)),
            *("--data", str(write_corpus(self.root)), "--cache-dir", str(self.root / "cache")),
        ]

    def reference(self, shape: Shape, optimizer: Optimizer, steps: int) -> Losses:
        """Losses of the undisturbed run without reft, as ``float.hex`` by step: trained once, by whoever asks
        first. Raises LocalClusterError: it did not finish."""
        key = f"{shape.name}-{optimizer.name}"
        self.shared.mkdir(parents=True, exist_ok=True)
        kept = self.shared / f"{key}.json"
        with (self.shared / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = (
                {int(k): v for k, v in json.loads(kept.read_text()).items()}
                if kept.exists()
                else {}
            )
            if len(known) < steps:
                known = self._train(shape, optimizer, steps, self.root / f"reference-{key}-{steps}")
                kept.write_text(json.dumps(known))
        return known

    def _train(self, shape: Shape, optimizer: Optimizer, steps: int, directory: Path) -> Losses:
        cluster = LocalCluster(
            command=self.arguments(shape, optimizer, steps, directory / "checkpoints"),
            directory=directory,
            procs_per_node=shape.world_size,
            nodes=1,
            env={"REFT_EVENTS": str(directory / "events")},
            options=("--no-daemon",),
            job_id=directory.name,
            external_rendezvous=False,
        )
        with cluster:
            cluster.start()
            codes = cluster.wait(SECS_PER_LIFE + 5.0 * steps)
            if any(codes.values()):
                raise LocalClusterError(f"the undisturbed run failed:\n{cluster.log(0)[-4000:]}")
        history = History.of(directory / "events")
        if any(life.nodes for life in history.incarnations.values()):
            raise LocalClusterError("reft was attached without a reft block (P10)")
        losses = {step: found[-1] for step, found in history.losses.items()}
        assert sorted(losses) == list(range(1, steps + 1)), f"steps {sorted(losses)} of {steps}"
        return losses


class FaultJob:
    """A job under reft on local nodes; nodes that kill themselves are replaced. A context manager that
    leaves no process behind. ``max_restarts``: own failures of trainers that are allowed. ``memory_root``: for
    memory that outlives this run."""

    def __init__(
        self,
        scratch: Scratch,
        name: str,
        shape: Shape,
        optimizer: Optimizer,
        *,
        steps: int,
        block: Mapping[str, Any],
        max_restarts: int = 0,
        memory_root: Path | None = None,
        options: Sequence[str] = (),
        job_id: str = "faults",
        cluster_type: type[LocalCluster] = LocalCluster,
    ) -> None:
        self.directory = scratch.root / name
        self.directory.mkdir(parents=True, exist_ok=True)
        self.events_dir = self.directory / "events"
        config = self.directory / "reft.json"
        config.write_text(json.dumps({"enabled": True, "block_bytes": 16384, **block}))
        self.replaced: list[LocalNode] = []
        self.cluster = cluster_type(
            command=[
                *scratch.arguments(shape, optimizer, steps, self.directory / "checkpoints"),
                *("--reft", str(config)),
            ],
            directory=self.directory,
            nodes=shape.nodes,
            procs_per_node=shape.procs_per_node,
            options=("--max-restarts", str(max_restarts), *options),
            env={"REFT_EVENTS": str(self.events_dir)},
            job_id=job_id,
            memory_root=memory_root,
        )

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        self.cluster.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.close()

    def run_to_end(self, timeout_secs: float) -> str | None:
        """Replace nodes that are gone, until the job ends. Returns why it did not end well; None: it did."""
        deadline = time.monotonic() + timeout_secs
        while True:
            for index, node in list(self.cluster.current.items()):
                if node.process.poll() == _SIGKILLED:
                    self.replaced.append(node)
                    self.cluster.start_node(index)
            codes = {node.node_id: node.process.poll() for node in self.cluster.current.values()}
            if all(code is not None for code in codes.values()):
                return f"launchers ended with {codes}" if any(codes.values()) else None
            if time.monotonic() > deadline:
                return f"the time is over: {codes}"
            time.sleep(_POLL_SECS)

    def status(self, index: int = 0) -> dict[str, Any]:
        try:
            return self.cluster.status(index) or {}
        except (OSError, json.JSONDecodeError):
            return {}

    @property
    def history(self) -> History:
        return History.of(self.events_dir)

    @property
    def logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.directory.glob("node*.log"))
        )

    def wait_for(
        self, what: str, condition: Callable[[], bool], timeout_secs: float = SECS_PER_LIFE
    ) -> None:
        self.cluster.wait_until(condition, timeout_secs, what)

    def wait_for_step(self, step: int, life: int | None = None) -> None:
        self._wait_in_lives(f"step {step}", life, lambda found: found.last_step >= step)

    def wait_for_commit(self, step: int, life: int | None = None) -> None:
        self._wait_in_lives(
            f"a commit of step {step}", life, lambda found: max(found.committed, default=0) >= step
        )

    def _wait_in_lives(
        self, what: str, life: int | None, reached: Callable[[Incarnation], bool]
    ) -> None:
        def done() -> bool:
            lives = self.history.incarnations.items()
            return any(reached(found) for number, found in lives if life in (None, number))

        self.wait_for(what, done)

    def newest_protection(self) -> str:
        return newest_protection(*map(self.cluster.job_dir, self.cluster.current))

    def stop(self) -> None:
        """As a scheduler does it: every launcher must end of the signal."""
        for index in self.cluster.current:
            self.cluster.signal_node(index, signal.SIGTERM)
        assert set(self.cluster.wait(SECS_PER_LIFE).values()) == {128 + signal.SIGTERM}, self.logs[
            -6000:
        ]

    def left_over(self) -> list[str]:
        rendezvous = self.cluster.rendezvous
        return [
            " ".join(process.cmdline())
            for process in self.cluster.survivors()
            if rendezvous is None or process.pid != rendezvous.pid
        ]

    def memory_left(self) -> list[Path]:
        nodes = self.cluster.current.values()
        return [p for p in (node.memory_dir / self.cluster.job_id for node in nodes) if p.exists()]


@dataclass(frozen=True)
class Recovery:
    """One return to training: ``commit`` is the newest version that any rank had seen committed."""

    version: int
    source: str
    last_step: int
    commit: int


def recoveries(history: History) -> list[Recovery]:
    """One per incarnation that trained after another one had."""
    found = []
    last_step = commit = 0
    for _, life in sorted(history.incarnations.items()):
        if life.steps and (last_step or commit):
            restored = [event.fields for event in life.restored.values()]
            version = max((int(fields["version"]) for fields in restored), default=0)
            source = str(restored[0]["source"]) if restored else "none"
            found.append(Recovery(version, source, last_step, commit))
        last_step = life.last_step or last_step
        commit = max(life.committed, default=commit)
    return found


def wrong_losses(history: History, reference: Losses, steps: int | None = None) -> list[str]:
    """Every step whose loss, however often it was computed, is not the undisturbed run's to the bit.
    ``history``: of the run. ``reference``: of the undisturbed one. ``steps``: that must all have been
    done; None: those that were."""
    wrong = []
    wanted = (
        range(1, steps + 1) if steps is not None else sorted(set(history.losses) & set(reference))
    )
    for step in wanted:
        found = history.losses.get(step, [])
        if not found:
            wrong.append(f"step {step} was never done")
        elif set(found) != {reference[step]}:
            wrong.append(f"step {step}: losses {sorted(set(found))}, undisturbed {reference[step]}")
    return wrong[:5]


def broken_promises(history: History) -> list[str]:
    """What recovery has lost that it must not lose: never older than the newest commit (P3)."""
    return [
        f"resumed from step {r.version} ({r.source}), but step {r.commit} of {r.last_step} had been committed"
        for r in recoveries(history)
        if r.version < r.commit
    ]


def run_planned(scratch: Scratch, job: PlannedJob, name: str, steps: int = 0) -> list[Recovery]:
    shape, optimizer = job.setup.shape, job.setup.optimizer
    reference = scratch.reference(shape, optimizer, max(steps, job.steps))
    block, restarts = job.reft_block(str(scratch.root / name / "persisted")), job.process_kills
    with FaultJob(
        scratch, name, shape, optimizer, steps=job.steps, block=block, max_restarts=restarts
    ) as running:
        problem = running.run_to_end(SECS_PER_LIFE * job.lives)
        problems = [problem] if problem else []
        if not problem:
            problems += [f"left behind: {line}" for line in running.left_over()]
            problems += [f"memory left after a good end: {path}" for path in running.memory_left()]
    history = running.history
    problems += wrong_losses(history, reference, job.steps)
    problems += broken_promises(history)
    problems += _unmade_faults(job, running, history)
    assert problems == [], f"logs: {running.directory}"
    return recoveries(history)


_TRAINER_KILLED = re.compile(r"trainers ended: .*killed by SIGKILL")
_DAEMON_KILLED = re.compile(r"the node daemon ended \(-9\)")


def _unmade_faults(job: PlannedJob, running: FaultJob, history: History) -> list[str]:
    """A fault that never struck would let a cell of the matrix pass untested."""
    wrong = []
    if len(running.replaced) != job.node_kills:
        wrong.append(f"{job.node_kills} nodes had to die, {len(running.replaced)} did")
    trainers = len(_TRAINER_KILLED.findall(running.logs))
    if trainers != job.process_kills:
        wrong.append(f"{job.process_kills} trainers had to be killed alone, {trainers} were")
    if any(not f.restarts for f in job.faults) and not _DAEMON_KILLED.search(running.logs):
        wrong.append("the daemon had to be killed while it persisted, and was not")
    if len(history.incarnations) != job.lives:
        wrong.append(
            f"{job.lives} incarnations were planned, {sorted(history.incarnations)} were lived"
        )
    return wrong


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in tmpfs, where there is one, for memory that outlives a run."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="reft-faults-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[str | None]:
    """A tmpfs of its own on ``path``; yields why there is none where it cannot be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    reason = _mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path))
    try:
        yield reason
    finally:
        if reason is None:
            # Lazily: a process that is just ending may still have a file open.
            subprocess.run(["umount", "-l", str(path)], check=False)


def remount(path: Path, how: str) -> None:
    assert _mount("-o", f"remount,{how}", str(path)) is None


def _mount(*arguments: str) -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"it cannot be mounted: {done.stderr.strip()}"


def exchange(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def fill_up(directory: Path, leave_bytes: int = 0) -> Path:
    """Take the free space of a file system with one file; returns it, to be removed. Others may write there at
    the same time."""
    path = directory / "filler"
    deadline = time.monotonic() + 60.0
    with path.open("wb") as file:
        while True:
            stats = os.statvfs(directory)
            free_bytes = stats.f_bavail * stats.f_frsize - leave_bytes
            try:
                if free_bytes > 0:
                    os.posix_fallocate(file.fileno(), 0, free_bytes)
                break
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                    raise
    return path
