"""A session's memory as a level of the ladder: what is recovered from it is whole and protected again on
every node before the first step, and what recovery reads is not overwritten until then (P3). The same for
every engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from reft.engine import on_import
from reft.engine.identity import local_rank, noted_commit
from reft.engine.on_import import uncollected
from reft.engine.session import Session
from reft.errors import ConfigError, NotResumedError, UnrecoverableError
from reft.grid import Section
from reft.memory.arena import arena_name, slots_with
from reft.memory.header import ArenaHeader, checksum
from reft.memory.stream import HashingCopier, Range, copy_tensor, hashing_copier, ranges_of
from reft.naming import Label
from reft.node import report
from reft.protect.placement import place_group
from reft.recover.plan import Fetch, NotRecoverable, RecoveryPlan
from reft.recover.recover import Blueprint, Completing, Recovery, RecoveryOutcome, Room
from reft.recover.sources import Piece, Resize, Scatter
from reft.recover.stages import Participant, Repair
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state.blob import DecodedBlob, capture_rng, restore_rng
from reft.state.catalogue import SectionImage
from reft.state.fingerprint import BY_REPLICAS
from reft.storage.persisted import STORAGE_KEY

logger = logging.getLogger(__name__)


class Target:
    def __init__(self, session: Session) -> None:
        self._adapter = session.state.adapter
        self._resizing = session.engine.resizing
        self._dp = session.coordinate.dp
        self._scatter: Scatter | None = None
        self._on_host = session.engine.device.type == "cpu"
        self._own = threading.local()
        self.blob: DecodedBlob

    def prepare(self, host: bytes, resize: Resize) -> tuple[Piece, ...]:
        """The host block of this coordinate is there: give the engine's state the shape it had, or has
        at this data-parallel degree."""
        self.blob = DecodedBlob(host)
        if resize.old == resize.new:
            self._images = self._adapter.prepare(self.blob.manifest, self.blob.state["adapter"])
            return ()
        assert self._resizing is not None  # else no such version is found
        self._images, pieces = self._resizing.prepare(self.blob, resize, self._dp)
        self._scatter = Scatter(pieces)
        return pieces

    def write(self, fetch: Fetch, data: torch.Tensor) -> int:
        """Copy a block into the live tensors and return its checksum; into host memory in one pass. Several
        threads may bring blocks at once."""
        image = self._images[0] if fetch.key.section is Section.REPLICATED else self._images[1]
        if self._scatter is not None and fetch.key.section is Section.OWNED:
            for at, nbytes, target in self._scatter.parts(fetch.key.member, fetch.start_bytes, fetch.nbytes):
                image.write_from(target, data[at : at + nbytes], copy_tensor)
            return checksum(data.numpy().data)
        if not self._on_host:
            image.write_from(fetch.start_bytes, data, copy_tensor)
            return checksum(data.numpy().data)
        if not hasattr(self._own, "hasher"):
            self._own.hasher = hashing_copier()
        return write_and_hash(image, fetch.start_bytes, data, self._own.hasher)


def write_and_hash(image: SectionImage, start: int, data: torch.Tensor, hasher: HashingCopier) -> int:
    """Copy ``data`` (1-D uint8, on the host as the image is) to ``image[start : start + len(data)]``. Returns
    the checksum of all of ``data``, what pads the image's tensors included."""
    ranges: list[Range] = []
    base, at = data.data_ptr(), 0

    def note(target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal at
        begin = source.data_ptr() - base
        ranges.append((0, base + at, begin - at))
        ranges.append((target.data_ptr(), base + begin, source.numel()))
        at = begin + source.numel()

    image.write_from(start, data, note)
    ranges.append((0, base + at, data.numel() - at))
    hasher.copy(ranges_of(row for row in ranges if row[2]))
    return hasher.take()


def participant(session: Session) -> Participant:
    job = session.memory.job_dir
    where = job.job_id, job.path, job.secret
    return Participant(session.topology, session.control, *where, session.faults)


def stored_participant(session: Session, version: Path, job_id: str) -> Participant:
    """In the recovery of a version on storage, which another job may have written."""
    return Participant(session.topology, session.control, job_id, version, STORAGE_KEY, stored=True)


def completing(session: Session) -> Completing | None:
    """How the recovered version is completed on a node that holds nothing of it, in a slot without a file;
    None where its arena cannot be laid out before the session starts."""
    config = session.config
    if config.memory_limit_bytes is not None or config.recompute:
        return None
    record, at = session.protection.record, session.coordinate
    slots = (session.memory.job_dir.path / arena_name(local_rank(), n) for n in range(config.arena_count))

    def blueprint(replicated_bytes: int, owned_bytes: tuple[int, ...]) -> Blueprint:
        scheme, members = record.parsed, len(owned_bytes)
        plan = make_shard_plan(
            SectionSizes(replicated_bytes, owned_bytes, (config.host_state_bytes,) * members),
            place_group(session.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities),
            config.block_bytes,
        )
        mine = plan.members[at.dp]
        rooms = {
            b.key: Room(b.block.start_bytes, b.block.nbytes, b.arena_offset)
            for b in mine.blocks
            if b.block.nbytes
        }
        return Blueprint(rooms, mine.data_bytes)

    return Completing(record.scheme, next((p for p in slots if not p.exists()), None), blueprint)


def is_still_protected(session: Session, held: Iterable[ArenaHeader], outcome: RecoveryOutcome) -> bool:
    """Whether the recovered version lies as this incarnation would store it: every rank has the arena of its
    own coordinate, of a job of these degrees, whole, in its own slots, protected by the scheme in force,
    and nothing had to be repaired. It then stays as it is until a newer version is committed; to take it
    again would gain nothing. Collective. ``held``: the arenas in this rank's slots that hold the version."""
    scheme, at = session.protection.record.scheme, session.coordinate
    mine = at, session.topology.degrees, scheme
    here = not outcome.repaired and any((h.coordinate, h.degrees, h.scheme) == mine for h in held)
    return all(values[0] for values in session.control.gather_ints([int(here)]))


class ClientStateView(dict[str, Any]):
    """The client state of a version in memory. A key that was never given to reft is an error that
    says so, not a ``KeyError`` that looks like a broken checkpoint."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"client_state[{key!r}] is not part of the snapshot in memory; it holds {sorted(self)}. A "
            f"snapshot is taken after every step, so reft must be able to ask for this value: pass "
            f"client_state=lambda: {{{key!r}: ...}} to reft.attach or reft.attach_megatron, or derive it "
            f"from the number of steps made"
        )


class MemoryRestorer:
    """Restores one session from memory. ``client_state``: of what was restored last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rng: dict[str, Any] | None = None
        self.client_state = ClientStateView()

    @uncollected()
    def survey(self) -> tuple[Recovery, RecoveryPlan | NotRecoverable]:
        """What is in the memory of all nodes, and what would be restored from it. Collective."""
        session = self._session
        resizable = session.engine.resizing is not None
        recovery = Recovery(participant(session), completing=completing(session), resizable=resizable)
        on_import.mark(on_import.SURVEY)
        plan = recovery.survey()
        on_import.mark(on_import.AGREED)
        return recovery, plan

    def check_identity(self, plan: RecoveryPlan) -> None:
        """Refuse what another job left, or this one with other settings. Collective."""
        session = self._session
        session.memory.identity.check_memory(
            *(session.memory.job_dir.path, plan.label),
            reads=session.is_first_on_node,
            but=BY_REPLICAS if plan.resized else (),
        )

    @uncollected()
    def take_up_stored(self, me: Participant) -> tuple[RecoveryOutcome | NotRecoverable, dict[str, Any]]:
        """Restore a version on storage into the engine; with the host state. Collective."""
        session = self._session
        recovery = Recovery(me, resizable=session.engine.resizing is not None)
        plan = recovery.survey()
        if isinstance(plan, NotRecoverable):
            return plan, {}
        target = Target(session)
        outcome = recovery.restore(target.prepare, target.write)
        if isinstance(outcome, NotRecoverable):
            return outcome, {}
        session.engine.restore(target.blob.state)
        return outcome, target.blob.state

    @uncollected()
    def restore(self, recovery: Recovery) -> RecoveryOutcome | NotRecoverable:
        """Restore what was surveyed, start the session, and protect it. Collective."""
        session = self._session
        began = time.perf_counter()
        target = Target(session)
        outcome = recovery.restore(target.prepare, target.write)
        if isinstance(outcome, NotRecoverable):
            return outcome
        label, state = outcome.label, target.blob.state
        session.engine.restore(state)
        for repair in outcome.repaired:
            logger.warning("corrupt memory was repaired from another source: %s", repair)
        held = self.start_from(label, state, outcome.stats.bytes_from, began, outcome.repaired)
        if outcome.plan.resized and session.is_rank_zero:
            logger.warning(
                "%s was written at DP%d and is resumed at DP%d. The memory of DP%d is kept until the first "
                "version of DP%d is committed. From here on the losses are those of a DP%d job",
                *(label, written := outcome.plan.written_dp, now := session.topology.degrees.dp),
                *(written, now, now),
            )
        if not is_still_protected(session, held.values(), outcome):
            self.protect()
        self.report(f"memory, {outcome.plan.label}", began)
        return outcome

    def start_from(
        self,
        label: Label,
        state: dict[str, Any],
        bytes_from: Mapping[str, int],
        began: float,
        repaired: Iterable[Repair] = (),
    ) -> Mapping[int, ArenaHeader]:
        """A version was restored with this host state: start the session. Returns the arenas in this rank's
        slots that hold it."""
        session = self._session
        self.after_restore(state)
        session.events.write(
            "restored",
            source="memory",
            version=label.step,
            incarnation=label.incarnation,
            bytes_from=dict(bytes_from),
            repaired=[str(r) for r in repaired],
            secs=time.perf_counter() - began,
        )
        # P3: what holds the version just recovered is kept until it is protected anew.
        job_dir = session.memory.job_dir
        held = slots_with(job_dir.path, job_dir.secret, local_rank(), label)
        session.start(dict.fromkeys(held, label))
        return held

    def after_restore(self, state: dict[str, Any]) -> None:
        """The host state was restored, from wherever it came."""
        session = self._session
        if session.state.data is not None:
            session.state.data.restore(state.get("data") or {}, state.get("rng"))
        session.state.restored_client = dict(state.get("client") or {})
        self.client_state = ClientStateView(session.state.restored_client)
        self._rng = state.get("rng")
        session.restored()

    def keep_rng(self) -> None:
        """The program has loaded its random states: what it draws until it trains is undone likewise."""
        self._rng = capture_rng()

    def restore_rng(self) -> None:
        """Training begins: whatever the script has drawn since it loaded is undone."""
        if self._rng is not None:
            restore_rng(self._rng)
        self._rng = None

    def protect(self) -> None:
        """Take the restored state as the first version of this incarnation and wait for its commit:
        from then on the old version is no longer needed, and the new node is protected too."""
        session = self._session
        request = session.submit(must=True)
        request.done.wait(session.config.commit_timeout_secs)
        if not request.committed:
            logger.warning(
                "the restored state of step %d could not be protected again: %s. Training goes on",
                request.label.step,
                session.stats.last_error,
            )

    # -- refusals ---------------------------------------------------------------------------------

    def refuse_silent_restart(self, plan: RecoveryPlan | NotRecoverable, beside: str = "") -> None:
        """Nothing to resume from: right for a new job, an error for one that had made progress. Collective.
        ``beside``: what is wrong with the checkpoints on disk, in lines."""
        session = self._session
        assert isinstance(plan, NotRecoverable)
        note = noted_commit(session.memory.record, session.control, session.job_id)
        if plan.newest_committed is None and not plan.layout_mismatch and not note:
            if beside:
                raise UnrecoverableError(beside)
            if session.memory.identity.restarted and session.is_rank_zero:
                logger.warning(
                    "the job starts from the beginning: nothing was committed and no checkpoint is on "
                    "storage%s",
                    report.after_failure(session.memory.job_dir.path),
                )
            return
        where = session.config.persist.dir or "not configured (persist.dir)"
        progress = note or plan.newest_committed or "versions of another layout"
        raise UnrecoverableError(
            f"job {session.job_id} had committed {progress}, but it cannot be recovered and no checkpoint "
            f"is on disk (persist directory: {where}).\n{plan}\n"
            f"{beside + chr(10) if beside else ''}"
            f"{self.to_start_anew()}"
        )

    def refuse_half_written(self, outcome: NotRecoverable) -> NoReturn:
        raise UnrecoverableError(
            f"the memory of job {self._session.job_id} was found to be corrupt after part of the state was "
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
            f"To start from scratch on purpose, run 'reft clean --job {job} --force' on every node, or give "
            f"the job another id."
        )

    # -- what is said -----------------------------------------------------------------------------

    def report(self, source: str, began: float) -> None:
        """Say from where the job was resumed. ``began``: when, by ``time.perf_counter``."""
        secs, step = time.perf_counter() - began, self._session.engine.global_steps
        self.note(report.RESUMED, source=source, step=step, secs=secs, times=on_import.times())
        if self._session.is_rank_zero:
            after = report.after_failure(self._session.memory.job_dir.path)
            logger.warning("resumed at step %d from %s in %.2f s%s", step, source, secs, after)

    def made_first_step(self) -> None:
        """The first step of this life has been made: the recovery, if it was one, is over."""
        self.note(report.STEPPED)
        job_dir, events = self._session.memory.job_dir.path, self._session.events
        if local_rank() == 0 and events.enabled and (rounds := report.read_history(job_dir)):
            events.write("recovered", **vars(rounds[-1]))

    def note(self, event: str, **facts: Any) -> None:
        if local_rank() == 0:
            report.note(self._session.memory.job_dir.path, event, **facts)
