"""A pipeline of known times: traces as a perfect profiler would take them, and the true idle time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reft.profile.traces import ClockOffset, RankTraces
from reft.snapshot.scheduling.trace import ChunkRecord, InstructionRecord, StepTrace

Call = tuple[str, int | None]


@dataclass
class Job:
    """A job of ``len(streams)`` stages, each with one rank.

    Attributes:
        streams: (class name, micro batch) of each stage's step.
        secs: of a call by (stage, name), or by name.
        transfer_secs: of every transfer.
        meets: names of calls in which all stages wait for the last.
        clock_secs: what each rank's clock is ahead of the true time.
        jitter: relative noise of computation, per step and call.
    """

    streams: Sequence[Sequence[Call]]
    secs: Mapping[object, float]
    transfer_secs: float = 0.0
    meets: frozenset[str] = frozenset()
    clock_secs: Sequence[float] = ()
    jitter: float = 0.0
    true_idle: dict[tuple[int, int, int], float] = field(default_factory=lambda: defaultdict(float))
    """(stage, step, position) to seconds."""

    def run(self, steps: int, seed: int = 0) -> list[RankTraces]:
        noise = random.Random(seed)
        stages = len(self.streams)
        clocks = [1.0] * stages
        traces: list[list[StepTrace]] = [[] for _ in range(stages)]
        for step in range(1, steps + 1):
            begins = list(clocks)
            records = self._step(step, clocks, noise)
            for stage in range(stages):
                ahead = self.clock_secs[stage] if self.clock_secs else 0.0
                traces[stage].append(
                    StepTrace(
                        step=step,
                        rank=stage,
                        stage_id=stage,
                        begin_secs=begins[stage] + ahead,
                        end_secs=clocks[stage] + ahead,
                        instructions=tuple(
                            InstructionRecord(p, name, mb, b + ahead, e + ahead)
                            for p, (name, mb, b, e) in enumerate(records[stage])
                        ),
                        chunks=(),
                        fence_secs=0.0,
                    )
                )
        return [
            RankTraces(
                rank=stage,
                pp=stage,
                dp=0,
                tp=0,
                offset=ClockOffset(-(self.clock_secs[stage] if self.clock_secs else 0.0)),
                snapshot_bytes=0,
                complete=True,
                traces=tuple(traces[stage]),
            )
            for stage in range(stages)
        ]

    def _step(self, step: int, now: list[float], noise: random.Random) -> list[list[tuple]]:
        """Run one step; ``now`` is each stage's true time and moves on."""
        run = _Step(self, step, now, noise)
        stages = range(len(self.streams))
        while any(run.left(s) for s in stages):
            if not any([run.go_on(s) for s in stages]):
                raise AssertionError(f"deadlock at {[run.left(s)[:1] for s in stages]}")
        return run.done


class _Step:
    """One step under way."""

    def __init__(self, job: Job, step: int, now: list[float], noise: random.Random) -> None:
        self.job, self.step, self.now, self.noise = job, step, now, noise
        self.done: list[list[tuple]] = [[] for _ in job.streams]
        self._begun: dict[tuple[str, int, int], float] = {}
        self._meeting: dict[str, dict[int, float]] = defaultdict(dict)

    def left(self, stage: int) -> Sequence[Call]:
        return self.job.streams[stage][len(self.done[stage]) :]

    def go_on(self, stage: int) -> bool:
        """Run a stage as far as it gets; whether it got anywhere."""
        before = len(self.done[stage])
        while left := self.left(stage):
            (name, micro_batch), begin = left[0], self.now[stage]
            ready = self._ready(stage, name)
            if ready is None:
                break
            if ready > begin:
                self.job.true_idle[stage, self.step, len(self.done[stage])] = ready - begin
            end = max(ready, begin) + self._busy_secs(stage, name)
            self.done[stage].append((name, micro_batch, begin, end))
            self.now[stage] = end
        return len(self.done[stage]) > before

    def _ready(self, stage: int, name: str) -> float | None:
        """When the partners of a call are there; None if that is not known yet."""
        stages, begin = len(self.job.streams), self.now[stage]
        if name in self.job.meets:
            self._meeting[name][stage] = begin
            return max(self._meeting[name].values()) if len(self._meeting[name]) == stages else None
        if not name.startswith(("Send", "Recv")):
            return begin
        sends, what = name.startswith("Send"), name[4:]
        number = sum(1 for other, *_ in self.done[stage] if other == name)
        self._begun[name, stage, number] = begin
        peer = (stage + (1 if (what == "Activation") == sends else -1)) % stages
        return self._begun.get((("Recv" if sends else "Send") + what, peer, number))

    def _busy_secs(self, stage: int, name: str) -> float:
        job = self.job
        if name.startswith(("Send", "Recv")):
            return job.transfer_secs
        secs = job.secs.get((stage, name), job.secs.get(name, 0.0))
        return secs * (1 + job.jitter * self.noise.uniform(-1, 1))


def train_schedule(stages: int, micro_batches: int) -> list[list[Call]]:
    """DeepSpeed's own 1F1B."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    streams = []
    for stage in range(stages):
        counts: dict[str, int] = defaultdict(int)
        stream: list[Call] = []
        for commands in TrainSchedule(micro_batches, stages, stage):
            for command in commands:
                name = type(command).__name__
                works_on_one = hasattr(command, "buffer_id")
                stream.append((name, counts[name] if works_on_one else None))
                counts[name] += 1
        streams.append(stream)
    return streams


def with_chunks(
    ranks: Sequence[RankTraces], per_rank: Mapping[int, Sequence[ChunkRecord]]
) -> list[RankTraces]:
    """The same with snapshot chunks, whose times count from the begin of each step."""
    from dataclasses import replace

    result = []
    for rank in ranks:
        traces = tuple(
            replace(
                trace,
                chunks=tuple(
                    replace(
                        c, begin_secs=c.begin_secs + trace.begin_secs, end_secs=c.end_secs + trace.begin_secs
                    )
                    for c in per_rank.get(rank.rank, ())
                ),
            )
            for trace in rank.traces
        )
        result.append(
            replace(rank, traces=traces, snapshot_bytes=sum(c.nbytes for c in per_rank.get(rank.rank, ())))
        )
    return result
