"""Measures the windows of a running job, plans copies for them, and opens and closes the gate."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from reft.config import HasConfig
from reft.pacing.gate import HostGate, StreamGate
from reft.pacing.schedule import (
    SHORTEST_WINDOW_SECS,
    AnalyticEstimator,
    Bandwidth,
    HasLimits,
    HasSchedule,
    Interval,
    Overflow,
    Window,
    WindowKind,
    one_f_one_b_names,
    paper_windows,
    plan_schedule,
)
from reft.pacing.staging import StagingArea
from reft.snapshot.copy_engine import CopyEngine
from reft.snapshot.extension import CopiedVersion, VersionFeature
from reft.snapshot.gate import UNLIMITED, ChunkRecord, Gate

logger = logging.getLogger(__name__)


# Beginnings of the names of instructions that move data between ranks
COMMUNICATING = ("Send", "Reduce")


_WAITING = ("Recv", "Send", "Reduce")


_TRANSFERS = ("Recv", "Send")


_RUNS_QUEUE = "CommitP2P"


def trains(names: Sequence[str]) -> bool:
    """Whether a schedule makes an optimizer step; a step without any instructions does."""
    return not names or "OptimizerStep" in names


def queues_transfers(names: Sequence[str]) -> bool:
    """Whether transfers are queued, and carried out by an instruction of their own."""
    return any(name.startswith(_RUNS_QUEUE) for name in names)


def waits(names: Sequence[str], queues: bool) -> tuple[bool, bool]:
    """Whether a device may wait in the last of ``names``, all instructions up to that one, and
    whether that is for something it receives. ``queues``: this schedule is known to queue its
    transfers."""
    name = names[-1]
    if name.startswith(_RUNS_QUEUE):
        queued = _queued(names, len(names) - 1)
        return bool(queued), any(transfer.startswith("Recv") for transfer in queued)
    if queues and name.startswith(_TRANSFERS):
        return False, False
    return name.startswith(_WAITING), name.startswith("Recv")


def window_kind(names: Sequence[str], position: int) -> WindowKind:
    """Why a stage waits at a position, from what it does before and after."""
    if position >= len(names):
        return WindowKind.DRAIN
    before, after = names[:position], names[position:]
    if "ForwardPass" not in before:
        return WindowKind.FILL
    if "BackwardPass" not in before:
        waited_for = _queued(names, position) or (names[position],)
        return WindowKind.MID if "RecvGrad" in waited_for else WindowKind.OTHER
    if "BackwardPass" not in after:
        return WindowKind.DRAIN
    last_forward = len(before) - list(reversed(before)).index("ForwardPass")
    behind_last_forward = "ForwardPass" not in after and "BackwardPass" in before[last_forward:]
    return WindowKind.COOL_DOWN if behind_last_forward else WindowKind.OTHER


def _queued(names: Sequence[str], position: int) -> tuple[str, ...]:
    """What the instruction at ``position`` carries out: the transfers since the last one of its
    kind."""
    found: list[str] = []
    if names[position].startswith(_RUNS_QUEUE):
        for at in range(position - 1, -1, -1):
            if names[at].startswith(_RUNS_QUEUE):
                break
            if names[at].startswith(_TRANSFERS):
                found.append(names[at])
    return tuple(found)


SETTLED_STEPS = 2
"""Steps that are seen before the first plan: what is made at first use takes long and never
again."""


_MEMORY = 0.3


_CLOCK_SECS = 0.0001  # by which two of a device's times, told by the host's clock, may be apart


_SHARE_OF_A_STEP = 2.0


class Wait(NamedTuple):
    """One call in which the device may have waited, in one step."""

    position: int  # of the instruction in the step's stream; ``len(stream)`` is what follows it
    begin_secs: Any
    end_secs: Any
    overrun_secs: float  # how long training then waited for a chunk
    window: int | None  # with which number copies were let in; None: they were not


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What the training thread saw in one step. Until :meth:`timed` stamps of the device's clock
    stand for seconds."""

    key: Hashable
    names: Sequence[str]
    whole: tuple[Any, Any]
    waits: Sequence[Wait]
    forwards: Sequence[tuple[Any, Any]] = ()
    backwards: Sequence[tuple[Any, Any]] = ()
    optimizer: tuple[Any, Any] | None = None
    """Begin and end of the optimizer step; None: it is not told from the rest."""

    def timed(self, clock: CopyEngine) -> StepObservation:
        """The same in seconds; waits for the device to finish the step."""
        whole = [self.whole] if self.optimizer is None else [self.whole, self.optimizer]
        waits = [(wait.begin_secs, wait.end_secs) for wait in self.waits]
        parts = (whole, waits, self.forwards, self.backwards)
        secs = iter(clock.secs_of([stamp for part in parts for pair in part for stamp in pair]))
        (step, *optimizer), waits, forwards, backwards = (
            [(next(secs), next(secs)) for _ in part] for part in parts
        )
        timed = [
            w._replace(begin_secs=b, end_secs=e)
            for w, (b, e) in zip(self.waits, waits, strict=True)
        ]
        return StepObservation(self.key, self.names, step, timed, forwards, backwards, *optimizer)


def _median_secs(pairs: Sequence[tuple[float, float]]) -> float:
    secs = sorted(end - begin for begin, end in pairs)
    return secs[len(secs) // 2] if secs else 0.0


@dataclass
class WindowMeter:
    """Windows of one schedule, measured step by step. A wait at ``len(names)`` is the drain.
    Pure."""

    names: Sequence[str]
    steps: int = 0
    step_secs: float = 0.0
    forward_secs: float = 0.0
    backward_secs: float = 0.0
    # begin and length, exponentially smoothed over the steps: by position, and of the optimizer
    # step
    _waits: dict[int, tuple[float, float]] = field(default_factory=dict)
    _optimizer: tuple[float, float] | None = None

    def see(self, step: StepObservation) -> None:
        """Take one step in."""
        self.steps += 1
        begin, secs = step.whole[0], step.whole[1] - step.whole[0]
        weight = 1.0 if self.steps <= SETTLED_STEPS else _MEMORY
        self.step_secs += weight * (secs - self.step_secs)
        self.forward_secs += weight * (_median_secs(step.forwards) - self.forward_secs)
        self.backward_secs += weight * (_median_secs(step.backwards) - self.backward_secs)
        if self.steps <= SETTLED_STEPS:
            self._waits.clear()
            self._optimizer = None
        if step.optimizer is not None:
            start, length = step.optimizer[0] - begin, step.optimizer[1] - step.optimizer[0]
            self._optimizer = _smoothed(self._optimizer, start, length)
        for wait in step.waits:
            start, length = (
                wait.begin_secs - begin,
                wait.end_secs - wait.begin_secs - wait.overrun_secs,
            )
            self._waits[wait.position] = _smoothed(self._waits.get(wait.position), start, length)

    def windows(self) -> tuple[Window, ...]:
        """In order of time and not overlapping; the drain is moved behind the last instruction."""
        found: list[Window] = []
        for position, wait in sorted(self._waits.items()):
            start = max(wait[0], found[-1].stop_secs if found else 0.0)
            stop = max(start, sum(wait))
            found.append(Window(window_kind(self.names, position), start, stop, position))
        return tuple(found)

    def optimizers(self) -> tuple[Interval, ...]:
        """The optimizer step, beside which nothing is planned; none if it is not told from the
        rest."""
        seen = self._optimizer
        return () if seen is None else (Interval(seen[0], sum(seen)),)


def _smoothed(known: tuple[float, float] | None, *seen: float) -> tuple[float, float]:
    """``known`` with one more step taken in."""
    old = known or seen
    start, length = (
        before + _MEMORY * (now - before) for before, now in zip(old, seen, strict=True)
    )
    return start, length


def _between(taken: Iterable[tuple[float, float]], step_secs: float) -> Iterator[Interval]:
    """The stretches of a step that no (begin, end) covers."""
    at = 0.0
    for begin, end in sorted([*taken, (step_secs, step_secs)]):
        if begin > at:
            yield Interval(at, begin)
        at = max(at, end)


@dataclass
class BandwidthModel(Bandwidth):
    """What running steps teach, also of how much of each window can be used.

    Exponential smoothing with bounds, of a tier's first bandwidths their mean. A window that was
    overrun (its copies still ran when training wanted to go on) shrinks; one that had room left
    grows back."""

    window: float = 2e9
    compute: float = 1e9
    communication: float = 1e9
    smoothing: float = 0.25
    _factors: dict[int, float] = field(default_factory=dict)
    _measured: Counter[int] = field(default_factory=Counter)  # how often, by tier

    LOWEST = 0.125
    HIGHEST = 1.25

    def factor(self, position: int) -> float:
        """From LOWEST to HIGHEST."""
        return self._factors.get(position, 1.0)

    def observe_window(
        self, position: int, *, open_secs: float, overrun_secs: float, full: bool
    ) -> None:
        """One window of ``open_secs`` went by; training then waited ``overrun_secs`` for the
        copies. ``full``: all that was planned for it was copied with time to spare."""
        old = self.factor(position)
        if overrun_secs > 0.1 * max(open_secs, SHORTEST_WINDOW_SECS):
            wanted = old * open_secs / (open_secs + overrun_secs)
        elif full:
            wanted = self.HIGHEST
        else:
            return
        self.observe_used(position, wanted)

    def observe_used(self, position: int, part: float) -> None:
        """Copies could use so much of one window's time."""
        old = self.factor(position)
        new = old + self.smoothing * (part - old)
        self._factors[position] = min(self.HIGHEST, max(self.LOWEST, new))

    def observe_copy(self, tier: int, nbytes: int, secs: float) -> None:
        """Chunks that were copied in a tier, together."""
        if nbytes <= 0 or secs <= 0 or tier not in _BANDWIDTHS:
            return
        self._measured[tier] += 1
        weight = max(self.smoothing, 1 / self._measured[tier])
        before = getattr(self, _BANDWIDTHS[tier])
        setattr(self, _BANDWIDTHS[tier], before + weight * (nbytes / secs - before))


_BANDWIDTHS = {1: "window", 2: "compute", 3: "communication"}  # by tier


class Pacer(VersionFeature):
    """Measures the windows of a running job, plans with HAS, opens and closes the gate: one per
    engine. The training thread tells it what begins and ends (:mod:`reft.engine.attach`); the
    copying thread asks its gate before every chunk and has the plan renewed after every version.

    Args:
        has: settings.
        engine: tells when the device was where.
        stage_id, stages, micro_batches: of the pipeline.
        ranks_here: ranks that compute on this node.
        staging: device memory for what does not fit; None: nothing is staged.
        gate: between training and the copying thread; None: the engine's.
    """

    def __init__(
        self,
        has: HasConfig,
        engine: CopyEngine,
        *,
        stage_id: int,
        stages: int,
        micro_batches: int,
        ranks_here: int = 1,
        staging: StagingArea | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate or (StreamGate() if engine.asynchronous else HostGate())
        self.plan: HasSchedule | None = None
        self.model = BandwidthModel()
        self.stamp = engine.stamp
        self._has, self._engine, self._staging = has, engine, staging
        self._pipeline = stages, micro_batches, stage_id
        share = has.compute_share
        if share is None:
            # All of the computing time where copies take nothing from training, by direct memory
            # access from a device or on a core that no rank of the node uses. Else none: there, a
            # chunk beside computation was measured to cost training more than waiting for it does.
            spare = len(os.sched_getaffinity(0)) > ranks_here * torch.get_num_threads()
            share = 1.0 if engine.asynchronous or spare else 0.0
        self._limits = HasLimits(
            share, has.separate_links, Overflow(has.overflow), has.max_overhead
        )
        # Until something was measured: beside computation, as slowly as ever allowed.
        nowhere_else = stages == 1 and share > 0
        pace = math.inf if share >= 1.0 else share * BandwidthModel.compute
        self.gate.share(share, UNLIMITED if nowhere_else else 0, pace)
        self._plan_key: Hashable = None
        self._budgets: Mapping[int, tuple[int | None, int]] = {}
        """By position: the window, None beside communication, and the bytes planned."""
        self._meters: dict[Hashable, WindowMeter] = {}
        self._began: Any = None
        self._ended: Any = None
        self._optimizer_began: Any = None
        self._optimizer: tuple[Any, Any] | None = None
        self._observed: deque[StepObservation] = deque(maxlen=16)
        self._waits: list[Wait] = []
        self._opened: tuple[int, Any, tuple[int | None, int] | None] | None = None
        self._ordinal = 0
        self._planned_step = False
        self._queued: Sequence[ChunkRecord] = ()  # the chunks of the newest version
        self._falls_back = False
        self._told_of_formulas = False

    # -- training thread ---------------------------------------------------------------------------

    def begin_step(self, key: Hashable) -> None:
        """The engine begins to execute a schedule; ``key`` tells schedules apart."""
        self._planned_step = self.plan is not None and key == self._plan_key
        self._ordinal = 0
        self._began = self.stamp()

    def open(self, position: int, receives: bool) -> None:
        """The instruction at ``position`` of the step's stream may make the device wait. Before
        anything was measured, each receive is a window."""
        budget: tuple[int | None, int] | None = None
        mark: Any = None
        if self._planned_step:
            budget = self._budgets.get(position)
        elif receives:
            budget = self._ordinal, 2**62
            self._ordinal += 1
        if budget is not None:
            window, nbytes = budget
            if self._engine.asynchronous and self.gate.wanted:
                mark = self.stamp()
            self.gate.open(window, nbytes, mark)
        self._opened = (position, self.stamp() if mark is None else mark, budget)

    def close(self) -> None:
        """The instruction has returned."""
        if self._opened is None:
            return
        position, began, opened = self._opened
        self._opened = None
        overrun = self.gate.close() if opened is not None else 0.0
        # What runs beside communication says nothing about windows.
        window = None if opened is None else opened[0]
        self._waits.append(Wait(position, began, self.stamp(), overrun, window))

    def begin_optimizer(self) -> None:
        """The optimizer step begins, in which copies end."""
        self._optimizer_began = self.stamp()

    def end_optimizer(self) -> None:
        if self._optimizer_began is not None:
            self._optimizer = (self._optimizer_began, self.stamp())
            self._optimizer_began = None

    def end_step(
        self,
        key: Hashable,
        names: Sequence[str],
        forwards: Sequence[tuple[Any, Any]] = (),
        backwards: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        """The step is over: hand over what was seen. ``key``: as in :meth:`begin_step`; without
        that call the step began where the last one ended. ``names``: class names of its
        instructions. ``forwards, backwards``: :attr:`stamp` before and after each."""
        ended = self.stamp()
        began = self._began if self._began is not None else self._ended
        # Versions follow optimizer steps: an evaluation has other windows, and no version's
        # deadline.
        if began is not None and trains(names):
            seen = (self._waits, forwards, backwards, self._optimizer)
            self._observed.append(StepObservation(key, names, (began, ended), *seen))
        self._waits, self._optimizer = [], None
        self._began, self._ended = None, ended

    # -- copying thread ----------------------------------------------------------------------------

    @property
    def advised_interval_steps(self) -> int:
        """Steps between versions at which each fits into the windows."""
        plan = self.plan
        if plan is None or plan.overflow is Overflow.STALL:
            return 1
        return plan.advised_interval_steps

    def committed(self, version: CopiedVersion) -> None:
        """Have the next versions planned by what this one took; without a new plan the old one
        stays."""
        if not version.is_paced:
            return
        self.version_done(version.writer.layout.mine.device_bytes, version.records)
        if self._staging is not None and self.plan is not None:
            self._staging.reserve(self.plan.staged_bytes)

    def version_done(self, sections: Mapping[str, int], chunks: Sequence[ChunkRecord]) -> None:
        """A version of so many bytes by section was copied by these chunks: learn from it, plan the
        next ones."""
        self._learn(chunks)
        # A version may be committed before its step is over: that one is judged with the next.
        queued, self._queued = [*self._queued, *chunks], chunks
        last: StepObservation | None = None
        # not those that come meanwhile: the device is always behind
        for _ in range(len(self._observed)):
            last = self._observed.popleft().timed(self._engine)
            meter = self._meters.get(last.key)
            if meter is None or len(meter.names) != len(last.names):
                meter = self._meters[last.key] = WindowMeter(last.names)
            meter.see(last)
            if self._engine.asynchronous:
                self._judge_queued(last, queued)
            else:
                self._judge(last, chunks)
        if last is None:
            return
        meter = self._meters[last.key]
        self.gate.patience_secs = max(0.05, _SHARE_OF_A_STEP * meter.step_secs)
        if meter.steps <= SETTLED_STEPS:
            return
        plan = self._plan(meter, sections)
        beside: dict[int, tuple[int | None, int]] = {
            position: (None, nbytes) for position, nbytes in plan.beside_communication().items()
        }
        # With a window starts its own, and, for engines that queue, its part of tier 2.
        part = -(-plan.tier_bytes[2] // max(1, len(plan.windows)))
        self._budgets = beside | {
            p.position: (i, p.nbytes + part)
            for i, p in enumerate(plan.windows)
            if p.position is not None
        }
        self.plan, self._plan_key = plan, last.key
        self._share(plan)

    def _share(self, plan: HasSchedule) -> None:
        """Let the gate know what runs beside computation."""
        # Where copies cost training nothing, spreading them would only bring them closer to the
        # fence.
        free = self._limits.compute_share >= 1.0
        nbytes = 0 if plan.windows else plan.tier_bytes[2]
        secs = sum(interval.length_secs for interval in plan.computing)
        pace = math.inf if free or not (nbytes and secs) else nbytes / secs
        self.gate.share(1.0 if free else plan.compute_share(self.model.compute), nbytes, pace)

    def _learn(self, chunks: Sequence[ChunkRecord]) -> None:
        in_windows = any(c.tier == 1 for c in chunks)
        # Where copies are queued, how much of them was in a window is known when their step is.
        for tier in (2, 3) if in_windows and self._engine.asynchronous else (1, 2, 3):
            # Without windows, what training waits for is copied as it would be in one.
            mine = [
                c
                for c in chunks
                if c.tier == tier or (tier == 1 and c.tier == 0 and not in_windows)
            ]
            secs = sum(c.end_secs - c.begin_secs for c in mine)
            self.model.observe_copy(tier, sum(c.nbytes for c in mine), secs)

    def _judge(self, step: StepObservation, chunks: Sequence[ChunkRecord]) -> None:
        """Which windows were overrun, which had room."""
        if self.plan is None or step.key != self._plan_key or not chunks:
            return
        ended = chunks[-1].end_secs
        for wait in step.waits:
            if wait.window is not None:
                self.model.observe_window(
                    wait.position,
                    open_secs=wait.end_secs - wait.begin_secs - wait.overrun_secs,
                    overrun_secs=wait.overrun_secs,
                    full=wait.overrun_secs == 0.0 or ended < wait.begin_secs,
                )

    def _judge_queued(self, step: StepObservation, chunks: Sequence[ChunkRecord]) -> None:
        """The same where copies are queued on a device, and run on after the window that they began
        in. Their own times tell how much of them was within it, and how fast they are on either
        side of its end."""
        behind_bytes = behind_secs = 0.0
        last_secs = step.whole[1] - _CLOCK_SECS
        for wait in (w for w in step.waits if w.window is not None):
            begin, end = wait.begin_secs - _CLOCK_SECS, wait.end_secs
            mine = [
                c for c in chunks if c.window == wait.window and begin <= c.begin_secs < last_secs
            ]
            if not mine:
                continue
            nbytes = secs = 0.0
            for chunk in mine:
                length = chunk.end_secs - chunk.begin_secs
                within = min(length, max(0.0, end - chunk.begin_secs))
                part = within / length if length > 0 else 1.0
                nbytes += part * chunk.nbytes
                secs += within
                behind_bytes += (1.0 - part) * chunk.nbytes
                behind_secs += length - within
            self.model.observe_copy(1, int(nbytes), secs)
            used_secs = secs + max(0.0, end - mine[-1].end_secs)
            self.model.observe_used(
                wait.position, used_secs / max(used_secs, end - wait.begin_secs)
            )
        self.model.observe_copy(2, int(behind_bytes), behind_secs)

    def _plan(self, meter: WindowMeter, sections: Mapping[str, int]) -> HasSchedule:
        windows = self._windows(meter)
        communicating = self._communicating(meter, {w.position for w in windows})
        taken = [(w.start_secs, w.stop_secs) for w in windows]
        taken += [(i.start_secs, i.stop_secs) for i in (*communicating, *meter.optimizers())]
        return plan_schedule(
            sections,
            windows,
            self.model,
            step_secs=meter.step_secs,
            computing=list(_between(taken, meter.step_secs)),
            communicating=communicating,
            limits=self._limits_now(),
            estimator=self._has.windows,
        )

    def _communicating(self, meter: WindowMeter, windows: Collection[int]) -> list[Interval]:
        """Where only the network works; a send that the stage waits in is a window already."""
        if not self._limits.separate_links:
            return []
        return [
            Interval(w.start_secs, w.stop_secs, w.position)
            for w in meter.windows()
            if w.position < len(meter.names)
            and meter.names[w.position].startswith(COMMUNICATING)
            and w.position not in windows
        ]

    def _limits_now(self) -> HasLimits:
        """What the plan may do with the memory that there is now."""
        if self._limits.overflow is not Overflow.STAGING:
            return self._limits
        room = 0 if self._staging is None else self._staging.room()
        falls_back, before = room <= 0, self._falls_back
        self._falls_back = falls_back
        if not falls_back:
            return replace(self._limits, staging_bytes=room)
        fallback = self._has.staging_fallback
        if not before:
            logger.warning(
                "there is no device memory to stage snapshots: has.overflow is %r until there is",
                fallback,
            )
        return replace(self._limits, overflow=Overflow(fallback))

    def _windows(self, meter: WindowMeter) -> tuple[Window, ...]:
        estimator, (stages, micro_batches, stage_id) = self._has.windows, self._pipeline
        measured = tuple(
            w
            for w in meter.windows()
            if w.position >= len(meter.names) or not meter.names[w.position].startswith("Reduce")
        )
        known = meter.forward_secs > 0 and meter.backward_secs > 0
        if estimator == "profiled" or not known or not self._is_of_formulas(meter):
            return tuple(w for w in measured if w.length_secs > 0)
        pipeline = AnalyticEstimator(stages, micro_batches, meter.forward_secs, meter.backward_secs)
        paper = estimator == "paper"
        formula = paper_windows(pipeline, stage_id) if paper else pipeline.windows(stage_id)
        # The formulas end a step with the reductions; the engine waits for the other stages after
        # them.
        ends = len(meter.names)
        return tuple(
            Window(
                w.kind,
                w.start_secs,
                w.stop_secs,
                ends if w.kind is WindowKind.DRAIN else w.position,
            )
            for w in formula
        )

    def _is_of_formulas(self, meter: WindowMeter) -> bool:
        """Whether the schedule is theirs: in another one nothing waits at the positions that they
        give."""
        if tuple(meter.names) == one_f_one_b_names(*self._pipeline):
            return True
        if not self._told_of_formulas:
            self._told_of_formulas = True
            logger.warning(
                "has.windows is %r, a formula for 1F1B, but the engine executes another schedule: "
                "reft measures its windows instead; write 'profiled'",
                self._has.windows,
            )
        return False
