"""``load_checkpoint`` and ``save_checkpoint`` as reft gives them back.

Loading returns the newest state there is: this job's memory, else the newest checkpoint on disk. The
recovered version is whole and protected again on every node before the first step, and what recovery
reads is not overwritten until then (P3).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from reft.blocks import Section
from reft.errors import ConfigError, ReftError, UnrecoverableError
from reft.hook.coordinates import local_rank
from reft.hook.disk import DiskCheckpoint, host_file, newest_on_disk, read_host_state
from reft.hook.session import Session
from reft.load.exchange import allgather_bytes
from reft.load.inventory import Inventory, take_inventory
from reft.load.plan import Fetch, NotRecoverable, RecoveryPlan, plan_recovery
from reft.load.recover import RecoveryOutcome, recover
from reft.state.blob import DecodedBlob
from reft.state.host import capture_host_state, restore_data_free_state, restore_host_state
from reft.state.rng import restore_rng
from reft.store.arena_files import coordinates_in_slots, frozen_slots
from reft.store.label import Label

logger = logging.getLogger(__name__)

Load = Callable[..., tuple[Any, Any]]


class ClientStateView(dict[str, Any]):
    """The client state of a version in memory. A key that was never given to reft is an error that
    says so, not a ``KeyError`` that looks like a broken checkpoint."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"client_state[{key!r}] is not part of the snapshot in memory; it holds {sorted(self)}. A "
            f"snapshot is taken after every step, so reft must be able to ask for this value: pass "
            f"reft.attach(engine, client_state=lambda: {{{key!r}: ...}}), or derive it from "
            f"engine.global_steps"
        )


class Restorer:
    """Loads and saves for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rng: dict[str, Any] | None = None

    # -- hooks ------------------------------------------------------------------------------------

    def before_first_step(self, data_iter: Any, *, fetches_inside: bool) -> None:
        """Called before every step; does its work once.

        Args:
            data_iter: the iterator given to ``train_batch``, if any.
            fetches_inside: the step itself takes its batches, so that the random state of the
                snapshot must hold from here on; whatever the script drew since it loaded (a loader
                draws a seed when it is iterated) is undone.
        """
        self._session.data.saw(data_iter)
        if self._session.worker is None:
            self._start_without_load()
        if self._rng is not None and fetches_inside:
            restore_rng(self._rng)
        self._rng = None

    def load(self, original: Load, load_dir: Any, tag: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """``engine.load_checkpoint``: the newest state of memory and disk.

        An explicit tag, or a second load in a running job, means that checkpoint and no other.

        Returns:
            DeepSpeed's ``(path, client_state)``; ``(None, None)`` where there is nothing at all.

        Raises:
            UnrecoverableError: the job made progress, but no whole version of it is left.
        """
        session = self._session
        directory = Path(load_dir) if load_dir else None
        if session.worker is not None:
            return self._load_again(original, directory, tag, options)
        inventories = self._gather_inventories()
        plan = self._plan(inventories)
        if tag is not None:
            return self._load_from_disk(original, directory, tag, options)
        disk = self._agree_on_disk(directory)
        partial = options.get("load_module_only") or not options.get("load_optimizer_states", True)
        if isinstance(plan, RecoveryPlan) and (disk is None or partial or disk.step <= plan.label.step):
            outcome = self._restore_from_memory(inventories)
            if isinstance(outcome, RecoveryOutcome):
                return f"memory:{session.job_id}/{outcome.plan.label.step}", self._client_state
            plan = outcome
        if disk is not None:
            self._explain_disk(plan, disk)
            return self._load_from_disk(original, disk.directory, disk.tag, options)
        self._refuse_silent_restart(plan)
        result = original(load_dir, tag=tag, **options)
        session.start({})
        return result

    def save(
        self,
        original: Callable[..., Any],
        save_dir: Any,
        tag: Any,
        client_state: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:
        """``engine.save_checkpoint``: DeepSpeed's own, with reft's host state beside it."""
        session = self._session
        result = original(save_dir, tag=tag, client_state=client_state, **options)
        from reft.state.deepspeed_format import write_host_file

        name = str(tag) if tag is not None else f"global_step{session.engine.global_steps}"
        try:
            state = capture_host_state(
                session.engine,
                session.adapter,
                session.client_state() if session.client_state else client_state,
                session.data.state(),
            )
            write_host_file(host_file(Path(save_dir) / name, session.coordinate), state)
        except (ReftError, OSError) as error:
            logger.warning("the checkpoint is complete, but without random and data state: %s", error)
        return result

    # -- memory -----------------------------------------------------------------------------------

    def _gather_inventories(self) -> list[Inventory]:
        """Every node's inventory, on every rank. One rank per node reads."""
        session = self._session
        mine = b""
        if session.topology.local_ranks(session.node)[0] == session.control.rank:
            taken = take_inventory(session.job_dir.path, session.node, session.job_dir.secret)
            mine = taken.encode(session.job_dir.secret)
        gathered = allgather_bytes(mine, session.control.group)
        return [Inventory.decode(data, session.job_dir.secret) for data in gathered if data]

    def _plan(self, inventories: list[Inventory]) -> RecoveryPlan | NotRecoverable:
        session = self._session
        return plan_recovery(inventories, session.topology, job_id=session.job_id)

    def _restore_from_memory(self, inventories: list[Inventory]) -> RecoveryOutcome | NotRecoverable:
        session = self._session
        began = time.perf_counter()
        target = _Target(session)
        outcome = recover(
            inventories,
            session.topology,
            session.control.rank,
            job_id=session.job_id,
            job_dir=session.job_dir.path,
            secret=session.job_dir.secret,
            prepare=target.prepare,
            sink=target.write,
            group=session.control.group,
            faults=session.faults,
        )
        if isinstance(outcome, NotRecoverable):
            return outcome
        self._finish(target.blob.state)
        session.events.write(
            "restored",
            source="memory",
            version=outcome.plan.label.step,
            incarnation=outcome.plan.label.incarnation,
            bytes_from=outcome.stats.bytes_from,
            repaired=[str(r) for r in outcome.repaired],
            secs=time.perf_counter() - began,
        )
        for repair in outcome.repaired:
            logger.warning("reft: corrupt memory was repaired from another source: %s", repair)
        frozen = self._frozen(outcome.plan.label)
        session.start(frozen)
        if not self._is_still_protected(outcome, frozen):
            self._protect()
        self._report(f"memory, {outcome.plan.label}", began)
        return outcome

    def _finish(self, state: dict[str, Any]) -> None:
        session = self._session
        restore_host_state(session.engine, session.adapter, state)
        self._after_restore(state)

    def _after_restore(self, state: dict[str, Any]) -> None:
        session = self._session
        session.data.restore(state.get("data") or {})
        self._client_state = ClientStateView(state.get("client") or {})
        self._rng = state.get("rng")
        session.restored()

    def _frozen(self, label: Label) -> dict[int, Label]:
        """Slots of this rank that hold the version just recovered: kept until it is protected anew."""
        return frozen_slots(self._session.job_dir.path, self._session.job_dir.secret, local_rank(), label)

    def _is_still_protected(self, outcome: RecoveryOutcome, frozen: dict[int, Label]) -> bool:
        """Whether the recovered version lies as this incarnation would store it: every rank found the
        arena of its own coordinate, whole, in its own slots, protected by the scheme in force, and nothing
        had to be repaired. It then
        stays as it is until a newer version is committed (P3); to take it again would gain nothing.
        """
        session = self._session
        mine = coordinates_in_slots(
            session.job_dir.path,
            session.job_dir.secret,
            local_rank(),
            outcome.plan.label,
            session.protection.record.scheme,
        )
        here = session.coordinate in mine and bool(frozen) and not outcome.repaired
        return all(values[0] for values in session.control.gather_ints([int(here)]))

    def _protect(self) -> None:
        """Take the restored state as the first version of this incarnation and wait for its commit:
        from then on the old version is no longer needed, and the new node is protected too."""
        session = self._session
        request = session.submit(must=True)
        request.done.wait()
        if not request.committed:
            logger.warning(
                "reft: the restored state of step %d could not be protected again: %s. Training goes on",
                request.label.step,
                session.stats.last_error,
            )

    # -- disk -------------------------------------------------------------------------------------

    def _agree_on_disk(self, load_dir: Path | None) -> DiskCheckpoint | None:
        """What rank 0 finds on disk; all ranks must choose alike."""
        session = self._session
        mine = b""
        if session.is_rank_zero:
            found = newest_on_disk(load_dir, session.config.persist.dir)
            mine = found.encode() if found else b""
        data = allgather_bytes(mine, session.control.group)[0]
        return DiskCheckpoint.decode(data) if data else None

    def _load_from_disk(
        self, original: Load, directory: Path | None, tag: Any, options: dict[str, Any]
    ) -> tuple[Any, Any]:
        session = self._session
        began = time.perf_counter()
        path, client_state = original(str(directory), tag=tag, **options)
        if session.worker is None:
            session.start({})
        if path is None:
            return path, client_state
        state = None
        if directory is not None and not options.get("load_module_only"):
            state = read_host_state(directory / str(tag), session.coordinate)
        if state is not None:
            restore_data_free_state(session.engine, state)
            self._after_restore(state)
        session.restored()
        session.events.write(
            "restored",
            source="disk",
            version=int(session.engine.global_steps),
            bytes_from={"disk": sum(image.nbytes for image in session.adapter.images())},
            secs=time.perf_counter() - began,
        )
        self._protect()
        self._report(f"disk, {path}", began)
        return path, client_state

    def _load_again(
        self, original: Load, directory: Path | None, tag: Any, options: dict[str, Any]
    ) -> tuple[Any, Any]:
        """A load in a running job, for example back to before a loss spike: what is in memory is the
        abandoned future, so the versions to come belong to a new incarnation."""
        session = self._session
        assert session.worker is not None
        session.worker.drain(session.config.commit_timeout_secs)
        session.worker.fence()
        session.incarnation += 1
        disk = self._agree_on_disk(directory) if tag is None else None
        if disk is not None:
            directory, tag = disk.directory, disk.tag
        return self._load_from_disk(original, directory, tag, options)

    # -- refusals ---------------------------------------------------------------------------------

    def _refuse_silent_restart(self, plan: RecoveryPlan | NotRecoverable) -> None:
        """Nothing to resume from: right for a new job, an error for one that had made progress."""
        session = self._session
        assert isinstance(plan, NotRecoverable)
        noted = session.record.newest_commit() if session.is_rank_zero else None
        note = allgather_bytes(str(noted or "").encode(), session.control.group)[0].decode()
        if plan.newest_committed is None and not plan.layout_mismatch and not note:
            return
        where = session.config.persist.dir or "not configured (persist.dir)"
        progress = note or plan.newest_committed or "versions of another layout"
        raise UnrecoverableError(
            f"job {session.job_id} had committed {progress}, but it cannot be recovered and no checkpoint "
            f"is on disk (persist directory: {where}).\n{plan}\n"
            f"To start from scratch on purpose, run 'reft clean --job {session.job_id} --force' on every "
            f"node, or give the job another id."
        )

    def _start_without_load(self) -> None:
        """The script trains without having called ``load_checkpoint``."""
        session = self._session
        plan = self._plan(self._gather_inventories())
        if isinstance(plan, RecoveryPlan):
            raise UnrecoverableError(
                f"the memory of job {session.job_id} holds {plan.label}, but the script trains without "
                f"calling engine.load_checkpoint(...): it would start from scratch and overwrite it. Call "
                f"engine.load_checkpoint(save_dir) after deepspeed.initialize, or run 'reft clean --job "
                f"{session.job_id} --force' if that is meant"
            )
        self._refuse_silent_restart(plan)
        session.start({})

    def _explain_disk(self, plan: RecoveryPlan | NotRecoverable, disk: DiskCheckpoint) -> None:
        if self._session.is_rank_zero and isinstance(plan, NotRecoverable) and not plan.empty:
            logger.warning("reft: resuming from disk (%s): %s", disk, plan)

    def _report(self, source: str, began: float) -> None:
        if self._session.is_rank_zero:
            logger.warning(
                "reft: resumed at step %d from %s in %.2f s",
                self._session.engine.global_steps,
                source,
                time.perf_counter() - began,
            )


class _Target:
    """Where the recovered bytes go: the host block first, then straight into the live tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.blob: DecodedBlob

    def prepare(self, host: bytes) -> None:
        """The host block of this coordinate is there: give the engine's state the shape it had."""
        session = self._session
        self.blob = DecodedBlob(host)
        self._images = session.adapter.prepare(self.blob.manifest, self.blob.state["adapter"])

    def write(self, fetch: Fetch, data: torch.Tensor) -> None:
        image = self._images[0] if fetch.key.section is Section.REPLICATED else self._images[1]
        image.write_from(fetch.start_bytes, data)


def client_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The user's part of a captured host state."""
    return dict(state.get("client") or {})
