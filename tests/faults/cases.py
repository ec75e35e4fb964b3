"""The fault matrix as data: its axes, the pairs that must be covered, and jobs that cover them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from itertools import product as iter_product
from typing import Any, NamedTuple

_FIRST_STEP = 4
_RANGE_STEPS = 10
"""A version may be skipped, so that a fault is armed for several steps in a row and fires at the first."""
_GAP_STEPS = (
    8  # Between two faults: what was restored after the first lies before the range of the second
)
_PERSIST_STEPS = 80
_TAIL_STEPS = 6


MOMENTS = (
    *("before_copy", "during_copy", "after_seal", "during_recovery"),
    *("before_commit", "during_step", "during_persist"),
)
"""When a node fails, in the order within a job. Before the copy of the first version nothing is committed."""


class Coordinate(NamedTuple):
    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp}.dp{self.dp}.tp{self.tp}"


@dataclass(frozen=True)
class Shape:
    """A layout on so many nodes alike. Its nodes are told apart by what they hold, not by their number: ranks are
    assigned anew whenever one is replaced."""

    pp: int
    dp: int
    tp: int
    nodes: int

    @property
    def name(self) -> str:
        return "x".join(
            f"{n}{d}" for n, d in (("PP", self.pp), ("DP", self.dp), ("TP", self.tp)) if d > 1
        )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def procs_per_node(self) -> int:
        return self.world_size // self.nodes

    def coordinates(self, node: int | None = None) -> tuple[Coordinate, ...]:
        """What the ``node``-th node holds: one rank, or one whole replica. Without it, everyone."""
        everyone = tuple(
            Coordinate(*c) for c in iter_product(range(self.pp), range(self.dp), range(self.tp))
        )
        if node is None:
            return everyone
        if self.procs_per_node == 1:
            return (everyone[node],)
        return tuple(c for c in everyone if c.dp == node)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--pp", str(self.pp), "--dp", str(self.dp), "--tp", str(self.tp))


@dataclass(frozen=True)
class Optimizer:
    name: str
    arguments: tuple[str, ...]
    needs_fp16: bool = False


DP2, DP3, DP4 = Shape(1, 2, 1, nodes=2), Shape(1, 3, 1, nodes=3), Shape(1, 4, 1, nodes=4)
PP2_DP2, DP2_TP2, PP2_DP3 = (
    Shape(2, 2, 1, nodes=4),
    Shape(1, 2, 2, nodes=2),
    Shape(2, 3, 1, nodes=3),
)
SHAPES = (PP2_DP2, DP4, DP2_TP2, PP2_DP3)
OPTIMIZERS = (
    Optimizer("zero0-fp32", ("--zero", "0", "--dtype", "fp32")),
    Optimizer("zero0-fp16", ("--zero", "0", "--dtype", "fp16"), needs_fp16=True),
    Optimizer("zero1-bf16-fp32", ("--zero", "1", "--dtype", "bf16", "--grad-accum-dtype", "fp32")),
    Optimizer("zero1-bf16-bf16", ("--zero", "1", "--dtype", "bf16", "--grad-accum-dtype", "bf16")),
)


VARIANTS = ("has", "host", "host_device", "blocking", "inter_node")
PROTECTIONS = {"arc": 2, "aec": 2, "rs:2": 3, "arc+aec": 3}
"""Each with the smallest data-parallel degree that has room for it."""


@dataclass(frozen=True)
class Setup:
    shape: Shape
    optimizer: Optimizer
    variant: str = "has"
    protection: str = "arc"

    @property
    def values(self) -> tuple[str, ...]:
        return (self.shape.name, self.optimizer.name, self.variant, self.protection)

    def __str__(self) -> str:
        return " ".join(self.values)


@dataclass(frozen=True)
class Case:
    moment: str
    node: int
    setup: Setup

    @property
    def values(self) -> tuple[Any, ...]:
        return (*self.setup.values, self.moment, self.node)


Pair = tuple[int, Any, int, Any]  # Two factors, by their number, each with its value


def pairs_of(case: Case | Setup) -> frozenset[Pair]:
    """All pairs of values. A node means something within a shape only, so (moment, shape, node) and (optimizer,
    shape, node) are not pairs; each of the two is paired with both."""
    return frozenset((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(case.values), 2))


def product(chosen: Iterable[Setup]) -> list[Case]:
    return [
        Case(moment, node, s) for s in chosen for node in range(s.shape.nodes) for moment in MOMENTS
    ]


def pairwise(cases: Sequence[Any]) -> list[Any]:
    """Few of ``cases`` that hold every pair that any of them holds: always the one with most new pairs,
    of equal ones the first."""
    pairs = [pairs_of(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


_COMBINED = (Setup(*values) for values in iter_product(SHAPES, OPTIMIZERS, VARIANTS, PROTECTIONS))
SETUPS = [s for s in _COMBINED if PROTECTIONS[s.protection] <= s.shape.dp]
# Few cases in few jobs: a job has one setup, so setups that hold every pair of theirs come first, then of their
# cells those that hold every pair.
PAIRS = pairwise(product(pairwise(SETUPS)))


@dataclass(frozen=True)
class PlannedFault:
    case: Case | None  # the cell it stands for; None: it only leads up to the next one
    moment: str
    coordinate: Coordinate  # whose node fails
    action: str  # ``kill_node`` or ``kill``
    incarnation: int  # in which life of the job
    steps: range  # versions at which it is armed

    @property
    def restarts(self) -> bool:
        """Whether trainers end: a daemon that dies alone does not stop them."""
        return self.moment != "during_persist" or self.action == "kill_node"

    def config(self) -> list[dict[str, Any]]:
        c = self.coordinate
        common = {"point": self.moment, "pp": c.pp, "dp": c.dp, "tp": c.tp}
        common |= {"incarnation": self.incarnation, "action": self.action}
        return [{**common, "step": step} for step in self.steps]


@dataclass(frozen=True)
class PlannedJob:
    setup: Setup
    faults: tuple[PlannedFault, ...]
    steps: int

    @property
    def cases(self) -> list[Case]:
        return [fault.case for fault in self.faults if fault.case is not None]

    @property
    def process_kills(self) -> int:
        return sum(f.action == "kill" and f.restarts for f in self.faults)

    @property
    def node_kills(self) -> int:
        return sum(f.action == "kill_node" for f in self.faults)

    @property
    def lives(self) -> int:
        return 1 + sum(f.restarts for f in self.faults)

    def reft_block(self, persist_dir: str) -> dict[str, Any]:
        block: dict[str, Any] = {
            "variant": self.setup.variant,
            "protection": self.setup.protection,
            "faults": [entry for fault in self.faults for entry in fault.config()],
        }
        if any(fault.moment == "during_persist" for fault in self.faults):
            block["persist"] = {"dir": persist_dir, "interval_steps": 2}
        return block

    def __str__(self) -> str:
        return f"{self.setup}: " + "; ".join(
            f"{f.moment} ({f.action}, {f.coordinate})" for f in self.faults
        )


def plan_jobs(cases: Sequence[Case]) -> list[PlannedJob]:
    waiting: dict[Setup, list[list[Case]]] = {}
    for case in cases:
        jobs = waiting.setdefault(case.setup, [])
        # In the job that is shortest, and has no such moment yet; nodes differ within a job where they can.
        fitting = [job for job in jobs if all(other.moment != case.moment for other in job)]
        same_node = Counter({id(job): sum(o.node == case.node for o in job) for job in fitting})
        if fitting:
            min(fitting, key=lambda job: (same_node[id(job)], len(job))).append(case)
        else:
            jobs.append([case])
    return [
        plan_job(job, number)
        for number, job in enumerate(j for jobs in waiting.values() for j in jobs)
    ]


def plan_job(cases: Sequence[Case], number: int = 0) -> PlannedJob:
    """One job for cases of the same setup. ``cases``: every moment at most once. ``number``: of the job; the
    first action alternates with it."""
    setup = cases[0].setup
    planned: list[tuple[str, int, Case | None]] = []
    for case in sorted(cases, key=lambda case: MOMENTS.index(case.moment)):
        if case.moment == "during_recovery" and all(
            moment == "before_copy" for moment, *_ in planned
        ):
            planned.append(("during_step", (case.node + 1) % setup.shape.nodes, None))
        planned.append((case.moment, case.node, case))
    step, incarnation = _FIRST_STEP, 1
    faults: list[PlannedFault] = []
    for i, (moment, node, case) in enumerate(planned):
        coordinates = setup.shape.coordinates(node)
        steps, step = _armed(moment, step)
        # They alternate: until what a recovery restored is committed anew, a second lost node is one too many.
        action = ("kill_node", "kill")[(number + i) % 2]
        faults.append(
            PlannedFault(
                case, moment, coordinates[i % len(coordinates)], action, incarnation, steps
            )
        )
        incarnation += faults[-1].restarts
    return PlannedJob(setup, tuple(faults), step + _TAIL_STEPS)


def _armed(moment: str, step: int) -> tuple[range, int]:
    """Versions at which a fault is armed that may be from ``step`` on; from where the next one may be."""
    if moment == "before_copy":
        return range(1, 2), step
    if moment == "during_recovery":
        return range(1, step + 1), step
    if moment == "during_persist":
        # The first version of this life that is written: writing one takes as long as many steps.
        return range(1, step + _PERSIST_STEPS), step + _PERSIST_STEPS
    return range(step, step + _RANGE_STEPS), step + _RANGE_STEPS + _GAP_STEPS
