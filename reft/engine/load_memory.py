"""A session's memory as a level of the ladder: what is recovered from it is whole and protected
again on every node before the first step, and what recovery reads is not overwritten until then
(P3). The same for every engine."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch

from reft.data.position import READ_BY_SCRIPT
from reft.data.watch import WATCH
from reft.device import find_vendor
from reft.engine import marks
from reft.engine.device_writer import DeviceWriter
from reft.engine.fingerprint import BY_LAYOUT, BY_REPLICAS
from reft.engine.identity import local_rank, noted_commit
from reft.engine.marks import uncollected
from reft.engine.session import Session
from reft.errors import ConfigError, NotResumedError, UnrecoverableError
from reft.grid import Coordinate, Degrees, Section, only_replicas_differ
from reft.memory.arena import arena_name, slots_with
from reft.memory.header import ArenaHeader
from reft.memory.stream import HashingCopier, Range, find_ranges, hashing_copier
from reft.node import history
from reft.protect.placement import place_group
from reft.recover.decide import ImageRange
from reft.recover.inventory import ArenaStore
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.rebuild import ArenaLayout, BlockSlot, StoreConfig
from reft.recover.recover import Participant, Recovery, RecoveryOutcome
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state.blob import DecodedBlob, capture_rng, restore_rng
from reft.state.catalogue import SectionImage
from reft.storage.persisted import STORAGE_KEY

logger = logging.getLogger(__name__)


class Target:
    """The engine, while a version in arenas is written into it. ``state``: the host state, as this
    rank has it now."""

    def __init__(self, session: Session, version: str) -> None:
        self._session = session
        self._version = version
        device = session.engine.device
        vendor = find_vendor(device)
        self._device_writer = None if vendor is None else DeviceWriter(device, vendor)
        self._own = threading.local()
        self._parts: Callable[[Fetch, torch.Tensor], Iterable[Pair]]
        self.state: dict[str, Any]

    def prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> Sequence[ImageRange]:
        """The host states are there: give the engine's state the shape it had, or has in this
        layout."""
        ranges = self._prepare(hosts, was)
        if self._device_writer is not None:
            self._device_writer.begin()
        return ranges

    def close(self) -> None:
        """Release what :meth:`write` has used."""
        if self._device_writer is not None:
            self._device_writer.close()

    def _prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> Sequence[ImageRange]:
        session, engine = self._session, self._session.engine
        if was == session.topology.degrees:
            blob = DecodedBlob(hosts[session.coordinate])
            self.state = blob.state
            images = engine.adapter.prepare(blob.manifest, self.state["adapter"])
            self._parts = lambda fetch, data: _split_parts(images, fetch, data)
            return ()
        from reft.relayout.restore import ArenaSource, Relayout

        source = ArenaSource(hosts, was, self._version)
        assert engine.resizing is not None  # else no version of another layout was surveyed
        relayout = Relayout(session.control, session.topology, engine.resizing, source)
        self.state = relayout.prepare()
        self._parts = source.parts
        return source.pieces

    def write(self, fetch: Fetch, data: torch.Tensor) -> int:
        """Copy a block into the live tensors and return its checksum, in one pass over it. Several
        threads may bring blocks at once."""
        parts = self._parts(fetch, data)
        if self._device_writer is not None:
            return self._device_writer.write(parts, data)
        if not hasattr(self._own, "hasher"):
            self._own.hasher = hashing_copier()
        return write_and_hash(parts, data, self._own.hasher)


# live bytes, and what goes there: 1-D uint8 of equal length
Pair = tuple[torch.Tensor, torch.Tensor]


def _split_parts(
    images: tuple[SectionImage, SectionImage], fetch: Fetch, data: torch.Tensor
) -> list[Pair]:
    image = images[0] if fetch.key.section is Section.REPLICATED else images[1]
    parts: list[Pair] = []
    image.write_from(fetch.start_bytes, data, lambda *pair: parts.append(pair))
    return parts


def write_and_hash(parts: Iterable[Pair], data: torch.Tensor, hasher: HashingCopier) -> int:
    """Copy parts of ``data`` (1-D uint8, on the host as their targets are), which are in its order.
    Returns the checksum of all of ``data``, what lies between them included."""
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


def participant(session: Session) -> Participant:
    job, node = session.memory.job_dir, session.topology.nodes[session.control.rank]
    place = ArenaStore(job.path, node, job.secret)
    return Participant(session.topology, session.control, job.job_id, place, session.faults)


def stored_participant(session: Session, version: Path, job_id: str) -> Participant:
    """In the recovery of a version on storage, which another job may have written. All nodes see
    it, and each reads a part: own arenas those that need them most; those of another layout are
    dealt out."""
    topology = session.topology
    node, nodes = topology.nodes[session.control.rank], sorted(set(topology.nodes))
    homes = {str(c): n for c, n in zip(topology.coordinates, topology.nodes, strict=True)}

    def is_read_here(path: Path) -> bool:
        return homes.get(path.stem, nodes[zlib.crc32(path.stem.encode()) % len(nodes)]) == node

    place = ArenaStore(version, node, STORAGE_KEY, is_read_here)
    return Participant(topology, session.control, job_id, place)


def completing(session: Session) -> StoreConfig | None:
    """How the recovered version is completed on a node that holds nothing of it, in a slot without
    a file; None where its arena cannot be laid out before the session starts."""
    config = session.config
    if config.memory_limit_bytes is not None or config.recompute:
        return None
    record, at = session.protection.record, session.coordinate
    slots = (
        session.memory.job_dir.path / arena_name(local_rank(), n) for n in range(config.arena_count)
    )

    def blueprint(replicated_bytes: int, owned_bytes: tuple[int, ...]) -> ArenaLayout:
        scheme, members = record.parsed, len(owned_bytes)
        plan = make_shard_plan(
            SectionSizes(replicated_bytes, owned_bytes, (config.host_state_bytes,) * members),
            place_group(session.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities),
            config.block_bytes,
        )
        mine = plan.members[at.dp]
        rooms = {
            b.key: BlockSlot(b.block.start_bytes, b.block.nbytes, b.arena_offset)
            for b in mine.blocks
            if b.block.nbytes
        }
        return ArenaLayout(rooms, mine.data_bytes)

    return StoreConfig(record.scheme, next((p for p in slots if not p.exists()), None), blueprint)


def is_still_protected(
    session: Session, held: Iterable[ArenaHeader], outcome: RecoveryOutcome
) -> bool:
    """Whether the recovered version lies as this incarnation would store it: every rank has the
    arena of its own coordinate, of a job of these degrees, whole, in its own slots, protected by
    the scheme in force, and nothing had to be repaired. It then stays as it is until a newer
    version is committed; to take it again would gain nothing. Collective. ``held``: the arenas in
    this rank's slots that hold the version."""
    scheme, at = session.protection.record.scheme, session.coordinate
    mine = at, session.topology.degrees, scheme
    here = not outcome.repaired and any((h.coordinate, h.degrees, h.scheme) == mine for h in held)
    return all(values[0] for values in session.control.gather_ints([int(here)]))


def may_differ(was: Degrees, now: Degrees) -> tuple[str, ...]:
    """Facts of the fingerprint that may be other ones where a version of another layout is taken
    up."""
    if was == now:
        return ()
    return BY_REPLICAS if only_replicas_differ(was, now) else BY_LAYOUT


class ClientStateView(dict[str, Any]):
    """The client state of a version in memory. A key that was never given to reft is an error that
    says so, not a ``KeyError`` that looks like a broken checkpoint."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"client_state[{key!r}] is not part of the snapshot in memory; it holds "
            f"{sorted(self)}. A "
            f"snapshot is taken after every step, so reft must be able to ask for this value: pass "
            f"client_state=lambda: {{{key!r}: ...}} to reft.attach or reft.attach_megatron, or "
            "derive it "
            f"from the number of steps made"
        )


class MemoryRestorer:
    """Restores one session from memory. ``client_state``: of what was restored last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rng: dict[str, Any] | None = None
        # whether the script draws from these states before it trains
        self._is_read_by_script = False
        self.client_state = ClientStateView()

    @uncollected()
    def survey(
        self, me: Participant | None = None, *, any_layout: bool = True
    ) -> tuple[Recovery, RecoveryPlan | NotRecoverable]:
        """What is in the memory of all nodes, or where ``me`` says, and what would be restored from
        it. ``any_layout``: from whichever layout, if the engine can. Collective."""
        session = self._session
        any_layout = any_layout and session.engine.resizing is not None
        how = completing(session) if me is None else None
        recovery = Recovery(me or participant(session), completing=how, any_layout=any_layout)
        marks.mark(marks.SURVEY)
        plan = recovery.survey()
        marks.mark(marks.AGREED)
        return recovery, plan

    def check_identity(self, plan: RecoveryPlan) -> None:
        """Refuse what another job left, or this one with other settings. Collective."""
        session = self._session
        session.memory.identity.check_memory(
            *(session.memory.job_dir.path, plan.label),
            reads=session.is_first_on_node,
            but=may_differ(plan.written, plan.degrees),
        )

    @uncollected()
    def take_up(
        self, recovery: Recovery, version: str
    ) -> tuple[RecoveryOutcome | NotRecoverable, dict[str, Any]]:
        """Restore what was surveyed into the engine; with the host state. Collective."""
        session = self._session
        target = Target(session, version)
        with closing(target):
            outcome = recovery.restore(target.prepare, target.write)
        if isinstance(outcome, NotRecoverable):
            return outcome, {}
        session.engine.restore(target.state)
        was, now = outcome.plan.written, outcome.plan.degrees
        if was != now and session.is_rank_zero:
            logger.warning(
                "%s was written by a job of %s and is resumed as one of %s, with the random "
                "states of a new "
                "start%s. From here on the losses are those of a job of %s",
                *(version, was, now, " on new replicas" * only_replicas_differ(was, now), now),
            )
        return outcome, target.state

    def restore(self, recovery: Recovery) -> RecoveryOutcome | NotRecoverable:
        """Restore what was surveyed, start the session, and protect it. Collective."""
        session, began = self._session, time.perf_counter()
        outcome, state = self.take_up(recovery, f"the memory of job {session.job_id}")
        if isinstance(outcome, NotRecoverable):
            return outcome
        label, written = outcome.label, outcome.plan.written
        for repair in outcome.repaired:
            logger.warning("corrupt memory was repaired from another source: %s", repair)
        self.after_restore(state)
        session.events.write(
            "restored",
            source="memory",
            version=label.step,
            incarnation=label.incarnation,
            bytes_from=outcome.stats.bytes_from,
            repaired=[str(r) for r in outcome.repaired],
            secs=time.perf_counter() - began,
        )
        # P3: what holds the version just recovered is kept until it is protected anew.
        job_dir = session.memory.job_dir
        held = slots_with(job_dir.path, job_dir.secret, local_rank(), label)
        session.start(dict.fromkeys(held, label))
        if not is_still_protected(session, held.values(), outcome):
            self.protect()
        self.report(f"memory, {label}{f' of {written}' * outcome.plan.other_layout}", began)
        return outcome

    def after_restore(self, state: dict[str, Any]) -> None:
        """The host state was restored, from wherever it came."""
        session = self._session
        if session.state.data is not None:
            session.state.data.restore(state.get("data") or {}, state.get("rng"))
        session.state.followed.restore(state.get("followed"))
        if WATCH.resuming is not None:
            WATCH.resuming.begins = session.state.followed.reapply
        session.state.restored_client = dict(state.get("client") or {})
        self.client_state = ClientStateView(session.state.restored_client)
        self._rng = state.get("rng")
        self._is_read_by_script = bool((state.get("data") or {}).get(READ_BY_SCRIPT))
        session.restored()

    def keep_rng(self) -> None:
        """The program has loaded its random states: what it draws until it trains is undone
        likewise."""
        self._rng = capture_rng()

    def restore_rng(self, *, marked: bool = False) -> None:
        """Training begins: whatever the script has drawn since it loaded is undone. ``marked``: the
        script says that a step begins, and makes its batch after that."""
        if self._rng is not None and (marked or not self._is_read_by_script):
            restore_rng(self._rng)
        self._rng = None

    def protect(self) -> None:
        """Take the restored state as the first version of this incarnation and wait for its commit:
        from then on the old version is no longer needed, and the new node is protected too."""
        session = self._session
        request = session.submit(required=True)
        request.done.wait(session.config.commit_timeout_secs)
        if not request.committed:
            logger.warning(
                "the restored state of step %d could not be protected again: %s. Training goes on",
                request.label.step,
                session.stats.last_error,
            )

    # -- refusals ---------------------------------------------------------------------------------

    def refuse_silent_restart(self, plan: RecoveryPlan | NotRecoverable, beside: str = "") -> None:
        """Nothing to resume from: right for a new job, an error for one that had made progress.
        Collective. ``beside``: what is wrong with the checkpoints on disk, in lines."""
        session = self._session
        assert isinstance(plan, NotRecoverable)
        note = noted_commit(session.memory.record, session.control, session.job_id)
        if plan.newest_committed is None and not plan.layout_mismatch and not note:
            if beside:
                raise UnrecoverableError(beside)
            if session.memory.identity.restarted and session.is_rank_zero:
                logger.warning(
                    "the job starts from the beginning: nothing was committed and no checkpoint "
                    "is on "
                    "storage%s",
                    history.after_failure(session.memory.job_dir.path),
                )
            return
        where = session.config.persist.dir or "not configured (persist.dir)"
        progress = note or plan.newest_committed or "versions of another layout"
        raise UnrecoverableError(
            f"job {session.job_id} had committed {progress}, but it cannot be recovered and no "
            "checkpoint "
            f"is on disk (persist directory: {where}).\n{plan}\n"
            f"{beside + chr(10) if beside else ''}"
            f"{self.to_start_anew()}"
        )

    def refuse_half_written(self, outcome: NotRecoverable) -> NoReturn:
        raise UnrecoverableError(
            f"the memory of job {self._session.job_id} was found to be corrupt after part of the "
            "state was "
            f"restored, and no checkpoint is on disk.\n{outcome}\n{self.to_start_anew()}"
        )

    def refuse_to_overwrite(
        self, plan: RecoveryPlan, did: str, to_write: str, *, persistable: bool
    ) -> NoReturn:
        """The script trains, and has not resumed what is there. ``to_write``: lines that resume.
        ``persistable``: whether a checkpoint can be written from memory."""
        job = self._session.job_id
        persist = f"'reft persist --job {job} --out DIR' writes a checkpoint to DIR/{job}; "
        raise NotResumedError(
            f"the memory of job {job} holds {plan.label}, but {did}: it would start from "
            f"scratch and overwrite it. The memory is kept. {to_write}; then start the job again. "
            f"{persist if persistable else ''}'reft clean --job {job} --force' removes the memory"
        )

    def to_start_anew(self) -> str:
        job = self._session.job_id
        return (
            f"To start from scratch on purpose, run 'reft clean --job {job} --force' on every "
            "node, or give "
            f"the job another id."
        )

    # -- what is said -----------------------------------------------------------------------------

    def report(self, source: str, began: float) -> None:
        """Say from where the job was resumed. ``began``: when, by ``time.perf_counter``."""
        secs, step = time.perf_counter() - began, self._session.engine.global_steps
        self.note(history.RESUMED, source=source, step=step, secs=secs, times=marks.times())
        if self._session.is_rank_zero:
            after = history.after_failure(self._session.memory.job_dir.path)
            logger.warning("resumed at step %d from %s in %.2f s%s", step, source, secs, after)

    def made_first_step(self) -> None:
        """The first step of this life has been made: the recovery, if it was one, is over."""
        self.note(history.STEPPED)
        job_dir, events = self._session.memory.job_dir.path, self._session.events
        if local_rank() == 0 and events.enabled and (rounds := history.read_history(job_dir)):
            events.write("recovered", **vars(rounds[-1]))

    def note(self, event: str, **facts: Any) -> None:
        if local_rank() == 0:
            history.note(self._session.memory.job_dir.path, event, **facts)
