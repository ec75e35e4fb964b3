"""How often a session's versions are taken, and go to storage, where the block leaves that to the job."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from reft.config import ReftConfig
from reft.engine.device_costs import device_bytes, device_copy_secs
from reft.engine.memory_rate import CopyCosts, MemoryRate, dividing
from reft.engine.rate_cache import RateCache, machine_facts
from reft.engine.storage_rate import MemoryLosses, StorageRate
from reft.errors import PersistError
from reft.label import Label
from reft.policy.due import Due
from reft.policy.storage_interval import whole_interval
from reft.snapshot.scheduling.has import Overflow
from reft.storage.persisted import given_up, job_directory, list_persisted

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)


class Rates:
    """Both tiers of one rank. Made collectively.

    Args:
        session: whose versions; its memory and its protection are there.
        from_memory: this node's memory holds the version that the job goes on with.

    Attributes:
        memory, storage: None where the block has a number.
    """

    def __init__(self, session: Session, *, from_memory: bool) -> None:
        self._session = session
        config = session.config
        self._versions = Due(session.engine.global_steps)
        self.memory: MemoryRate | None = None
        self.storage: StorageRate | None = None
        if not (config.adapts or config.persist.adapts):
            return
        cache = RateCache(config.memory_dir, self._facts(), config.persist.dir)
        if config.adapts:
            self.memory = self._memory_rate(cache)
        if config.persist.adapts:
            self.storage = self._storage_rate(cache, self._stored_step(from_memory))
            session.daemon.on_answer = self.storage.answered

    def _facts(self) -> dict[str, Any]:
        """Model, layout, machine and storage."""
        session, config = self._session, self._session.config
        engine, device = session.engine, session.engine.device
        cuda = device.type == "cuda"
        return {
            "engine": engine.name,
            "shapes": engine.shapes(),
            "micro_batches": engine.micro_batches,
            "degrees": asdict(session.topology.degrees),
            "at": asdict(session.coordinate),
            "nodes": len(set(session.topology.failure_domains)),
            "ranks_here": session.ranks_here,
            "protection": session.protection.record.in_force,
            "variant": config.variant.value,
            "has": config.has.model_dump(mode="json"),
            "persist": str(config.persist.dir),
            "device": torch.cuda.get_device_name(device) if cuda else device.type,
            **machine_facts(),
        }

    def _memory_rate(self, cache: RateCache) -> MemoryRate:
        session, config = self._session, self._session.config
        stages = Overflow(config.has.overflow) is Overflow.STAGING
        nbytes = sum(session.engine.adapter.expected_bytes())
        within = device_copy_secs(session.engine.device, nbytes) if stages else None

        def copies() -> CopyCosts:
            peak, spare = device_bytes(session.engine.device)
            return CopyCosts(
                host_copy_secs=session.stats.copy_secs.median,
                update_secs=session.copying.pacer.update_secs,
                device_copy_secs=within,
                checkpoint_bytes=nbytes,
                peak_device_bytes=peak,
                spare_device_bytes=spare,
            )

        bounds = [n for n in (config.max_lost_steps, config.persist.max_lost_steps) if n is not None]
        return MemoryRate(
            config.has.max_overhead,
            max_lost_steps=min(bounds, default=None),
            fits=dividing(config.persist.fixed_steps),
            copies=copies,
            known=cache.known("memory"),
            on_change=lambda costs, steps: cache.note("memory", costs, steps),
        )

    def _storage_rate(self, cache: RateCache, stored_step: int) -> StorageRate:
        session, persist = self._session, self._session.config.persist
        losses = MemoryLosses(
            session.memory.job_dir.path, session.topology, lambda: session.tolerance, persist.node_mtbf_days
        )
        known = cache.known("storage")
        return StorageRate(
            persist,
            interval_steps=session.config.version_steps,
            start_step=stored_step,
            memory_mtbf_secs=losses.mtbf_secs,
            carried_secs=losses.carried_secs,
            known_steps=None if known is None else known[1],
            on_change=lambda costs, steps: cache.note("storage", costs, steps),
        )

    def _stored_step(self, from_memory: bool) -> int:
        """The newest step on storage on the way to where the job goes on, as rank 0 sees it: the step itself,
        if it was loaded from there or nothing was trained yet; 0 where nothing is. Collective."""
        session, step = self._session, self._session.engine.global_steps
        stored = newest_step(session.config, step) if session.is_rank_zero else 0
        told = session.control.gather_ints([from_memory, stored])
        return told[0][1] if any(said[0] for said in told) else step

    # -- told with every commit --------------------------------------------------------------------

    def committed(self, label: Label) -> tuple[bool, dict[str, Any]]:
        """All ranks have a version. Returns whether it goes to storage, and what is to be told.

        Args:
            label: the version.
        """
        told: dict[str, Any] = {}
        if self.memory is not None:
            self.memory.committed(label.step)
            told["memory_rate"] = self.memory.to_json() | {"agreed_steps": self.version_steps(label.step)}
        due = False
        if self.storage is not None:
            agreed = self._agreed_persist_steps(label.step)
            due = self.storage.committed(label, agreed, self.version_steps(label.step))
            told["persist_rate"] = self.storage.to_json() | {"agreed_steps": agreed}
        return due, told

    def takes_version(self, step: int) -> bool:
        """Whether one is taken behind ``step``. Asked once a step, on the training thread."""
        worker = self._session.worker
        given_up = -1 if worker is None else worker.votes.given_up_step(step)
        return self._versions.is_due(step, self.version_steps(step), given_up=given_up)

    def went_to(self, step: int) -> None:
        """The running job goes on from ``step``, which it has loaded from storage."""
        self._versions = Due(step)
        if self.storage is not None:
            self.storage.went_to(step)

    def version_steps(self, step: int) -> int:
        """How often versions are taken around ``step``, as the ranks agreed."""
        session = self._session
        agreed = 1 if session.worker is None else session.worker.votes.interval_steps(step)
        return max(session.config.version_steps, agreed)

    def _agreed_persist_steps(self, step: int) -> int:
        session, every = self._session, self.version_steps(step)
        assert session.worker is not None  # it has voted
        agreed = whole_interval(session.worker.votes.persist_steps, every)
        most = session.config.persist.max_lost_steps
        return agreed if most is None else min(agreed, max(1, most // 2 // every) * every)


def newest_step(config: ReftConfig, until_step: int) -> int:
    """The newest step up to ``until_step`` that the job has on storage and did not go back behind; 0 if there
    is none, or it cannot be found out.

    Args:
        config: with a directory to persist to, and the job's name.
        until_step: where the job goes on.
    """
    assert config.persist.dir is not None
    assert config.job_id is not None
    try:
        found = list_persisted(job_directory(config.persist.dir, config.job_id), config.job_id)
    except (PersistError, OSError) as error:
        logger.warning("what is on storage is not known, the next version goes there: %s", error)
        return 0
    labels = [info.label for info in found if info.label.step <= until_step]
    passed = given_up(labels)
    return max((label.step for label in labels if label not in passed), default=0)
