"""The fault matrix as data: its axes, the pairs that must be covered, and jobs that cover them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from itertools import product as iter_product
from typing import Any, Protocol, TypeVar

from reft.config import FaultPoint, Variant
from reft.grid import Coordinate, Degrees
from reft.protect.codes import Scheme

_FIRST_STEP = 4
_RANGE_STEPS = 10
"""A version may be skipped, so that a fault is armed for several steps in a row and fires at the first."""
_GAP_STEPS = 8  # Between two faults: what was restored after the first lies before the range of the second
_PERSIST_STEPS = 80
_TAIL_STEPS = 6


MOMENTS = (
    FaultPoint.BEFORE_COPY,
    FaultPoint.DURING_COPY,
    FaultPoint.AFTER_SEAL,
    FaultPoint.DURING_RECOVERY,
    FaultPoint.BEFORE_COMMIT,
    FaultPoint.DURING_STEP,
    FaultPoint.DURING_PERSIST,
)
"""When a node fails, in the order within a job. Before the copy of the first version nothing is committed."""


@dataclass(frozen=True)
class Shape:
    """A layout on nodes. Its nodes are told apart by what they hold, not by their number: ranks are
    assigned anew whenever one is replaced."""

    name: str
    degrees: Degrees
    nodes: int
    procs_per_node: int

    def coordinates(self, node: int) -> tuple[Coordinate, ...]:
        """What the ``node``-th node holds: one rank, or one whole replica."""
        everyone = self.degrees.coordinates()
        if self.procs_per_node == 1:
            return (everyone[node],)
        return tuple(c for c in everyone if c.dp == node)

    @property
    def arguments(self) -> tuple[str, ...]:
        d = self.degrees
        return ("--pp", str(d.pp), "--dp", str(d.dp), "--tp", str(d.tp))


def shape(pp: int, dp: int, tp: int, nodes: int) -> Shape:
    """A layout on so many nodes alike."""
    name = "x".join(f"{n}{d}" for n, d in (("PP", pp), ("DP", dp), ("TP", tp)) if d > 1)
    return Shape(name, Degrees(pp, dp, tp), nodes, pp * dp * tp // nodes)


@dataclass(frozen=True)
class Optimizer:
    """A number format with its optimizer wrapper."""

    name: str
    arguments: tuple[str, ...]
    needs_fp16: bool = False


SHAPES = (
    Shape("PP2xDP2", Degrees(2, 2, 1), nodes=4, procs_per_node=1),
    Shape("PP1xDP4", Degrees(1, 4, 1), nodes=4, procs_per_node=1),
    Shape("TP2xDP2", Degrees(1, 2, 2), nodes=2, procs_per_node=2),
    Shape("PP2xDP3", Degrees(2, 3, 1), nodes=3, procs_per_node=2),
)
OPTIMIZERS = (
    Optimizer("zero0-fp32", ("--zero", "0", "--dtype", "fp32")),
    Optimizer("zero0-fp16", ("--zero", "0", "--dtype", "fp16"), needs_fp16=True),
    Optimizer("zero1-bf16-fp32", ("--zero", "1", "--dtype", "bf16", "--grad-accum-dtype", "fp32")),
    Optimizer("zero1-bf16-bf16", ("--zero", "1", "--dtype", "bf16", "--grad-accum-dtype", "bf16")),
)


VARIANTS = tuple(variant for variant in Variant if variant is not Variant.NONE)
PROTECTIONS = ("arc", "aec", "rs:2", "arc+aec")


@dataclass(frozen=True)
class Setup:
    """All that is the same for every fault of a job."""

    shape: Shape
    optimizer: Optimizer
    variant: Variant = Variant.HAS
    protection: str = "arc"

    @property
    def values(self) -> tuple[str, ...]:
        return (self.shape.name, self.optimizer.name, str(self.variant), self.protection)

    @property
    def pairs(self) -> frozenset[Pair]:
        return _pairs(self.values)

    def __str__(self) -> str:
        return " ".join(self.values)


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    moment: FaultPoint
    node: int
    setup: Setup

    def __str__(self) -> str:
        return f"{self.moment}, node {self.node}, {self.setup}"

    @property
    def pairs(self) -> frozenset[Pair]:
        """All pairs of values. A node means something within a shape only, so (moment, shape, node) and
        (optimizer, shape, node) are not pairs; each of the two is paired with both."""
        return _pairs((*self.setup.values, self.moment, self.node))


Pair = tuple[int, Any, int, Any]  # Two factors, by their number, each with its value


def _pairs(values: Sequence[Any]) -> frozenset[Pair]:
    return frozenset((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(values), 2))


def product(chosen: Iterable[Setup]) -> list[Case]:
    """Every cell of some setups."""
    return [Case(moment, node, s) for s in chosen for node in range(s.shape.nodes) for moment in MOMENTS]


class _Paired(Protocol):
    @property
    def pairs(self) -> frozenset[Pair]: ...


P = TypeVar("P", bound=_Paired)


def pairwise(cases: Sequence[P]) -> list[P]:
    """Few of ``cases`` that hold every pair that any of them holds: always the one with most new pairs,
    of equal ones the first."""
    pairs = [case.pairs for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


_COMBINED = (Setup(*values) for values in iter_product(SHAPES, OPTIMIZERS, VARIANTS, PROTECTIONS))
SETUPS = [s for s in _COMBINED if Scheme.parse(s.protection).least_members <= s.shape.degrees.dp]
# Few cases in few jobs: a job has one setup, so setups that hold every pair of theirs come first, then of their
# cells those that hold every pair.
PAIRS = pairwise(product(pairwise(SETUPS)))


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a job."""

    case: Case | None  # the cell it stands for; None: it only leads up to the next one
    moment: FaultPoint
    coordinate: Coordinate  # whose node fails
    action: str  # ``kill_node`` or ``kill``
    incarnation: int  # in which life of the job
    steps: range  # versions at which it is armed

    @property
    def restarts(self) -> bool:
        """Whether trainers end: a daemon that dies alone does not stop them."""
        return self.moment is not FaultPoint.DURING_PERSIST or self.action == "kill_node"

    def config(self) -> list[dict[str, Any]]:
        """Its entries of ``reft.faults``."""
        c = self.coordinate
        common = {"point": str(self.moment), "pp": c.pp, "dp": c.dp, "tp": c.tp}
        common |= {"incarnation": self.incarnation, "action": self.action}
        return [{**common, "step": step} for step in self.steps]


@dataclass(frozen=True)
class PlannedJob:
    """Several faults in one run of one setup."""

    setup: Setup
    faults: tuple[PlannedFault, ...]
    steps: int
    persist_interval: int = 0

    @property
    def shape(self) -> Shape:
        return self.setup.shape

    @property
    def optimizer(self) -> Optimizer:
        return self.setup.optimizer

    @property
    def cases(self) -> list[Case]:
        return [fault.case for fault in self.faults if fault.case is not None]

    @property
    def process_kills(self) -> int:
        """Faults that use up a restart: a trainer that dies by itself."""
        return sum(f.action == "kill" and f.restarts for f in self.faults)

    @property
    def node_kills(self) -> int:
        return sum(f.action == "kill_node" for f in self.faults)

    @property
    def lives(self) -> int:
        return 1 + sum(f.restarts for f in self.faults)

    def reft_block(self, persist_dir: str) -> dict[str, Any]:
        block: dict[str, Any] = {
            "enabled": True,
            "block_bytes": 16384,
            "variant": str(self.setup.variant),
            "protection": self.setup.protection,
            "faults": [entry for fault in self.faults for entry in fault.config()],
        }
        if self.persist_interval:
            block["persist"] = {"dir": persist_dir, "interval_steps": self.persist_interval}
        return block

    def __str__(self) -> str:
        return f"{self.setup}: " + "; ".join(f"{f.moment} ({f.action}, {f.coordinate})" for f in self.faults)


def plan_jobs(cases: Sequence[Case]) -> list[PlannedJob]:
    """Put cases of one setup together, every moment at most once per job."""
    waiting: dict[Setup, list[list[Case]]] = {}
    for case in cases:
        jobs = waiting.setdefault(case.setup, [])
        # In the job that is shortest, and has no such moment yet; nodes differ within a job where they can.
        fitting = [job for job in jobs if all(other.moment is not case.moment for other in job)]
        same_node = Counter({id(job): sum(o.node == case.node for o in job) for job in fitting})
        if fitting:
            min(fitting, key=lambda job: (same_node[id(job)], len(job))).append(case)
        else:
            jobs.append([case])
    return [plan_job(job, number) for number, job in enumerate(j for jobs in waiting.values() for j in jobs)]


@dataclass
class _Plan:
    """A job as it is put together, fault by fault."""

    action: str
    step: int = _FIRST_STEP
    incarnation: int = 1
    faults: list[PlannedFault] = field(default_factory=list)

    def add(self, case: Case, moment: FaultPoint, *, counts: bool = True) -> None:
        steps = self._steps(moment)
        coordinates = case.setup.shape.coordinates(case.node)
        fault = PlannedFault(
            case=case if counts else None,
            moment=moment,
            coordinate=coordinates[len(self.faults) % len(coordinates)],
            action=self._action(moment),
            incarnation=self.incarnation,
            steps=steps,
        )
        self.faults.append(fault)
        self.incarnation += fault.restarts
        self.action = _OTHER[fault.action]

    def _action(self, moment: FaultPoint) -> str:
        if moment is FaultPoint.DURING_RECOVERY:
            # Until the restored version is committed anew, the second lost node would be one too many.
            return _OTHER[self.faults[-1].action]
        return self.action

    def _steps(self, moment: FaultPoint) -> range:
        if moment is FaultPoint.BEFORE_COPY:
            return range(1, 2)
        if moment is FaultPoint.DURING_RECOVERY:
            return range(1, self.step + 1)
        if moment is FaultPoint.DURING_PERSIST:
            # The first version of this life that is written: writing one takes as long as many steps.
            self.step += _PERSIST_STEPS
            return range(1, self.step)
        begin, self.step = self.step, self.step + _RANGE_STEPS + _GAP_STEPS
        return range(begin, begin + _RANGE_STEPS)


_OTHER = {"kill": "kill_node", "kill_node": "kill"}


def plan_job(cases: Sequence[Case], number: int = 0) -> PlannedJob:
    """One job for cases of the same setup. ``cases``: every moment at most once. ``number``: of the job; the
    first action alternates with it."""
    ordered = sorted(cases, key=lambda case: MOMENTS.index(case.moment))
    plan = _Plan(action=("kill_node", "kill")[number % 2])
    for case in ordered:
        nothing_restored = all(f.moment is FaultPoint.BEFORE_COPY for f in plan.faults)
        if case.moment is FaultPoint.DURING_RECOVERY and nothing_restored:
            plan.add(
                replace(case, node=(case.node + 1) % case.setup.shape.nodes),
                FaultPoint.DURING_STEP,
                counts=False,
            )
        plan.add(case, case.moment)
    persists = any(fault.moment is FaultPoint.DURING_PERSIST for fault in plan.faults)
    return PlannedJob(
        setup=ordered[0].setup,
        faults=tuple(plan.faults),
        steps=plan.step + _TAIL_STEPS,
        persist_interval=2 if persists else 0,
    )


def reference_steps(jobs: Iterable[PlannedJob]) -> Mapping[tuple[str, str], int]:
    """How long the undisturbed run of every shape and optimizer has to be."""
    steps: dict[tuple[str, str], int] = {}
    for job in jobs:
        key = (job.shape.name, job.optimizer.name)
        steps[key] = max(steps.get(key, 0), job.steps)
    return steps
