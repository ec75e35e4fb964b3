"""Weaves snapshot instructions into the schedule that a pipeline engine executes.

The engine's ``_exec_schedule`` is wrapped on the instance. The original method gets a schedule
with the same training instructions in the same order, and with snapshot instructions around
those in which the device may wait. Snapshot instructions are subclasses of DeepSpeed's
``PipeInstruction``, which the engine looks up in its own copy of ``_INSTRUCTION_MAP``. Any
schedule class works: 1F1B, inference, data parallel, zero-bubble, a user's own. Only the names
of its instructions must be known.

Bubble time is spent *inside* receives, so a window opens before a receive and closes after it.
If a schedule queues its transfers (DualPipeV), the window is around the instruction that carries
the transfers out. The wait for the other stages at the end of a step, inside
``_aggregate_total_loss``, is not a window: a version is taken only when the next step begins,
because the script may change the state until then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from deepspeed.runtime.pipe.schedule import PipeInstruction

from reft.config import Variant
from reft.pacing.pacer import queues_transfers, waits
from reft.pacing.schedule import InstructionRecord
from reft.pacing.setup import CopySetup
from reft.pacing.tracer import Tracer
from reft.wrapping import wrap


class OpenSnapshotWindow(PipeInstruction):  # type: ignore[misc]
    """Instruction that marks where the device is about to wait, so that snapshot copies may run.

    Args:
        window_id: position of the waiting instruction in the step.
        receives: whether the waiting instruction is a receive.
    """


class CloseSnapshotWindow(PipeInstruction):  # type: ignore[misc]
    """Instruction that marks where the device continues, so that snapshot copies stop.

    Args:
        window_id: position of the waiting instruction in the step.
    """


def _steps(names: list[str]) -> bool:
    """Return whether a schedule of these instructions ends with the optimizer step."""
    return names[-1:] == ["OptimizerStep"]


class WovenSchedule:
    """A schedule with snapshot instructions woven in. All other attributes are those of the
    original schedule.

    Args:
        schedule: the schedule of training instructions.
        seen: list to which the names of the executed instructions are appended, in order.
        queues: whether the schedule is known to queue its transfers, as DualPipeV does. If
            False, queueing is detected at the first instruction that carries out queued
            transfers.
    """

    def __init__(self, schedule: Any, *, seen: list[str], queues: bool = False) -> None:
        self._schedule = schedule
        self._seen = seen
        self._queues = queues

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __iter__(self) -> Iterator[list[Any]]:
        for commands in self._schedule:
            yield list(self._weave(commands))

    def _weave(self, commands: Any) -> Iterator[Any]:
        for command in commands:
            name = type(command).__name__
            position = len(self._seen)
            self._seen.append(name)
            self._queues = self._queues or queues_transfers((name,))
            may_wait, receives = waits(self._seen, self._queues)
            if may_wait:
                yield OpenSnapshotWindow(window_id=position, receives=receives)
                yield command
                yield CloseSnapshotWindow(window_id=position)
            else:
                yield command


class InstructionReport(Protocol):
    """Receives the name of the instruction that the training thread executes. Implemented by the
    progress page, a shared-memory page of this trainer."""

    def number_of(self, name: str) -> int: ...

    def instruction(self, number: int) -> None: ...


class WovenSession(Protocol):
    """The part of a session that a :class:`Weaver` uses."""

    @property
    def started(self) -> bool: ...

    def check_tensors(self) -> None: ...


class Weaver:
    """Weaves snapshot instructions into the schedules of a pipeline engine. Created once, by
    ``attach``.

    Before every schedule it decides whether to weave, and whether to time every instruction.
    """

    def __init__(
        self,
        engine: Any,
        copying: CopySetup,
        tracer: Tracer,
        progress: InstructionReport,
        session: WovenSession,
    ) -> None:
        self._copying, self._pacer = copying, copying.pacer
        self._tracer, self._progress, self._session = tracer, progress, session
        tracer.woven = True
        self._computing: dict[str, list[tuple[Any, Any]]] = {"ForwardPass": [], "BackwardPass": []}
        self._streams: dict[Hashable, list[str]] = {}
        """Names of the executed instructions, by key of the schedule."""
        self._counts: Counter[str] = Counter()
        self._position = 0
        self._drains: Hashable = None
        """Key of a schedule that has ended with the optimizer step and whose loss is not
        aggregated yet; otherwise None."""
        self._source: Mapping[type, Callable[..., Any]] = {}
        self._maps: dict[bool, Mapping[type, Callable[..., Any]]] = {}
        for name, around in (
            ("_exec_schedule", self._exec_schedule),
            ("_aggregate_total_loss", self._aggregate),
        ):
            if hasattr(engine, name):
                wrap(engine, name, partial(around, engine))

    # -- execution ---------------------------------------------------------------------------------

    def _exec_schedule(self, engine: Any, original: Callable[..., Any], schedule: Any) -> Any:
        self._tracer.began = time.perf_counter()
        traced = self._tracer.active
        for stamps in self._computing.values():
            stamps.clear()
        # P1: set on the instance, so that the class and every other engine execute as before.
        engine._INSTRUCTION_MAP = self._instruction_map(engine, traced)
        copying = self._copying
        paced = copying.variant is Variant.HAS or copying.pacer.gate.wanted
        if not (traced or (paced and self._session.started)):
            return original(schedule)
        key = _window_key(schedule)
        known, names = self._streams.get(key, []), list[str]()
        woven = WovenSchedule(schedule, seen=names, queues=queues_transfers(known))
        self._position = 0
        self._counts.clear()
        self._pacer.begin_step(key)
        try:
            result = original(woven)
        finally:
            self._pacer.close()  # No window may stay open, even after an error
        self._streams[key] = names
        if _steps(names):
            self._drains = key
        else:
            self._end_step(key)
        return result

    def _aggregate(
        self, engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call the aggregation of a step's loss, where stages wait for each other, and end the
        step for the pacer."""
        self._progress.instruction(self._progress.number_of("AggregateTotalLoss"))
        if (key := self._drains) is None:
            return original(*args, **kwargs)
        self._drains, position = None, len(self._streams[key])
        mark = self._mark() if self._tracer.active else None
        began = time.perf_counter()
        result = original(*args, **kwargs)
        ended = time.perf_counter()
        if self._tracer.active:
            self._tracer.records.append(
                InstructionRecord(position, "AggregateTotalLoss", None, began, ended)
            )
            self._mark_end(mark)
        self._end_step(key)
        return result

    def _end_step(self, key: Hashable) -> None:
        forwards, backwards = (
            tuple(self._computing[name]) for name in ("ForwardPass", "BackwardPass")
        )
        self._pacer.end_step(key, self._streams[key], forwards, backwards)

    # -- timing ------------------------------------------------------------------------------------

    def _instruction_map(self, engine: Any, traced: bool) -> Mapping[type, Callable[..., Any]]:
        """Return the instruction map for this engine: the current map of its class, and the
        snapshot instructions.

        Args:
            engine: the engine.
            traced: True to time every instruction, False to time only forward and backward
                passes.
        """
        source = type(engine)._INSTRUCTION_MAP
        if source != self._source:
            self._source = dict(source)
            self._maps.clear()
        if traced not in self._maps:
            own: dict[type, Callable[..., Any]] = {
                OpenSnapshotWindow: lambda engine, window_id, receives: self._pacer.open(
                    window_id, receives
                ),
                CloseSnapshotWindow: lambda engine, window_id: self._pacer.close(),
            }
            reported = {
                kind: self._reported(kind.__name__, execute, traced)
                for kind, execute in source.items()
            }
            self._maps[traced] = {**reported, **own}
        return self._maps[traced]

    def _reported(self, name: str, execute: Callable[..., Any], traced: bool) -> Callable[..., Any]:
        """Wrap an instruction's function, to report it on the progress page and, if requested,
        to time it."""
        stamps, stamp = self._computing.get(name), self._pacer.stamp
        number, note = self._progress.number_of(name), self._progress.instruction

        check = self._session.check_tensors

        def noted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            note(number)
            check()
            return execute(engine, *args, **kwargs)

        def clocked(engine: Any, *args: Any, **kwargs: Any) -> Any:
            note(number)
            check()
            mark = self._mark() if traced else None
            came = stamp() if stamps is not None else None
            began = time.perf_counter()
            try:
                return execute(engine, *args, **kwargs)
            finally:
                ended = time.perf_counter()
                if stamps is not None:
                    stamps.append((came, stamp()))
                if traced:
                    self._record(name, "buffer_id" in kwargs, began, ended)
                    self._mark_end(mark)

        return clocked if traced or stamps is not None else noted

    def _mark(self) -> Any:
        return None if self._tracer.mark is None else self._tracer.mark()

    def _mark_end(self, began: Any) -> None:
        if began is not None and self._tracer.mark is not None:
            self._tracer.marks.append((began, self._tracer.mark()))

    def _record(self, name: str, of_micro_batch: bool, began: float, ended: float) -> None:
        micro_batch = self._counts[name] if of_micro_batch else None
        self._counts[name] += 1
        self._tracer.records.append(
            InstructionRecord(self._position, name, micro_batch, began, ended)
        )
        self._position += 1


def _window_key(schedule: Any) -> Hashable:
    """Return a key for a schedule, which differs if the instructions differ."""
    facts = (
        getattr(schedule, n, None) for n in ("micro_batches", "stages", "stage_id", "forward_only")
    )
    return (type(schedule).__module__, type(schedule).__qualname__, *facts)
