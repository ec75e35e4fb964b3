"""A job in the storm: nodes that come back with their memory, power that is cut, how the job is doing, and what it has
to have kept to, out of the events that its processes wrote."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.job_events import EventReader, History
from benchmarks.local_cluster import LocalCluster, LocalNode
from tests.attack.jobs import asked
from tests.faults.cases import OPTIMIZERS, Optimizer, Shape
from tests.faults.job import (
    FaultJob,
    Losses,
    Recovery,
    Scratch,
    memory_directory,
    recoveries,
    small_file_system,
    wrong_losses,
)

SAFE_SECS = 420.0
"""Until the job has to have committed again: a start of the job on a machine that is used by others, twice."""
_ENDING_SECS = (
    90.0  # Between the end of the first launcher of a job and the last: the grace, and more
)
_POLL_SECS = 0.1


class BrokenPromiseError(Exception):
    """The job did what it must not do, or did not do what it must."""


@dataclass(frozen=True)
class Chapter:
    """A part of a job's life in which its memory was never lost."""

    events_dir: Path  # what its processes wrote
    restored: int  # step on disk from which its first life had to go on; 0: it began anew


class StormCluster(LocalCluster):
    port = 0

    def start(self) -> None:
        self.start_rendezvous(self.port)
        self.port = int(self.endpoint.rsplit(":", 1)[1])
        for index in range(self.nodes):
            self.start_node(index)

    def restart_node(self, index: int) -> LocalNode:
        kept, old = self.history, self.current[index]
        self.history = [
            node for node in kept if node.index != index or node.generation < old.generation
        ]
        node = self.start_node(index)
        self.history = [*kept, node]
        return node

    def kill_rendezvous(self) -> None:
        self.rendezvous.kill()
        self.rendezvous.wait()

    def cut_power(self, *, rendezvous: bool) -> None:
        names = [node.node_id for node in self.history]
        for name in dict.fromkeys(names):
            self.signal_all(name, signal.SIGSTOP)
        for name in dict.fromkeys(names):
            self.kill_all(name)
        if rendezvous:
            self.kill_rendezvous()

    def come_back(self) -> None:
        if self.rendezvous is None or self.rendezvous.poll() is not None:
            self.start_rendezvous(self.port)
        for index in sorted(self.current):
            self.restart_node(index)


class StormJob(FaultJob):
    cluster: StormCluster

    def __init__(
        self, scratch: Scratch, name: str, setup: StormSetup, steps: int, memory_root: Path
    ) -> None:
        self.setup = setup
        self.steps = steps
        self.persist_dir = scratch.root / name / "persisted"
        super().__init__(
            scratch,
            name,
            setup.shape,
            setup.optimizer,
            steps=steps,
            block=setup.block(self.persist_dir),
            max_restarts=12,
            memory_root=memory_root,
            options=("--max-peer-restarts", "999"),
            job_id="storm",
            cluster_type=StormCluster,
        )
        self.live = History()
        self._reader = EventReader(self.events_dir)
        self.restored = 0
        """Step on disk from which the job had to go on when it lost all memory; 0: it never did."""
        self.chapters: list[
            Chapter
        ] = []  # what was before the memory of all nodes was lost, oldest first

    def poll(self) -> History:
        for event in self._reader.poll():
            self.live.feed(event)
        return self.live

    def codes(self) -> list[int | None]:
        return [node.process.poll() for node in self.cluster.current.values()]

    @property
    def ended(self) -> bool:
        return all(code is not None for code in self.codes())

    @property
    def newest_commit(self) -> int:
        return max(
            (step for life in self.poll().incarnations.values() for step in life.committed),
            default=0,
        )

    def under_way(self) -> int:
        """The step that a life which is about to end may still do and commit."""
        return self.poll().last_step + 1

    def tolerance(self) -> int:
        nodes = self.asked("status").get("here", [])
        if len(nodes) < len(self.cluster.current):
            return 0
        return min((node["protection"] or {}).get("tolerance", 0) for node in nodes)

    def asked(self, command: str) -> dict[str, Any]:
        nodes = self.cluster.current.values()
        return asked(command, [node.memory_dir for node in nodes], self.cluster.job_id)

    def persisted(self) -> list[Path]:
        return sorted(self.persist_dir.glob("*/global_step*"), key=step_of)

    def new_chapter(self, restored: int) -> None:
        """The memory of all nodes is gone while nothing runs: from here on, incarnations may have old numbers
        again, and nothing is promised but what is on disk. ``restored``: step of the checkpoint that has
        to be loaded."""
        self.poll()
        kept = self.events_dir.with_name(f"events-{len(self.chapters)}")
        self.events_dir.rename(kept)
        self.chapters.append(Chapter(kept, self.restored))
        self.live = History()
        self._reader = EventReader(self.events_dir)
        self.restored = restored

    def all_chapters(self) -> list[Chapter]:
        return [*self.chapters, Chapter(self.events_dir, self.restored)]

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_secs: float = SAFE_SECS
    ) -> bool:
        deadline = time.monotonic() + timeout_secs
        while not condition():
            codes = self.codes()
            if all(code == 0 for code in codes):
                return False
            if any(codes):
                self._let_end()
                raise BrokenPromiseError(f"waited for {what}: launchers ended with {self.codes()}")
            if time.monotonic() > deadline:
                raise BrokenPromiseError(f"waited {timeout_secs:.0f} s for {what}: {self.state()}")
            time.sleep(_POLL_SECS)
        return True

    def wait_for_commits(self, number: int) -> bool:
        wanted = self.newest_commit + number
        return self.wait(lambda: self.newest_commit >= wanted, f"a commit of step {wanted}")

    def wait_until_safe(self, after: int) -> bool:
        tolerance = self.setup.tolerance
        return self.wait(
            lambda: self._committed_now() > after, f"a commit after step {after}"
        ) and self.wait(lambda: self.tolerance() >= tolerance, f"a tolerance of {tolerance}")

    def state(self) -> str:
        life = self.poll().current
        return (
            f"incarnation {life.number}, step {life.last_step}, newest commit {self.newest_commit}, "
            f"{len(life.ready)} ranks ready, launchers {self.codes()}"
        )

    def left_over(self) -> list[str]:
        wrong = [f"left behind: {line}" for line in super().left_over()]
        if any(self.codes()):
            return wrong
        return wrong + [f"memory left after a good end: {path}" for path in self.memory_left()]

    def forgotten(self) -> list[str]:
        report = self.asked("verify")
        wanted, restores = self._committed_now(), report.get("restores")
        if restores is not None and restores["step"] >= wanted and not report["bad_blocks"]:
            return []
        return [f"step {wanted} was committed; reft verify says {report}"]

    def _committed_now(self) -> int:
        return max(self.poll().current.committed, default=0)

    def _let_end(self) -> None:
        deadline = time.monotonic() + _ENDING_SECS
        while not self.ended and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)


@dataclass(frozen=True)
class Verdict:
    problems: tuple[str, ...]  # promises that were broken
    recoveries: tuple[Recovery, ...]  # returns to training
    losses: int  # that were compared, every repetition counted


def judge(chapters: Sequence[tuple[Chapter, History]], reference: Losses) -> Verdict:
    problems: list[str] = []
    found: list[Recovery] = []
    losses = 0
    for chapter, history in chapters:
        problems += wrong_losses(history, reference)
        problems += unknown_steps(history, reference)
        problems += wrong_beginning(chapter.restored, history)
        losses += sum(len(values) for values in history.losses.values())
        for r in recoveries(history):
            found.append(r)
            if r.version < r.commit:
                problems.append(
                    f"resumed from step {r.version} ({r.source}), but step {r.commit} had been committed"
                )
    return Verdict(tuple(problems), tuple(found), losses)


def unknown_steps(history: History, reference: Losses) -> list[str]:
    """Losses with nothing to be compared with would pass unseen."""
    late = sorted(set(history.losses) - set(reference))
    return [f"steps {late[0]} to {late[-1]}: the undisturbed run has none of them"] if late else []


def wrong_beginning(restored: int, history: History) -> list[str]:
    first = next((life for _, life in sorted(history.incarnations.items()) if life.steps), None)
    if not restored or first is None:
        return []
    versions = {int(e.fields["version"]) for e in first.restored.values()}
    sources = {str(e.fields["source"]) for e in first.restored.values()}
    if versions == {restored} and sources == {"disk"}:
        return []
    return [
        f"without memory, step {restored} had to come from disk; ranks restored steps {sorted(versions)} from "
        f"{sorted(sources)}"
    ]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("global_step"))


@contextmanager
def memory_of(setup: StormSetup, scratch: Path) -> Iterator[tuple[Path, bool]]:
    if not setup.memory_mib:
        with memory_directory() as path:
            yield path, False
        return
    place = scratch / "tmpfs"
    with small_file_system(place, f"{setup.memory_mib}m") as reason:
        if reason is None:
            yield place, True
            return
    shutil.rmtree(place, ignore_errors=True)
    with memory_directory() as path:
        yield path, False


FP32, _, BF16, BF16_BF16 = OPTIMIZERS
_KEPT = {"zero_optimization": {"reduce_scatter": False, "contiguous_gradients": False}}
"""What ZeRO-1 needs to keep the gradients of other ranks' partitions, for AOR."""
BF16_AOR = replace(
    BF16,
    name=f"{BF16.name}-gradients-kept",
    arguments=(*BF16.arguments, "--deepspeed-config", json.dumps(_KEPT)),
)


@dataclass(frozen=True)
class StormSetup:
    name: str  # for people and ``--setups``
    shape: Shape  # layout and nodes
    optimizer: Optimizer  # number format
    protection: str  # as in the block
    steps: int  # of a job: so many that several attacks find it alive, so few that it soon ends after them
    tolerance: int = (
        1  # lost nodes of a sharding group that it survives; so many are struck at once
    )
    persist_steps: int = 0  # distance of its checkpoints on disk; 0: none
    memory_mib: int = (
        0  # size of a file system of its own for the memory of all nodes; 0: the machine's
    )

    def block(self, persist_dir: Path) -> dict[str, Any]:
        """Its ``reft`` block. Short waits: what stands still has to be noticed while the storm waits."""
        block: dict[str, Any] = {
            "enabled": True,
            "block_bytes": 16384,
            "protection": self.protection,
            "tolerance": self.tolerance,
            "grace_secs": 60,
        }
        if self.persist_steps:
            block["persist"] = {
                "dir": str(persist_dir),
                "interval_steps": self.persist_steps,
                "keep": 3,
            }
        return block


SETUPS = (
    StormSetup("dp2-arc-persist", Shape(1, 2, 1, 2), FP32, "arc", 1600, persist_steps=10),
    StormSetup("pp2dp2-arc", Shape(2, 2, 1, 4), BF16, "arc", 500),
    StormSetup("dp3-aec", Shape(1, 3, 1, 3), BF16, "aec", 900, memory_mib=256),
    StormSetup(
        "dp3-arc-aec-persist",
        Shape(1, 3, 1, 3),
        FP32,
        "arc+aec",
        1200,
        tolerance=2,
        persist_steps=10,
    ),
    StormSetup("dp4-rs2", Shape(1, 4, 1, 4), FP32, "rs:2", 700, tolerance=2),
    StormSetup("tp2dp2-arc", Shape(1, 2, 2, 2), BF16_BF16, "arc", 500, memory_mib=256),
    StormSetup("pp2dp2-arc-aor", Shape(2, 2, 1, 4), BF16_AOR, "arc+aor", 500),
    StormSetup("dp3-aec-aor", Shape(1, 3, 1, 3), BF16_AOR, "aec+aor", 900),
)
"""In an order in which the first few already differ in layout, format and protection."""
