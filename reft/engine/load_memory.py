"""Restores a session from the job's memory, for every kind of engine.

By the time the first step begins, every node holds the complete recovered version, protected
again. Until it does, the arenas being read from are not overwritten (P3).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from reft.data.position import READ_BY_SCRIPT
from reft.data.watch import WATCH
from reft.device import find_vendor
from reft.engine import marks
from reft.engine.capture import EngineState
from reft.engine.context import JobContext
from reft.engine.device_writer import DeviceWriter
from reft.engine.fingerprint import BY_LAYOUT, BY_REPLICAS
from reft.engine.job_memory import JobMemory
from reft.engine.job_record import noted_commit
from reft.engine.marks import uncollected
from reft.engine.nodes import local_rank
from reft.engine.protection import Protection
from reft.engine.protocol import OnResize
from reft.errors import ConfigError, NotResumedError, UnrecoverableError
from reft.faults import FaultPlan
from reft.grid import Coordinate, Degrees, Section, VersionId, only_replicas_differ
from reft.memory.arena import arena_name, slots_with
from reft.memory.header import ArenaHeader
from reft.memory.protection_record import ProtectionRecord
from reft.memory.stream import HashingCopier, Range, find_ranges, hashing_copier
from reft.node import history
from reft.protect.placement import place_group
from reft.recover.decide import ImageRange
from reft.recover.inventory import ArenaStore
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import ArenaLayout, BlockSlot, StoreConfig
from reft.recover.recover import Participant, Recovery, RecoveryOutcome
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.snapshot.worker import SnapshotRequest
from reft.state.blob import DecodedBlob, capture_rng, restore_rng
from reft.state.catalogue import SectionImage
from reft.storage.load import DiskCheckpoint
from reft.storage.persisted import STORAGE_KEY

logger = logging.getLogger(__name__)


class RestorableSession(Protocol):
    """The part of a session's interface that is used to load a state."""

    @property
    def started(self) -> bool: ...

    @property
    def on_resize(self) -> OnResize | None: ...

    def start(self, frozen: Mapping[int, VersionId]) -> None: ...

    def restored(self) -> None: ...

    def submit(self, *, required: bool) -> SnapshotRequest: ...


class Target:
    """Writes a version from arenas (the files of the job's memory) into the engine.

    Args:
        context: the job.
        version: description of the version and its source, for messages.

    Attributes:
        state: the host state for this rank; set by :meth:`prepare`.
    """

    def __init__(self, context: JobContext, version: str) -> None:
        self._context = context
        self._version = version
        device = context.engine.device
        vendor = find_vendor(device)
        self._device_writer = None if vendor is None else DeviceWriter(device, vendor)
        self._own = threading.local()
        self._parts: Callable[[Fetch, torch.Tensor], Iterable[Pair]]
        self.state: dict[str, Any]

    def prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> Sequence[ImageRange]:
        """Prepare the engine's tensors after the host states have arrived.

        Args:
            hosts: encoded host states, by coordinate in the layout ``was``.
            was: the layout in which the version was written.

        Returns:
            Ranges of images to fetch for another layout; empty for the same layout.
        """
        ranges = self._prepare(hosts, was)
        if self._device_writer is not None:
            self._device_writer.begin()
        return ranges

    def close(self) -> None:
        """Release the device writer."""
        if self._device_writer is not None:
            self._device_writer.close()

    def _prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> Sequence[ImageRange]:
        context, engine = self._context, self._context.engine
        if was == context.topology.degrees:
            blob = DecodedBlob(hosts[context.coordinate])
            self.state = blob.state
            images = engine.adapter.prepare(blob.manifest, self.state["adapter"])
            self._parts = lambda fetch, data: _split_parts(images, fetch, data)
            return ()
        from reft.relayout.arenas import ArenaSource
        from reft.relayout.restore import Relayout

        source = ArenaSource(hosts, was, self._version)
        # Only engines that can change layouts survey versions of other layouts
        assert engine.resizing is not None
        relayout = Relayout(context.control, context.topology, engine.resizing, source)
        self.state = relayout.prepare()
        self._parts = source.parts
        return source.pieces

    def write(self, fetch: Fetch, data: torch.Tensor) -> int:
        """Copy a block into the live tensors and compute its checksum in one pass. Thread-safe.

        Args:
            fetch: names the block.
            data: bytes of the block, 1-D uint8 in host memory.

        Returns:
            The checksum of ``data``.
        """
        parts = list(self._parts(fetch, data))
        # The state of an offloaded optimizer is in host memory even if a device trains.
        on_device = any(target.device.type != "cpu" for target, _ in parts)
        if self._device_writer is not None and on_device:
            return self._device_writer.write(parts, data)
        if not hasattr(self._own, "hasher"):
            self._own.hasher = hashing_copier()
        return write_and_hash(parts, data, self._own.hasher)


# A pair of live bytes and their new content, both 1-D uint8 of equal length
Pair = tuple[torch.Tensor, torch.Tensor]


def _split_parts(
    images: tuple[SectionImage, SectionImage], fetch: Fetch, data: torch.Tensor
) -> list[Pair]:
    image = images[0] if fetch.key.section is Section.REPLICATED else images[1]
    parts: list[Pair] = []
    image.write_from(fetch.start_bytes, data, lambda *pair: parts.append(pair))
    return parts


def write_and_hash(parts: Iterable[Pair], data: torch.Tensor, hasher: HashingCopier) -> int:
    """Copy parts of a block and compute its checksum in one pass.

    Args:
        parts: pairs of target memory on the host and the part of ``data`` to copy there, in the
            order of ``data``.
        data: the block, 1-D uint8 on the host.
        hasher: copies and hashes.

    Returns:
        The checksum of all of ``data``, including the bytes between the parts.
    """
    ranges: list[Range] = []
    base, at = data.data_ptr(), 0
    for target, source in parts:
        begin = source.data_ptr() - base
        ranges.append((0, base + at, begin - at))
        ranges.append((target.data_ptr(), base + begin, source.numel()))
        at = begin + source.numel()
    ranges.append((0, base + at, data.numel() - at))
    hasher.copy(find_ranges(row for row in ranges if row[2]))
    return hasher.take()


def participant(context: JobContext, faults: FaultPlan) -> Participant:
    """Describe this rank as a participant in a recovery from the memory of all nodes."""
    job = context.job_dir
    store = ArenaStore(job.path, context.node, job.secret)
    return Participant(context.topology, context.control, job.job_id, store, faults)


def stored_participant(context: JobContext, checkpoint: DiskCheckpoint) -> Participant:
    """Describe this rank as a participant in a recovery from storage; another job may have written
    the version.

    If all nodes can read all arenas, the reads are divided: a node reads the arenas of its own
    ranks and, if the version has another layout, a share of the arenas that belong to no present
    rank. A node with a disk of its own reads what it has there.
    """
    topology, node, path = context.topology, context.node, checkpoint.path
    nodes = sorted(set(topology.nodes))
    homes = {str(c): n for c, n in zip(topology.coordinates, topology.nodes, strict=True)}

    def is_read_here(path: Path) -> bool:
        return homes.get(path.stem, nodes[zlib.crc32(path.stem.encode()) % len(nodes)]) == node

    store = ArenaStore(path, node, STORAGE_KEY, is_read_here)
    if checkpoint.local:
        part = checkpoint.part_at(context.config.persist.dir)
        store = ArenaStore(part or path, node, STORAGE_KEY, lambda path: part is not None)
    return Participant(topology, context.control, str(checkpoint.job_id), store)


def completing(context: JobContext, record: ProtectionRecord) -> StoreConfig | None:
    """Configure how the recovered version is stored on a node that has no arena of it.

    Returns:
        The configuration, with the first free slot (one without an arena file); None if the
        arena cannot be laid out before the session starts.
    """
    config, at = context.config, context.coordinate
    if config.memory_limit_bytes is not None or config.recompute:
        return None
    files = (
        context.job_dir.path / arena_name(local_rank(), slot) for slot in range(config.arena_count)
    )
    free = next((file for file in files if not file.exists()), None)

    def lay_out(replicated_bytes: int, owned_bytes: tuple[int, ...]) -> ArenaLayout:
        scheme, members = record.parsed, len(owned_bytes)
        plan = make_shard_plan(
            SectionSizes(replicated_bytes, owned_bytes, (config.host_state_bytes,) * members),
            place_group(context.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities),
            config.block_bytes,
        )
        local = plan.members[at.dp]
        slots = {
            b.key: BlockSlot(b.block.start_bytes, b.block.nbytes, b.arena_offset)
            for b in local.blocks
            if b.block.nbytes
        }
        return ArenaLayout(slots, local.data_bytes)

    return StoreConfig(record.scheme, free, lay_out)


def is_still_protected(
    context: JobContext, scheme: str, headers: Iterable[ArenaHeader], outcome: RecoveryOutcome
) -> bool:
    """Return whether the recovered version is stored as this incarnation would store it.
    Collective.

    True if every rank has the complete arena of its own coordinate in its own slots, with the
    same degrees and the active scheme, and no block had to be repaired. Then the version need
    not be taken again: its arenas stay until a newer version is committed.

    Args:
        context: the job.
        scheme: the active scheme.
        headers: headers of the arenas in this rank's slots that hold the version.
        outcome: outcome of the recovery.
    """
    expected = context.coordinate, context.topology.degrees, scheme
    here = not outcome.repaired and any(
        (header.coordinate, header.degrees, header.scheme) == expected for header in headers
    )
    return all(values[0] for values in context.control.gather_ints([int(here)]))


def may_differ(was: Degrees, now: Degrees) -> tuple[str, ...]:
    """Return facts of the fingerprint that may differ when a version of layout ``was`` is
    restored."""
    if was == now:
        return ()
    return BY_REPLICAS if only_replicas_differ(was, now) else BY_LAYOUT


class ClientStateView(dict[str, Any]):
    """The client state of a version in memory. A missing key raises an error that says what to
    change, instead of a ``KeyError`` that looks like a broken checkpoint."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"client_state[{key!r}] is not part of the snapshot in memory; it holds "
            f"{sorted(self)}. A snapshot is taken after every step, so reft must be able to ask "
            f"for this value: pass client_state=lambda: {{{key!r}: ...}} to reft.attach or "
            "reft.attach_megatron, or derive it from the number of steps made"
        )


class MemoryRestorer:
    """Restores one session from the job's memory.

    Attributes:
        client_state: client state of the version that was restored last.
    """

    def __init__(  # noqa: PLR0917 -- the parts of a session
        self,
        context: JobContext,
        session: RestorableSession,
        memory: JobMemory,
        state: EngineState,
        protection: Protection,
        faults: FaultPlan,
    ) -> None:
        self._context, self._session = context, session
        self._job_memory, self._state = memory, state
        self._protection, self._faults = protection, faults
        self._rng: dict[str, Any] | None = None
        # True if the script reads its data itself, so its random draws before the first step
        # make the batch
        self._is_read_by_script = False
        self.client_state = ClientStateView()

    @uncollected()
    def survey(
        self, me: Participant | None = None, *, any_layout: bool = True
    ) -> tuple[Recovery, RecoveryPlan | NotRecoverable]:
        """Find the newest version that can be restored. Collective.

        Args:
            me: this rank as a participant in a recovery from storage; None to recover from the
                memory of all nodes.
            any_layout: accept versions of other layouts, if the engine can load them.

        Returns:
            The recovery, and its plan or the reason why nothing can be recovered.
        """
        context = self._context
        any_layout = any_layout and context.engine.resizing is not None
        how = completing(context, self._protection.record) if me is None else None
        me = me or participant(context, self._faults)
        recovery = Recovery(me, completing=how, any_layout=any_layout)
        marks.mark(marks.SURVEY)
        plan = recovery.survey()
        marks.mark(marks.AGREED)
        return recovery, plan

    def check_identity(self, plan: RecoveryPlan) -> None:
        """Refuse a version of another job, or of this one with other settings. Collective."""
        context = self._context
        self._job_memory.identity.check_memory(
            *(context.job_dir.path, plan.label),
            reads=context.is_first_on_node,
            but=may_differ(plan.written, plan.degrees),
        )

    @uncollected()
    def take_up(
        self, recovery: Recovery, version: str
    ) -> tuple[RecoveryOutcome | NotRecoverable, dict[str, Any]]:
        """Restore the surveyed version into the engine. Collective.

        Args:
            recovery: result of :meth:`survey`.
            version: description of the version and its source, for messages.

        Returns:
            The outcome, and the host state.
        """
        context = self._context
        target = Target(context, version)
        with closing(target):
            outcome = recovery.restore(target.prepare, target.write)
        if isinstance(outcome, NotRecoverable):
            return outcome, {}
        context.engine.restore(target.state)
        was, now = outcome.plan.written, outcome.plan.degrees
        if was != now and context.is_rank_zero:
            logger.warning(
                "%s was written by a job of %s and is resumed as one of %s, with the random states "
                "of a new start%s. From here on the losses are those of a job of %s",
                *(version, was, now, " on new replicas" * only_replicas_differ(was, now), now),
            )
        return outcome, target.state

    def restore(self, recovery: Recovery) -> RecoveryOutcome | NotRecoverable:
        """Restore the surveyed version, start the session, and protect the restored state again.
        Collective."""
        context, began = self._context, time.perf_counter()
        outcome, state = self.take_up(recovery, f"the memory of job {context.job_id}")
        if isinstance(outcome, NotRecoverable):
            return outcome
        label, written = outcome.label, outcome.plan.written
        for repair in outcome.repaired:
            logger.warning("corrupt memory was repaired from another source: %s", repair)
        self.after_restore(state)
        self.report_resize(written)
        context.events.write(
            "restored",
            source="memory",
            version=label.step,
            incarnation=label.incarnation,
            bytes_from=outcome.stats.bytes_from,
            repaired=[str(r) for r in outcome.repaired],
            secs=time.perf_counter() - began,
        )
        # P3: the slots of the recovered version are not overwritten until a newer one is
        # committed.
        job_dir = context.job_dir
        held = slots_with(job_dir.path, job_dir.secret, local_rank(), label)
        self._session.start(dict.fromkeys(held, label))
        scheme = self._protection.record.scheme
        if not is_still_protected(context, scheme, held.values(), outcome):
            self.protect()
        self.report(f"memory, {label}{f' of {written}' * outcome.plan.other_layout}", began)
        return outcome

    def after_restore(self, state: dict[str, Any]) -> None:
        """Restore the parts of a host state that the engine does not restore itself."""
        part = self._state
        if part.data is not None:
            part.data.restore(state.get("data") or {}, state.get("rng"))
        part.followed.restore(state.get("followed"))
        if WATCH.resuming is not None:
            WATCH.resuming.begins = part.followed.reapply
        part.restored_client = dict(state.get("client") or {})
        self.client_state = ClientStateView(part.restored_client)
        self._rng = state.get("rng")
        self._is_read_by_script = bool((state.get("data") or {}).get(READ_BY_SCRIPT))
        self._session.restored()

    def report_resize(self, was: Degrees) -> None:
        """Call the script's ``on_resize`` if the loaded state was written at another data-parallel
        degree. Collective. Called before the state is protected again, so that the first version of
        the new degree holds what the function changes.

        Args:
            was: the degrees with which the state was written.

        Raises:
            ConfigError: the function raised an error on a rank.
        """
        context, on_resize = self._context, self._session.on_resize
        now = context.topology.degrees
        if was.dp == now.dp:
            return
        failure = None
        if on_resize is not None:
            try:
                on_resize(was, now)
                self._state.followed.recapture()
            except Exception as error:
                failure = error
        # Ranks on which the function succeeded must not wait for the vote on the first version.
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        for rank, reply in enumerate(context.control.gather_bytes(text.encode())):
            if reply:
                raise ConfigError(
                    f"on_resize raised an error on rank {rank}, when the job went from {was} to "
                    f"{now}: {reply.decode()}. The version that was loaded is kept; correct the "
                    "function and start the job again"
                ) from failure

    def keep_rng(self) -> None:
        """Save the current random states, which the program has loaded, for :meth:`restore_rng`."""
        self._rng = capture_rng()

    def restore_rng(self, *, marked: bool = False) -> None:
        """Restore the random states as of the load when training begins, which undoes the
        script's draws since then. Does nothing if these draws made the script's batch.

        Args:
            marked: True if the script has announced the step (``reft.begin_step``) and has not
                yet made its batch.
        """
        if self._rng is not None and (marked or not self._is_read_by_script):
            restore_rng(self._rng)
        self._rng = None

    def protect(self) -> None:
        """Take the restored state as the first version of this incarnation, and wait for its
        commit. After that the old version is no longer needed."""
        request = self._session.submit(required=True)
        # Training must not begin before the commit, which protects the state on new nodes (P3).
        request.done.wait(self._context.config.commit_timeout_secs)
        if not request.committed:
            logger.warning(
                "the restored state of step %d could not be protected again: %s. Training "
                "continues",
                request.label.step,
                self._context.stats.last_error,
            )

    # -- refusals ---------------------------------------------------------------------------------

    def refuse_silent_restart(self, plan: RecoveryPlan | NotRecoverable, beside: str = "") -> None:
        """Raise if a job without a recoverable version is not new but had made progress.
        Collective.

        Args:
            plan: why no version can be recovered.
            beside: text about damaged checkpoints on storage; "" if there are none.

        Raises:
            UnrecoverableError: the job had made progress, or storage holds only damaged
                checkpoints.
        """
        context = self._context
        assert isinstance(plan, NotRecoverable)
        note = noted_commit(self._job_memory.record, context.control, context.job_id)
        if plan.newest_committed is None and not plan.layout_mismatch and not note:
            if beside:
                raise UnrecoverableError(beside)
            if self._job_memory.identity.restarted and context.is_rank_zero:
                logger.warning(
                    "the job starts from the beginning: nothing was committed and no checkpoint is "
                    "on storage%s",
                    history.after_failure(context.job_dir.path),
                )
            return
        where = context.config.persist.dir or "not configured (persist.dir)"
        progress = note or plan.newest_committed or "versions of another layout"
        raise UnrecoverableError(
            f"job {context.job_id} had committed {progress}, but it cannot be recovered and no "
            "checkpoint is on disk (persist directory: "
            f"{where}).\n{plan}\n{beside + chr(10) if beside else ''}{self.to_start_anew()}"
        )

    def refuse_half_written(self, outcome: NotRecoverable) -> NoReturn:
        raise UnrecoverableError(
            f"the memory of job {self._context.job_id} was found to be corrupt after part of the "
            f"state was restored, and no checkpoint is on disk.\n{outcome}\n{self.to_start_anew()}"
        )

    def refuse_to_overwrite(
        self, plan: RecoveryPlan, did: str, to_write: str, *, persistable: bool
    ) -> NoReturn:
        """Raise NotResumedError, because the script trains without having resumed the version in
        memory.

        Args:
            plan: plan of the version that could be restored.
            did: description of what the script did.
            to_write: advice on the lines that resume.
            persistable: True if a checkpoint can be written from memory.
        """
        job = self._context.job_id
        persist = f"'reft persist --job {job} --out DIR' writes a checkpoint to DIR/{job}; "
        raise NotResumedError(
            f"the memory of job {job} holds {plan.label}, but {did}: it would start from "
            f"scratch and overwrite it. The memory is kept. {to_write}; then start the job again. "
            f"{persist if persistable else ''}'reft clean --job {job} --force' removes the memory"
        )

    def to_start_anew(self) -> str:
        job = self._context.job_id
        return (
            f"To start from scratch on purpose, run 'reft clean --job {job} --force' on every "
            "node, or give the job another id."
        )

    # -- reports ----------------------------------------------------------------------------------

    def report(self, source: str, began: float) -> None:
        """Log the source from which the job was resumed.

        Args:
            source: description of the source.
            began: time at which the load began, in seconds of ``time.perf_counter()``.
        """
        secs, step = time.perf_counter() - began, self._context.engine.global_steps
        self.note(history.RESUMED, source=source, step=step, secs=secs, times=marks.times())
        if self._context.is_rank_zero:
            after = history.after_failure(self._context.job_dir.path)
            logger.warning("resumed at step %d from %s in %.2f s%s", step, source, secs, after)

    def made_first_step(self) -> None:
        """Record that the first step of this process has ended, which also ends a recovery."""
        self.note(history.STEPPED)
        job_dir, events = self._context.job_dir.path, self._context.events
        if local_rank() == 0 and events.enabled and (rounds := history.read_history(job_dir)):
            events.write("recovered", **vars(rounds[-1]))

    def note(self, event: str, **facts: Any) -> None:
        if local_rank() == 0:
            history.note(self._context.job_dir.path, event, **facts)
