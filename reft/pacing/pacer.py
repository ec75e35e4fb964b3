"""Measures the idle windows in training steps, plans which copies run in them, and opens and closes
the gate that lets copies run."""

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


# Prefixes of the class names of instructions that move data between ranks
COMMUNICATING = ("Send", "Reduce")


_WAITING = ("Recv", "Send", "Reduce")


_TRANSFERS = ("Recv", "Send")


_RUNS_QUEUE = "CommitP2P"


def trains(names: Sequence[str]) -> bool:
    """Return whether a schedule contains an optimizer step; True if ``names`` is empty."""
    return not names or "OptimizerStep" in names


def queues_transfers(names: Sequence[str]) -> bool:
    """Return whether a schedule queues its transfers, and carries them out in a separate
    instruction."""
    return any(name.startswith(_RUNS_QUEUE) for name in names)


def waits(names: Sequence[str], queues: bool) -> tuple[bool, bool]:
    """Return whether the device may wait in the last of the given instructions, and whether it
    waits to receive data.

    Args:
        names: names of all instructions up to and including the one in question.
        queues: True if the schedule is known to queue its transfers.
    """
    name = names[-1]
    if name.startswith(_RUNS_QUEUE):
        queued = _queued(names, len(names) - 1)
        return bool(queued), any(transfer.startswith("Recv") for transfer in queued)
    if queues and name.startswith(_TRANSFERS):
        return False, False
    return name.startswith(_WAITING), name.startswith("Recv")


def window_kind(names: Sequence[str], position: int) -> WindowKind:
    """Return the reason why a stage waits at a position, derived from the instructions before and
    after the position."""
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
    """Return the names of the queued transfers that the instruction at ``position`` carries out:
    those queued since the last such instruction.
    """
    found: list[str] = []
    if names[position].startswith(_RUNS_QUEUE):
        for at in range(position - 1, -1, -1):
            if names[at].startswith(_RUNS_QUEUE):
                break
            if names[at].startswith(_TRANSFERS):
                found.append(names[at])
    return tuple(found)


SETTLED_STEPS = 2
"""Number of observed steps before the first plan. Initialisation makes the first steps slower."""


_MEMORY = 0.3


# Tolerance in seconds when times of a device, converted to the host's clock, are compared
_CLOCK_SECS = 0.0001


_SHARE_OF_A_STEP = 2.0


class Wait(NamedTuple):
    """A call in a training step in which the device may have waited."""

    # Index of the instruction; the number of instructions stands for the time after the last one
    position: int
    begin_secs: Any
    end_secs: Any
    # Seconds that training waited, after the instruction that opened the window returned, for a
    # chunk still in flight
    overrun_secs: float
    # Number of the window for which copies were admitted; None if no copies were admitted
    window: int | None


@dataclass(frozen=True, slots=True)
class StepObservation:
    """Measurements of one step on the training thread.

    Before :meth:`timed` is called, the times are stamps of the device's clock instead of
    seconds.
    """

    key: Hashable
    names: Sequence[str]
    whole: tuple[Any, Any]
    waits: Sequence[Wait]
    forwards: Sequence[tuple[Any, Any]] = ()
    backwards: Sequence[tuple[Any, Any]] = ()
    optimizer: tuple[Any, Any] | None = None
    """Begin and end of the optimizer step; None if unknown."""

    def timed(self, clock: CopyEngine) -> StepObservation:
        """Return a copy with stamps converted to seconds. Waits until the device has finished
        the step, since stamps cannot be read before."""
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
    """Averages the windows of one schedule over the steps. A wait at position ``len(names)`` is the
    drain (the wait after the last instruction). Pure."""

    names: Sequence[str]
    steps: int = 0
    step_secs: float = 0.0
    forward_secs: float = 0.0
    backward_secs: float = 0.0
    # Start and length of each wait in seconds, by its position in the schedule, then those of the
    # optimizer step; exponential averages over the steps
    _waits: dict[int, tuple[float, float]] = field(default_factory=dict)
    _optimizer: tuple[float, float] | None = None

    def see(self, step: StepObservation) -> None:
        """Add the measurements of one step."""
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
        """Return the windows in order of time, without overlaps. The last one may be the drain,
        after the last instruction.
        """
        found: list[Window] = []
        for position, wait in sorted(self._waits.items()):
            start = max(wait[0], found[-1].stop_secs if found else 0.0)
            stop = max(start, sum(wait))
            found.append(Window(window_kind(self.names, position), start, stop, position))
        return tuple(found)

    def optimizers(self) -> tuple[Interval, ...]:
        """Return the optimizer step, during which nothing is planned; empty if it is unknown."""
        seen = self._optimizer
        return () if seen is None else (Interval(seen[0], sum(seen)),)


def _smoothed(known: tuple[float, float] | None, *seen: float) -> tuple[float, float]:
    """Return the averages ``known``, updated with the values of one more step."""
    old = known or seen
    start, length = (
        before + _MEMORY * (now - before) for before, now in zip(old, seen, strict=True)
    )
    return start, length


def _between(taken: Iterable[tuple[float, float]], step_secs: float) -> Iterator[Interval]:
    """Yield the parts of a step that no (begin, end) interval covers."""
    at = 0.0
    for begin, end in sorted([*taken, (step_secs, step_secs)]):
        if begin > at:
            yield Interval(at, begin)
        at = max(at, end)


@dataclass
class BandwidthModel(Bandwidth):
    """Measured copy bandwidths, and the usable fraction of each window.

    Values are exponential averages, limited to a range; the first few values of a tier are averaged
    equally. The usable fraction of a window shrinks if its copies were still running when training
    continued (the window was overrun), and grows if the window had time left.
    """

    window: float = 2e9
    compute: float = 1e9
    communication: float = 1e9
    smoothing: float = 0.25
    _factors: dict[int, float] = field(default_factory=dict)
    _measured: Counter[int] = field(default_factory=Counter)  # Number of measurements, by tier

    LOWEST = 0.125
    HIGHEST = 1.25

    def factor(self, position: int) -> float:
        """Return the usable fraction of the window at a position, from LOWEST to HIGHEST."""
        return self._factors.get(position, 1.0)

    def observe_window(
        self, position: int, *, open_secs: float, overrun_secs: float, full: bool
    ) -> None:
        """Update the usable fraction of a window from one measurement.

        Args:
            position: index of the instruction.
            open_secs: length of the window.
            overrun_secs: time for which training waited for the copies after the window closed.
            full: True if all planned bytes were copied before the window closed.
        """
        old = self.factor(position)
        if overrun_secs > 0.1 * max(open_secs, SHORTEST_WINDOW_SECS):
            wanted = old * open_secs / (open_secs + overrun_secs)
        elif full:
            wanted = self.HIGHEST
        else:
            return
        self.observe_used(position, wanted)

    def observe_used(self, position: int, part: float) -> None:
        """Update the estimate of a window's usable fraction; in the measured step, copies could
        use the fraction ``part`` of its time."""
        old = self.factor(position)
        new = old + self.smoothing * (part - old)
        self._factors[position] = min(self.HIGHEST, max(self.LOWEST, new))

    def is_measured(self, tier: int) -> bool:
        """Return whether the bandwidth of a tier was ever measured."""
        return self._measured[tier] > 0

    def observe_copy(self, tier: int, nbytes: int, secs: float) -> None:
        """Update a tier's bandwidth from chunks of ``nbytes`` bytes in total, copied in
        ``secs``."""
        if nbytes <= 0 or secs <= 0 or tier not in _BANDWIDTHS:
            return
        self._measured[tier] += 1
        weight = max(self.smoothing, 1 / self._measured[tier])
        before = getattr(self, _BANDWIDTHS[tier])
        setattr(self, _BANDWIDTHS[tier], before + weight * (nbytes / secs - before))


# Name of the bandwidth of each tier
_BANDWIDTHS = {1: "window", 2: "compute", 3: "communication"}


class Pacer(VersionFeature):
    """Measures the windows of a running job, plans copies with HAS (hierarchical asynchronous
    snapshotting), and opens and closes the gate that lets copies run.

    There is one pacer for each engine. The training thread reports when instructions begin and
    end (:mod:`reft.engine.attach`). The copying thread passes the gate before every chunk, and
    makes a new plan after every version.

    Args:
        has: settings of HAS.
        engine: the copy engine, which supplies the device's clock.
        stage_id: pipeline stage of this rank.
        stages: number of pipeline stages.
        micro_batches: micro-batches of a step.
        ranks_here: number of ranks that compute on this node.
        staging: device memory for bytes that fit no tier; None disables staging.
        gate: gate between training and the copying thread; None for the one that suits the
            engine.

    Attributes:
        chooses_mode: whether the ranks' votes set ``stages``
            (:class:`reft.policy.agreed.AgreedRates`).
        stages: whether the next plans stage bytes that fit no tier.
        copy_overheads: seconds by which a version of the last plan delays training if these
            bytes go to the host directly, and if they are staged; None until they are known, and
            if the mode is fixed.
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
            # If copies do not slow down training (they use direct memory access, or a core that no
            # rank of the node uses), let them run during all of the computing time. Otherwise let
            # none run then: a chunk during computation was measured to cost more than waiting for
            # the chunk at the fence.
            spare = len(os.sched_getaffinity(0)) > ranks_here * torch.get_num_threads()
            share = 1.0 if engine.asynchronous or spare else 0.0
        self.chooses_mode = has.overflow == "auto" and staging is not None
        overflow = Overflow.STALL if has.overflow == "auto" else Overflow(has.overflow)
        self.stages = overflow is Overflow.STAGING
        self.copy_overheads: tuple[float, float] | None = None
        self._limits = HasLimits(share, has.separate_links, overflow, has.max_overhead)
        # Until windows are measured, copy during computation at the lowest pace.
        nowhere_else = stages == 1 and share > 0
        pace = math.inf if share >= 1.0 else share * BandwidthModel.compute
        self.gate.share(share, UNLIMITED if nowhere_else else 0, pace)
        self._plan_key: Hashable = None
        self._budgets: Mapping[int, tuple[int | None, int]] = {}
        """Window number (None for communication) and planned bytes, by position of the
        instruction."""
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
        # Chunks of the newest version, since the step in which they were copied may not be
        # evaluated yet
        self._queued: Sequence[ChunkRecord] = ()
        self._falls_back = False
        self._told_of_formulas = False

    # -- training thread ---------------------------------------------------------------------------

    def begin_step(self, key: Hashable) -> None:
        """Record that the engine begins to execute the schedule with the given key."""
        self._planned_step = self.plan is not None and key == self._plan_key
        self._ordinal = 0
        self._began = self.stamp()

    def open(self, position: int, receives: bool) -> None:
        """Record that an instruction begins in which the device may wait, and open the gate if
        copies are planned for it.

        Args:
            position: index of the instruction in the step's stream.
            receives: True for a receive. Before anything was measured, each receive is a window.
        """
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
        """Record that the instruction has returned, and close the gate."""
        if self._opened is None:
            return
        position, began, opened = self._opened
        self._opened = None
        overrun = self.gate.close() if opened is not None else 0.0
        # Do not record a window if the gate was opened for communication.
        window = None if opened is None else opened[0]
        self._waits.append(Wait(position, began, self.stamp(), overrun, window))

    def begin_optimizer(self) -> None:
        """Record that the optimizer step begins, before which all copies have to end."""
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
        """Record that the step has ended, and pass its measurements to the copying thread.

        Args:
            key: key of the schedule. If :meth:`begin_step` was not called, the step began when the
                last one ended.
            names: class names of the step's instructions.
            forwards: stamps of the device's clock before and after each forward pass.
            backwards: stamps before and after each backward pass.
        """
        ended = self.stamp()
        began = self._began if self._began is not None else self._ended
        # Evaluate only steps with an optimizer step: an evaluation has different windows and no
        # deadline.
        if began is not None and trains(names):
            seen = (self._waits, forwards, backwards, self._optimizer)
            self._observed.append(StepObservation(key, names, (began, ended), *seen))
        self._waits, self._optimizer = [], None
        self._began, self._ended = None, ended

    # -- copying thread ----------------------------------------------------------------------------

    @property
    def advised_interval_steps(self) -> int:
        """Number of steps between versions with which each version fits into the windows, according
        to the plan."""
        plan = self.plan
        if plan is None or plan.overflow is Overflow.STALL:
            return 1
        return plan.advised_interval_steps

    def committed(self, version: CopiedVersion) -> None:
        """If the committed version was paced (copied in windows), plan the next versions from its
        measurements."""
        if not version.is_paced:
            return
        self.version_done(version.writer.layout.mine.device_bytes, version.records)
        if self._staging is None or self.plan is None:
            return
        self._staging.reserve(self.plan.staged_bytes)
        # Until training has waited for a copy, it is unknown how long it would wait for others.
        if self.chooses_mode and self.model.is_measured(1):
            left = self.plan.left_over_bytes
            staged_secs = self._staging.copy_secs(left) if left else 0.0
            self.copy_overheads = self.plan.left_over_secs, staged_secs

    def version_done(self, sections: Mapping[str, int], chunks: Sequence[ChunkRecord]) -> None:
        """Update bandwidths and windows from a copied version, and plan the next versions.

        Args:
            sections: bytes that were copied for the version, by section.
            chunks: the version's chunks.
        """
        self._learn(chunks)
        # A version may be committed before the step in which it was copied has ended. Keep the
        # version's chunks, because that step is evaluated with the next version.
        queued, self._queued = [*self._queued, *chunks], chunks
        last: StepObservation | None = None
        # Process only the steps queued before this loop: newer ones may still be running on the
        # device, and ``timed`` would block on them.
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
        # A window admits its own bytes and an equal part of the bytes of tier 2, because engines
        # that queue copies admit bytes only in windows.
        part = -(-plan.tier_bytes[2] // max(1, len(plan.windows)))
        self._budgets = beside | {
            p.position: (i, p.nbytes + part)
            for i, p in enumerate(plan.windows)
            if p.position is not None
        }
        self.plan, self._plan_key = plan, last.key
        self._share(plan)

    def _share(self, plan: HasSchedule) -> None:
        """Tell the gate how to copy during computation (tier 2)."""
        # If copies do not slow down training, spreading them over time would only delay them.
        free = self._limits.compute_share >= 1.0
        nbytes = 0 if plan.windows else plan.tier_bytes[2]
        secs = sum(interval.length_secs for interval in plan.computing)
        pace = math.inf if free or not (nbytes and secs) else nbytes / secs
        self.gate.share(1.0 if free else plan.compute_share(self.model.compute), nbytes, pace)

    def _learn(self, chunks: Sequence[ChunkRecord]) -> None:
        in_windows = any(c.tier == 1 for c in chunks)
        # For queued copies, the part within a window is known only when the times of the step are
        # known.
        for tier in (2, 3) if in_windows and self._engine.asynchronous else (1, 2, 3):
            # If no copies ran in windows, take the rate of windows from copies that training
            # waited for (tier 0).
            mine = [
                c
                for c in chunks
                if c.tier == tier or (tier == 1 and c.tier == 0 and not in_windows)
            ]
            secs = sum(c.end_secs - c.begin_secs for c in mine)
            self.model.observe_copy(tier, sum(c.nbytes for c in mine), secs)

    def _judge(self, step: StepObservation, chunks: Sequence[ChunkRecord]) -> None:
        """Update the usable fraction of each window from a step, by whether copies overran the
        window or had time left."""
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
        """Do :meth:`_judge` for copies that are queued on a device and may continue after the end
        of their window.

        The times of the chunks show which part was copied within the window, and the rates within
        the window and after it.
        """
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
        """Return the intervals in which only the network is busy. Sends that already count as
        windows are left out.
        """
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
        """Return the limits of the next plan, with the device memory that is available now."""
        if not self.stages:
            return self._limits
        room = 0 if self._staging is None else self._staging.room()
        falls_back, before = room <= 0, self._falls_back
        self._falls_back = falls_back
        if not falls_back:
            return replace(self._limits, overflow=Overflow.STAGING, staging_bytes=room)
        fallback = "stall" if self.chooses_mode else self._has.staging_fallback
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
        # In the formulas, the drain (the wait for the other stages) begins before the reductions;
        # in the engine it comes after them.
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
        """Return whether the formulas of 1F1B apply to a schedule: its instructions must be at the
        same positions as in the 1F1B schedule."""
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
