"""Adapts the intervals of versions in memory and on storage, if the block says ``"interval_steps":
"auto"``: one controller of :mod:`reft.policy.rate` for each tier.

Unlike CheckFreq in its profiling phase, versions are taken during the measurement, because their
cost is what is measured. On a device without pipeline stages, CheckFreq's mode of copying is
chosen as well (``has.overflow: auto``).

All ranks follow one decision: each proposes an interval in the vote on a version, and the
longest one wins (:class:`~reft.policy.agreed.AgreedRates`). Training does not wait for any of
this (P6).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, PositiveInt

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.data.position import DataPosition
from reft.device import find_vendor
from reft.durable import write_durably
from reft.errors import PersistError
from reft.grid import Topology, VersionId, given_up
from reft.node.history import read_history
from reft.pacing.pacer import Pacer
from reft.policy.agreed import AgreedRates
from reft.policy.rate import (
    DueSteps,
    IntervalController,
    StorageIntervalController,
    learned_losses_per_sec,
    memory_risk,
    whole_interval,
)
from reft.protect.placement import Weibull
from reft.snapshot.stats import PeerErrors
from reft.snapshot.worker import SnapshotRequest, Votes
from reft.storage.persisted import job_directory, list_persisted

logger = logging.getLogger(__name__)

Tier = Literal["memory", "storage"]


def learned_risk(
    job_dir: Path, topology: Topology, tolerance: int, node_mtbf_days: float, survival: float | None
) -> tuple[float, float]:
    """Return the :func:`~reft.policy.rate.memory_risk` with the loss rate of the job's history."""
    losses_per_sec = learned_losses_per_sec(read_history(job_dir), time.time(), node_mtbf_days)
    return memory_risk(topology, tolerance, losses_per_sec, survival, [Weibull(1 / losses_per_sec)])


def dividing(persist_steps: int) -> Callable[[int], int]:
    """Return a function that rounds intervals up to divisors or multiples of a fixed storage
    interval.

    With such intervals, every step at which a checkpoint must be written to storage has a
    version.

    Args:
        persist_steps: fixed interval on storage; 0 if it is not fixed, then nothing is rounded.
    """

    def fits(steps: int) -> int:
        if not persist_steps:
            return steps
        if steps > persist_steps:
            return -(-steps // persist_steps) * persist_steps
        return next(k for k in range(steps, persist_steps + 1) if persist_steps % k == 0)

    return fits


class _Measured(BaseModel):
    memory: PositiveInt | None = None
    storage: PositiveInt | None = None


class RateCache:
    """Intervals that an earlier start measured, so that later starts need not measure again.

    Each rank has one small file in the memory directory, next to the jobs' directories. The file
    serves all jobs with the same model and layout.

    Args:
        directory: the memory directory.
        facts: everything on which the intervals depend, as JSON values.

    Attributes:
        known: intervals in steps by tier; None if they must be measured.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = directory / f".rate-{digest[:24]}.json"
        self._logged = False
        self.known = _Measured()
        try:
            self.known = _Measured.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored: %s", self.path, str(error).partition("\n")[0])

    def note(self, tier: Tier, interval_steps: int) -> None:
        """Store an interval. If the directory cannot be written to, this is logged once, and
        training continues (P6). Called by the voting thread."""
        setattr(self.known, tier, interval_steps)
        try:
            write_durably(self.path, self.known.model_dump_json(indent=1).encode())
        except OSError as error:
            if not self._logged:
                logger.warning(
                    "%s: the next start will have to measure again: %s", self.path, error
                )
            self._logged = True


class MeasuredEngine(Protocol):
    """The properties of a training engine on which the cost of versions depends."""

    name: str
    device: torch.device
    micro_batches: int

    @property
    def data(self) -> DataPosition | None: ...

    @property
    def global_steps(self) -> int: ...

    def shapes(self) -> str: ...


class IntervalRates:
    """The intervals of one rank's versions in memory and on storage. Created collectively.

    Args:
        config: the ``reft`` block.
        engine: the training engine.
        control: messages between the ranks.
        topology: placement of all ranks.
        job_dir: the job's memory on this node.
        scheme: name of the protection scheme in force.
        tolerance: returns the number of node losses that every sharding group survives.
        pacer: plans this rank's copies, and advises an interval for them.
        peer_errors: where this rank records an error in computing its interval, so that all ranks
            receive it.
        from_memory: whether the job continues from a version in this node's memory.

    Attributes:
        agreed: the intervals that the ranks agreed on in their votes.
        memory: controller for memory; None if the block sets a fixed interval.
        storage: controller for storage; None if the block sets a fixed interval.
        votes: votes of the snapshot worker; None until the worker runs.
    """

    def __init__(
        self,
        config: ReftConfig,
        engine: MeasuredEngine,
        control: ControlGroup,
        topology: Topology,
        *,
        job_dir: Path,
        scheme: str,
        tolerance: Callable[[], int],
        pacer: Pacer,
        peer_errors: PeerErrors,
        from_memory: bool,
    ) -> None:
        self._config, self._engine, self._pacer = config, engine, pacer
        self._epoch_steps = 0  # Steps of an epoch, as far as this rank knows; 0 if unknown
        persist, step = config.persist, engine.global_steps
        self._versions = DueSteps(step)
        self.agreed = AgreedRates(
            self.wanted_interval,
            self.wanted_persist_interval,
            peer_errors,
            pacer if pacer.chooses_mode else None,
            lambda: self._epoch_steps,
        )
        self.votes: Votes | None = None
        self.memory: IntervalController | None = None
        self.storage: StorageIntervalController | None = None
        if not (config.adapts or persist.adapts):
            return
        cache = RateCache(config.memory_dir, _cost_facts(config, engine, control, topology, scheme))
        if config.adapts:
            bounds = [n for n in (config.max_lost_steps, persist.max_lost_steps) if n is not None]
            self.memory = IntervalController(
                config.has.max_overhead,
                most_steps=min(bounds) // 2 if bounds else None,
                fits=dividing(persist.fixed_steps),
                known=cache.known.memory,
                epoch_steps=lambda: self.agreed.epoch_steps,
                on_change=partial(cache.note, "memory"),
            )
        if persist.adapts:
            self.storage = StorageIntervalController(
                persist.max_overhead,
                most_lost_steps=persist.max_lost_steps,
                interval_steps=config.version_steps,
                start_step=_stored_step(config, control, step, from_memory=from_memory),
                risk=lambda: learned_risk(
                    job_dir, topology, tolerance(), persist.node_mtbf_days, persist.survival
                ),
                known=cache.known.storage,
                epoch_steps=lambda: self.agreed.epoch_steps,
                on_change=partial(cache.note, "storage"),
            )

    def step(self, step: int, secs: float) -> None:
        """Record that a step has ended, ``secs`` after the previous one. Called by the training
        thread."""
        data = self._engine.data
        if not self._epoch_steps and data is not None:
            self._epoch_steps = data.epoch_batches() // self._engine.micro_batches
        for rate in (self.memory, self.storage):
            if rate is not None:
                rate.step(step, secs)

    def begun(self, request: SnapshotRequest) -> None:
        if self.memory is not None:
            self.memory.begun(request.label.step, request.done.is_set)

    # -- for every vote ----------------------------------------------------------------------------

    def wanted_interval(self) -> int:
        advised = self._pacer.advised_interval_steps
        return advised if self.memory is None else self.memory.wanted_interval(advised)

    def wanted_persist_interval(self) -> int:
        return 0 if self.storage is None else self.storage.wanted_interval()

    # -- after every commit ------------------------------------------------------------------------

    def committed(self, label: VersionId) -> tuple[bool, dict[str, Any]]:
        """Handle a version that all ranks have committed.

        Returns:
            Whether the version goes to storage, and statistics to report.
        """
        stats: dict[str, Any] = {}
        every = self.version_steps(label.step)
        if self.memory is not None:
            self.memory.arrived(label.step)
            stats["memory_rate"] = self.memory.to_json() | {"agreed_steps": every}
        if self.storage is None:
            return False, stats
        most = self._config.persist.max_lost_steps
        agreed = whole_interval(self.agreed.persist_steps, every)
        if most is not None:
            agreed = min(agreed, max(1, most // 2 // every) * every)
        due = self.storage.committed(label, agreed, every)
        stats["persist_rate"] = self.storage.to_json() | {"agreed_steps": agreed}
        return due, stats

    def takes_version(self, step: int) -> bool:
        """Return whether a version is taken after ``step``. Called once per step by the training
        thread.
        """
        given_up = -1 if self.votes is None else self.votes.given_up_step(step)
        return self._versions.is_due(step, self.version_steps(step), given_up=given_up)

    def went_to(self, step: int) -> None:
        self._versions = DueSteps(step)
        if self.storage is not None:
            self.storage.went_to(step)

    def version_steps(self, step: int) -> int:
        """Return the number of steps between versions that the ranks agreed on for ``step``."""
        return max(self._config.version_steps, self.agreed.interval_steps(step))


def newest_step(config: ReftConfig, until_step: int) -> int:
    """Return the newest step on storage up to ``until_step`` that the job has not abandoned.

    Returns:
        The step; 0 if there is none, or storage cannot be listed.
    """
    assert config.persist.dir is not None
    assert config.job_id is not None
    try:
        found = list_persisted(job_directory(config.persist.dir, config.job_id), config.job_id)
    except (PersistError, OSError) as error:
        logger.warning(
            "the checkpoints on storage cannot be listed, so the next version is written there: %s",
            error,
        )
        return 0
    labels = [info.label for info in found if info.label.step <= until_step]
    passed = given_up(labels)
    return max((label.step for label in labels if label not in passed), default=0)


def _stored_step(config: ReftConfig, control: ControlGroup, step: int, *, from_memory: bool) -> int:
    """Return the newest step on storage up to ``step``, as rank 0 sees it. Collective.

    Return ``step`` itself if no node's memory held the version from which the job continues:
    then that version is on storage, or the job is new. Return 0 if storage holds nothing.
    """
    stored = newest_step(config, step) if control.rank == 0 else 0
    replies = control.gather_ints([from_memory, stored])
    return replies[0][1] if any(reply[0] for reply in replies) else step


def _cost_facts(
    config: ReftConfig,
    engine: MeasuredEngine,
    control: ControlGroup,
    topology: Topology,
    scheme: str,
) -> dict[str, Any]:
    """Return the facts on which the cost of versions depends, on this machine."""
    vendor = find_vendor(engine.device)
    node = topology.nodes[control.rank]
    return {
        "engine": engine.name,
        "shapes": engine.shapes(),
        "micro_batches": engine.micro_batches,
        "degrees": asdict(topology.degrees),
        "at": asdict(topology.coordinates[control.rank]),
        "nodes": len(set(topology.failure_domains)),
        "ranks_here": len(topology.local_ranks(node)),
        "cores": len(os.sched_getaffinity(0)),
        "protection": scheme,
        "variant": config.variant.value,
        "has": config.has.model_dump(mode="json"),
        "persist": str(config.persist.dir),
        "device": vendor.module.get_device_name(engine.device) if vendor else engine.device.type,
    }
