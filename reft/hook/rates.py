"""How often a session's versions are taken, and go to storage, where the block leaves that to the job."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from reft.hook.device_costs import device_bytes, device_copy_secs
from reft.hook.memory_rate import CopyCosts, MemoryRate, dividing
from reft.hook.rate_cache import RateCache, machine_facts
from reft.hook.storage_rate import MemoryLosses, StorageRate, whole_interval
from reft.snapshot.scheduling.has import Overflow
from reft.store.label import Label

if TYPE_CHECKING:
    from reft.hook.session import Session


class Rates:
    """Both tiers of one rank.

    Args:
        session: whose versions; its memory and its protection are there.

    Attributes:
        memory, storage: None where the block has a number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        config = session.config
        self.memory: MemoryRate | None = None
        self.storage: StorageRate | None = None
        if not (config.adapts or config.persist.adapts):
            return
        cache = RateCache(config.memory_dir, self._facts())
        if config.adapts:
            self.memory = self._memory_rate(cache)
        if config.persist.adapts:
            self.storage = self._storage_rate(cache)
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

    def _storage_rate(self, cache: RateCache) -> StorageRate:
        session, persist = self._session, self._session.config.persist
        losses = MemoryLosses(
            session.memory.job_dir.path, session.topology, lambda: session.tolerance, persist.node_mtbf_days
        )
        known = cache.known("storage")
        return StorageRate(
            persist,
            interval_steps=session.config.version_steps,
            memory_mtbf_secs=losses.mtbf_secs,
            known_steps=None if known is None else known[1],
            on_change=lambda costs, steps: cache.note("storage", costs, steps),
        )

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
            due = self.storage.committed(label, agreed)
            told["persist_rate"] = self.storage.to_json() | {"agreed_steps": agreed}
        return due, told

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
