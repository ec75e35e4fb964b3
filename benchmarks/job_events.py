"""What happened, out of the event files that the processes of a job write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = re.compile(r"(?:reft|rank)-(-?\d+)-(\d+)\.jsonl")


@dataclass(frozen=True)
class Event:
    """One line of an event file: at a Unix time, by a process of a global rank (-1: a launcher)."""

    kind: str
    time: float
    rank: int
    pid: int
    fields: Mapping[str, Any]


class EventReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[str, int] = {}

    def poll(self) -> list[Event]:
        """Events since the last call, in the order of their times.

        A line that is not whole yet is left for later; a killed process may leave one for good.
        """
        found: list[Event] = []
        if not self._directory.is_dir():
            return found
        for path in sorted(self._directory.iterdir()):
            match = _FILE.fullmatch(path.name)
            if match is not None:
                found += self._read(path, int(match[1]), int(match[2]))
        return sorted(found, key=lambda event: event.time)

    def _read(self, path: Path, rank: int, pid: int) -> Iterable[Event]:
        offset = self._offsets.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offsets[path.name] = offset + end
        for line in data[:end].splitlines():
            fields = json.loads(line)
            yield Event(
                fields.pop("event"), fields.pop("time"), fields.pop("rank", rank), pid, fields
            )


@dataclass
class Incarnation:
    """One life of the job: from the start of its trainers to their end."""

    number: int  # 1 for the first; 0 where reft is not attached
    nodes: dict[int, str] = field(default_factory=dict)  # node id of every rank
    tolerance: int | None = None  # node losses that it survives
    # when each rank had loaded and began to train
    ready: dict[int, float] = field(default_factory=dict)
    # times at which each step was done, by rank
    steps: dict[int, dict[int, float]] = field(default_factory=dict)
    # of the steps done in it, as ``float.hex``
    losses: dict[int, str] = field(default_factory=dict)
    restored: dict[int, Event] = field(default_factory=dict)  # ``restored`` events by rank
    # ``recovered`` events, by node: the parts of the recovery
    recovered: dict[str, Event] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)  # versions committed
    skipped: dict[int, str] = field(default_factory=dict)  # causes of versions given up, by step
    # newest counters of every rank
    counters: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """Newest step done by any rank; 0: none."""
        return max(self.steps, default=0)

    @property
    def first_step_times(self) -> tuple[float, float]:
        """When its first step was done on the first, and on the last rank that got so far. Raises
        ValueError: it did no step."""
        times = self.steps[min(self.steps)].values()
        return min(times), max(times)


@dataclass
class History:
    """All incarnations of a job and its losses; fed with events in the order of time."""

    incarnations: dict[int, Incarnation] = field(default_factory=dict)  # by number
    # every loss that was reported for a step, oldest first, as ``float.hex``
    losses: dict[int, list[str]] = field(default_factory=dict)
    _number_of: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> History:
        history = cls()
        for event in EventReader(directory).poll():
            history.feed(event)
        return history

    @property
    def current(self) -> Incarnation:
        return self.incarnations[max(self.incarnations)] if self.incarnations else Incarnation(0)

    @property
    def last_step(self) -> int:
        """Newest step that was ever done by any rank; 0: none."""
        return max((life.last_step for life in self.incarnations.values()), default=0)

    def incarnation_of(self, event: Event) -> Incarnation:
        """The life of the job that the writer of ``event`` belongs to."""
        number = self._number_of.get(event.pid, 0)
        return self.incarnations.setdefault(number, Incarnation(number))

    def feed(self, event: Event) -> None:
        if event.rank < 0:
            return  # a launcher's
        if event.kind == "attached":
            self._number_of[event.pid] = event.fields["incarnation"]
        life = self.incarnation_of(event)
        fields = event.fields
        if event.kind == "attached":
            life.nodes[event.rank] = fields["node"]
            life.tolerance = fields["tolerance"]
        elif event.kind == "ready":
            life.ready[event.rank] = event.time
        elif event.kind == "step":
            life.steps.setdefault(fields["step"], {})[event.rank] = event.time
            if "loss_hex" in fields:
                life.losses[fields["step"]] = fields["loss_hex"]
                self.losses.setdefault(fields["step"], []).append(fields["loss_hex"])
        elif event.kind == "restored":
            life.restored[event.rank] = event
        elif event.kind == "recovered":
            life.recovered[life.nodes[event.rank]] = event
        elif event.kind == "commit":
            life.committed.add(fields["step"])
        elif event.kind == "skip":
            life.skipped[fields["step"]] = fields["cause"]
        if event.kind in ("commit", "closed") and "taken" in fields:
            life.counters[event.rank] = fields


def failure_to_step(life: Incarnation, failed_at: float) -> dict[str, float]:
    """Seconds from the failure to the first step in their parts, as the node saw it that took
    longest: ``detection`` (until its launcher saw that a trainer had failed) and those of
    :data:`reft.node.report.PARTS`. Empty: no node that saw the failure is left."""
    seen = [e for e in life.recovered.values() if e.fields["failed_unix_secs"] is not None]
    if not seen:
        return {}
    last = max(seen, key=lambda event: event.time)
    detection = max(0.0, float(last.fields["failed_unix_secs"]) - failed_at)
    return {
        "detection": detection,
        **{name: float(secs) for name, secs in last.fields["secs"].items()},
    }
