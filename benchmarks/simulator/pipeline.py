"""Discrete-event simulation of one training step of a pipeline.

The stages run their instruction streams independently; they meet in transfers and reductions. A
stage moves on until it must wait for another one; when none can move and not all are at the end,
the schedule deadlocks, and the error says who waits for what. The outcome does not depend on the
order in which the stages are tried. (simpy would bring a clock and generators; what makes this code
long is what the streams mean, and simulating thousands of schedules per plan is quicker without
them.)

Data-parallel peers are taken to behave alike, so one pipeline stands for all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reft.errors import ConfigError

from .checks import Channel, ScheduleError, channel_of, check_schedule, is_send
from .copying import Copying, CopyProgress
from .costs import Costs
from .instructions import (
    CommitP2P,
    Instruction,
    OptimizerStep,
    ReduceTiedGrads,
    Transfer,
)
from .result import Interval, Simulation, StageResult
from .schedules import Schedule
from .waits import idle_windows

_NO_COPY = Copying(nbytes=0, bytes_per_sec=1.0)


class DeadlockError(ScheduleError):
    """Stages wait for each other."""


def simulate(schedule: Schedule, costs: Costs, copying: Sequence[Copying] = ()) -> Simulation:
    """Run one step.

    Args:
        schedule: what every stage executes.
        costs: how long that takes.
        copying: the snapshot that each stage takes beside it; none if empty.

    Raises:
        ScheduleError: the instructions do not fit together.
        DeadlockError: stages wait for each other; the message names them and their instructions.
        ConfigError: costs or copying are for another number of stages.
    """
    if costs.stages != schedule.stages:
        raise ConfigError(
            f"costs are for {costs.stages} stages, the schedule {schedule.name} has "
            f"{schedule.stages}"
        )
    if copying and len(copying) != schedule.stages:
        raise ConfigError(
            f"copying is for {len(copying)} stages, the schedule has {schedule.stages}"
        )
    check_schedule(schedule)
    run = _Run(schedule, costs, copying)
    run.to_the_end()
    stages = tuple(
        StageResult(
            stage.stage_id,
            tuple(stage.intervals),
            idle_windows(stage.intervals),
            tuple(stage.copy.pieces),
            stage.fence_secs,
        )
        for stage in run.stages
    )
    return Simulation(schedule.name, schedule.micro_batches, stages)


@dataclass
class _Message:
    """One transfer, from the moments both sides are ready for it."""

    sent_secs: float | None = None
    received_secs: float | None = None
    slowdown: float = 1.0
    starts_secs: float = 0.0
    ends_secs: float = 0.0


@dataclass
class _Stage:
    stage_id: int
    stream: tuple[Instruction, ...]
    copy: CopyProgress
    clock_secs: float = 0.0
    fence_secs: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    queue: list[Transfer] = field(default_factory=list)
    posted: list[tuple[bool, _Message]] | None = None
    """(is a send, message) of the transfers this stage is in."""
    reductions: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def position(self) -> int:
        return len(self.intervals)

    @property
    def instruction(self) -> Instruction | None:
        return self.stream[self.position] if self.position < len(self.stream) else None

    def done(self, begins_secs: float, ends_secs: float) -> None:
        """The instruction waited until ``begins_secs`` and was busy from then on."""
        instruction = self.stream[self.position]
        self.intervals.append(
            Interval(self.position, instruction, self.clock_secs, begins_secs, ends_secs)
        )
        self.clock_secs = ends_secs


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs, copying: Sequence[Copying]) -> None:
        self._schedule, self._costs = schedule, costs
        self.stages = [
            _Stage(p, stream, CopyProgress(copying[p] if copying else _NO_COPY))
            for p, stream in enumerate(schedule.streams)
        ]
        for stage in self.stages:
            stage.clock_secs = stage.copy.before_step()
        self._sends: dict[Channel, deque[_Message]] = defaultdict(deque)
        self._receives: dict[Channel, deque[_Message]] = defaultdict(deque)
        self._link_free_secs: dict[tuple[int, int], float] = defaultdict(float)
        self._arrivals: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)

    def to_the_end(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage in self.stages:
                while self._advance(stage):
                    moved = True
        if waiting := [stage for stage in self.stages if stage.instruction is not None]:
            raise DeadlockError(
                f"schedule {self._schedule.name} deadlocks: {self._describe(waiting)}"
            )

    def _advance(self, stage: _Stage) -> bool:
        """Try the stage's next instruction; True if anything happened that others can see."""
        instruction = stage.instruction
        if instruction is None:
            return False
        if isinstance(instruction, Transfer) and not self._schedule.queued_p2p:
            return self._transfer(stage, [instruction])
        if isinstance(instruction, CommitP2P):
            return self._transfer(stage, stage.queue)
        if members := self._members(stage, instruction):
            return self._meet(stage, instruction, members)
        if isinstance(instruction, Transfer):
            stage.queue.append(instruction)
        chunks = len(self._schedule.places[stage.stage_id])
        busy_secs = self._costs.seconds(stage.stage_id, chunks, instruction)
        busy_secs = stage.copy.work(instruction, stage.clock_secs, busy_secs)
        stage.done(stage.clock_secs, stage.clock_secs + busy_secs)
        return True

    def _members(self, stage: _Stage, instruction: Instruction) -> tuple[int, ...]:
        """The stages that an instruction brings together; none if it is a matter of one stage."""
        if isinstance(instruction, OptimizerStep):
            return tuple(range(len(self.stages)))
        tied = (
            isinstance(instruction, ReduceTiedGrads) and stage.stage_id in self._costs.tied_stages
        )
        return self._costs.tied_stages if tied else ()

    # ---- transfers ----

    def _transfer(self, stage: _Stage, transfers: list[Transfer]) -> bool:
        new = stage.posted is None
        if stage.posted is None:
            stage.posted = [self._post(stage, transfer) for transfer in transfers]
        begins_secs = ends_secs = stage.clock_secs
        for sends, message in stage.posted:
            if sends and not self._costs.blocking_sends:
                continue
            if message.sent_secs is None or message.received_secs is None:
                return new
            if message.ends_secs > ends_secs:
                begins_secs, ends_secs = message.starts_secs, message.ends_secs
        begins_secs = max(begins_secs, stage.clock_secs)
        stage.copy.wait(stage.clock_secs, begins_secs)
        stage.copy.during(stage.stream[stage.position], begins_secs, ends_secs)
        stage.done(begins_secs, ends_secs)
        stage.posted = None
        stage.queue = []
        return True

    def _post(self, stage: _Stage, transfer: Transfer) -> tuple[bool, _Message]:
        """Say that this side is ready; the n-th send of a channel meets its n-th receive."""
        channel, sends = channel_of(self._schedule, stage.stage_id, transfer), is_send(transfer)
        mine, theirs = (self._sends, self._receives) if sends else (self._receives, self._sends)
        if theirs[channel]:
            message = theirs[channel].popleft()
        else:
            message = _Message()
            mine[channel].append(message)
        if sends:
            message.sent_secs = stage.clock_secs
            message.slowdown = stage.copy.transfer_slowdown()
        else:
            message.received_secs = stage.clock_secs
        self._time(message, channel, just_sent=sends)
        return sends, message

    def _time(self, message: _Message, channel: Channel, just_sent: bool) -> None:
        took_secs = self._costs.transfer_secs * message.slowdown
        if self._costs.blocking_sends:
            if message.sent_secs is not None and message.received_secs is not None:
                message.starts_secs = max(message.sent_secs, message.received_secs)
                message.ends_secs = message.starts_secs + took_secs
        elif just_sent and message.sent_secs is not None:
            link = channel[1:3]
            message.starts_secs = max(message.sent_secs, self._link_free_secs[link])
            message.ends_secs = message.starts_secs + took_secs
            self._link_free_secs[link] = message.ends_secs - self._costs.link_latency_secs

    # ---- reductions ----

    def _meet(self, stage: _Stage, instruction: Instruction, members: tuple[int, ...]) -> bool:
        """A reduction begins when its last member is there; the optimizer, when it has copied
        too."""
        there = self._arrivals[instruction.name, stage.reductions[instruction.name]]
        new = stage.stage_id not in there
        fence = isinstance(instruction, OptimizerStep)
        there[stage.stage_id] = stage.clock_secs + (stage.copy.left_secs if fence else 0.0)
        if len(there) < len(members):
            return new
        begins_secs = max(there.values())
        if fence:
            others_secs = max((t for p, t in there.items() if p != stage.stage_id), default=0.0)
            stage.fence_secs = stage.copy.finish(stage.clock_secs, others_secs)
        stage.copy.wait(stage.clock_secs, begins_secs)
        stage.reductions[instruction.name] += 1
        ends_secs = begins_secs + self._costs.seconds(stage.stage_id, 1, instruction)
        stage.copy.during(instruction, begins_secs, ends_secs)
        stage.done(begins_secs, ends_secs)
        return True

    # ---- deadlocks ----

    def _describe(self, waiting: list[_Stage]) -> str:
        return "; ".join(
            f"stage {s.stage_id} waits in {self._waits_in(s)} (instruction {s.position}) "
            f"for {self._waits_for(s)}"
            for s in waiting
        )

    def _waits_in(self, stage: _Stage) -> str:
        inside = ", ".join(str(t) for t, _ in self._open(stage))
        return f"{stage.instruction} of {inside}" if stage.queue else str(stage.instruction)

    def _waits_for(self, stage: _Stage) -> str:
        instruction = stage.instruction
        if instruction is not None and (members := self._members(stage, instruction)):
            there = self._arrivals[instruction.name, stage.reductions[instruction.name]]
            peers = {p for p in members if p not in there}
        else:
            peers = {self._schedule.peer(stage.stage_id, t) for t, _ in self._open(stage)}
        return ("stage " if len(peers) == 1 else "stages ") + ", ".join(map(str, sorted(peers)))

    def _open(self, stage: _Stage) -> list[tuple[Transfer, _Message]]:
        """The transfers of the instruction at hand whose other side is missing."""
        instruction = stage.instruction
        transfers = [instruction] if isinstance(instruction, Transfer) else stage.queue
        return [
            (transfer, message)
            for transfer, (sends, message) in zip(transfers, stage.posted or [], strict=True)
            if (message.sent_secs is None or message.received_secs is None)
            and (self._costs.blocking_sends or not sends)
        ]
