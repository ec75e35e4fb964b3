"""What a job has on one node: its directory, held while the job runs, and the number of this start (P7)."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueStore, StoreError
from reft.engine.identity import Identity, Place, hold_memory, hosts_of, local_rank, note_memory
from reft.env import ENV_INCARNATION, ENV_MEMORY_DIR, ENV_SECRET, ENV_STORE
from reft.errors import AuthenticationError, ConfigError, FencedError, ReftError, TransferError
from reft.grid import Coordinate, Degrees, Topology
from reft.memory.jobdir import SECRET_BYTES, SECRET_FILE, JobDir, read_secret, user_secret
from reft.naming import Label, committed_key, kernel_id
from reft.snapshot.complaints import Complaints
from reft.state.codec import decode, encode
from reft.storage import fence
from reft.storage.persisted import job_directory, newest_incarnation

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)

_ANSWER_SECS = 10.0
_SILENT_SECS = 30.0  # a store that did not answer is left alone for so long


class JobRecord:
    """Facts kept in the rendezvous store, which outlives every worker node. Best effort: without a store
    (plain ``torchrun``) the arenas alone tell. Used by global rank 0 only; its methods wait for the store,
    but for :meth:`committed` and :meth:`close`."""

    def __init__(self, store: KeyValueStore | None, job_id: str) -> None:
        self._committed_key = committed_key(job_id)
        self._store = store
        self._lost_until = 0.0
        self._noted: bytes | None = None
        self._newest: deque[Label] = deque(maxlen=1)
        self._wake, self._closing = threading.Semaphore(0), False
        self._thread: threading.Thread | None = None

    @classmethod
    def at(cls, endpoint: str | None, job_id: str, answer_secs: float = _ANSWER_SECS) -> JobRecord:
        """The record in the store at ``host:port``, if there is one and it answers within ``answer_secs``, as
        it has to whenever it is asked."""
        store = None
        try:
            if endpoint:
                store = KeyValueStore(endpoint, user_secret(), timeout_secs=answer_secs)
                store.check([])
        except (StoreError, AuthenticationError, ValueError) as error:
            logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
            store = None
        return cls(store, job_id)

    def note_commit(self, label: Label) -> None:
        """Remember that ``label`` was committed, unless a newer start of the job has committed since."""
        if self._store is None or time.monotonic() < self._lost_until:
            return
        try:
            self._replace_note(self._store, label)
            self._lost_until = 0.0
        except (StoreError, AuthenticationError) as error:
            if not self._lost_until:
                logger.warning("commits are not recorded until the rendezvous store answers again: %s", error)
            self._lost_until = time.monotonic() + _SILENT_SECS

    def _replace_note(self, store: KeyValueStore, label: Label) -> None:
        note = f"{label.incarnation}:{label.step}".encode()
        while True:
            done, held = store.compare_set(self._committed_key, self._noted, note)
            if done:
                self._noted = note
                return
            self._noted = held
            if held is not None and _label(held).incarnation > label.incarnation:
                logger.error(
                    "the commit of %s is not recorded: %s was committed by a newer start of the job. This "
                    "start was cut off and replaced",
                    *(label, _label(held)),
                )
                self._store = None
                return

    def newest_commit(self) -> Label | None:
        """The newest commit noted, or None if there was none (or no store); a TransferError where there is
        one, but it does not say."""
        key = self._committed_key
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return _label(self._store.get(key))
        except Exception as error:  # whatever it is, peers wait for an answer
            raise TransferError(
                "the rendezvous store does not say what the job had committed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def committed(self, label: Label, complaints: Complaints) -> None:
        """A version was committed by all ranks. It is noted by a thread of its own: no vote waits for the
        store. Of commits that come while the store is asked, the newest is noted."""
        self._newest.append(label)
        self._wake.release()
        if self._thread is None:
            args = (complaints,)
            self._thread = threading.Thread(target=self._run, args=args, name="reft-record", daemon=True)
            self._thread.start()

    def close(self, timeout_secs: float = 2.0) -> None:
        """Have the last commit noted, within this time."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                logger.warning("the rendezvous store has not answered: it may not know of the last commit")

    def _run(self, complaints: Complaints) -> None:
        closing = False
        while not closing:
            self._wake.acquire()
            closing = self._closing
            while self._newest:
                complaints.attempt(
                    "a commit cannot be recorded in the rendezvous store",
                    partial(self.note_commit, self._newest.pop()),
                )


def _label(note: bytes) -> Label:
    incarnation, step = note.decode().split(":")
    return Label(int(incarnation), int(step))


def noted_commit(record: JobRecord, control: ControlGroup, job_id: str) -> str:
    """The newest commit that the rendezvous store knows of, in words; empty if there was none; a
    TransferError on all ranks if it does not say. Collective: asked where neither memory nor disk holds a
    version."""
    told: dict[str, str] = {}
    if control.rank == 0:
        try:
            told = {"note": str(record.newest_commit() or "")}
        except TransferError as error:
            told = {"error": str(error)}
    answer = json.loads(control.gather_bytes(json.dumps(told).encode())[0])
    if "error" in answer:
        raise TransferError(
            f"no version of job {job_id} is in memory or on disk, and it is not known whether it had "
            f"committed any: {answer['error']}. Start it again when the store answers; a new job takes "
            f"another id"
        )
    return str(answer["note"])


def gather_topology(
    control: ControlGroup, coordinate: Coordinate, degrees: Degrees
) -> tuple[Topology, tuple[Place, ...]]:
    """Tell all ranks where this one is; the topology, and the place of every global rank. Collective."""
    at = (coordinate.pp, coordinate.dp, coordinate.tp)
    mine = encode([list(at), list(astuple(Place.here()))])
    facts = [decode(data) for data in control.gather_bytes(mine)]
    places = tuple(Place(*place) for _, place in facts)
    topology = Topology(
        degrees=degrees,
        coordinates=tuple(Coordinate(*at) for at, _ in facts),
        nodes=tuple(place.node for place in places),
        hosts=hosts_of(places),
    )
    return topology, places


def open_job_dir(config: ReftConfig, job_id: str, node: str, control: ControlGroup) -> JobDir:
    """Open the job's memory on this node under the secret that all nodes share: the launcher's (REFT_SECRET);
    under plain ``torchrun`` that of a surviving node's memory, or of a new job rank 0's. Collective."""
    secret = None
    if not os.environ.get(ENV_SECRET):
        path = config.job_memory_dir
        known = read_secret(path) if (path / SECRET_FILE).exists() else b""
        gathered = control.gather_bytes(known)
        fresh = control.gather_bytes(secrets.token_bytes(SECRET_BYTES))[0]
        secret = next((s for s in gathered if s), fresh)
    return JobDir.open_or_create(config.memory_dir, job_id, node=node, secret=secret)


def _require_own_files(path: Path, control: ControlGroup) -> None:
    """Refuse ranks that would write each other's arenas in the job's memory: a ConfigError on all."""
    at = path.stat()
    places = control.gather_bytes(f"{kernel_id()} {at.st_dev} {at.st_ino} {local_rank()}".encode())
    for rank, place in enumerate(places):
        if (first := places.index(place)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same memory and the same LOCAL_RANK; expected a memory "
                f"directory ({ENV_MEMORY_DIR}) for each node of a host, a LOCAL_RANK for each rank of a node"
            )


def _newest_on_disk(persist_dir: Path | None, job_id: str) -> int:
    """Never raises: the other ranks wait for this one, and the job can do without."""
    try:
        return newest_incarnation(job_directory(persist_dir, job_id), job_id) if persist_dir else 0
    except (ReftError, OSError) as error:
        logger.warning("the incarnations on disk cannot be read: %s", error)
        return 0


def agree_on_incarnation(config: ReftConfig, job_dir: JobDir, control: ControlGroup) -> int:
    """One more than every incarnation that any node or the disk has seen (P7): that on which the launchers
    agreed when they started the trainers, unless the disk knows a later one. Older starts change nothing on
    the disk any more. Collective; a FencedError on all ranks, if another start of the job has claimed the
    disk with the same number."""
    seen = max(job_dir.newest_incarnation(), int(os.environ.get(ENV_INCARNATION, "0")) - 1)
    if control.rank == 0:
        seen = max(seen, _newest_on_disk(config.persist.dir, job_dir.job_id))
    incarnation = 1 + max(values[0] for values in control.gather_ints([seen]))
    told = b""
    if control.rank == 0 and config.persist.dir is not None:
        told = _claim_disk(config.persist.dir, job_dir.job_id, incarnation).encode()
    refused = control.gather_bytes(told)[0].decode()
    if refused:
        raise FencedError(refused)
    return incarnation


def _claim_disk(persist_dir: Path, job_id: str, incarnation: int) -> str:
    """Keep older starts from writing; why this one must not, or an empty text. Never raises: peers wait."""
    try:
        directory = job_directory(persist_dir, job_id)
        for made in (persist_dir, directory):
            with suppress(FileExistsError):
                made.mkdir()
        fence.claim(directory, job_id, incarnation, alone=True)
    except FencedError as error:
        return str(error)
    except (ReftError, OSError) as error:
        logger.warning("older starts of the job cannot be kept from writing to %s: %s", persist_dir, error)
    return ""


class JobMemory:
    """What the job has on this node, unless another engine of this process, or another job, has it
    (ConfigError, JobInUseError). Collective."""

    def __init__(self, session: Session) -> None:
        config, job_id, control = session.config, session.job_id, session.control
        self.identity = Identity.of_session(session)
        self.closed = False
        self._writes = session.is_first_on_node
        self._lock = hold_memory(config, job_id, control)
        try:
            _require_own_files(config.job_memory_dir, control)
            self.job_dir = open_job_dir(config, job_id, session.node, control)
            store = os.environ.get(ENV_STORE) if session.is_rank_zero else None
            self.record = JobRecord.at(store, job_id)
            """What the rendezvous store knows of the job; for rank 0."""
            self.incarnation = agree_on_incarnation(config, self.job_dir, control)
            """Which start of the job this is; counted on where it goes back to an older version."""
            self._note()
        except BaseException:
            self.close()
            raise
        note_memory(self)

    def count_on(self, incarnation: int) -> None:
        """The versions to come belong to this incarnation, unless a later one runs already. On all ranks."""
        self.incarnation = max(self.incarnation, incarnation)
        self._note()

    def _note(self) -> None:
        if not self._writes:
            return
        try:
            self.job_dir.note_incarnation(self.incarnation)
        except OSError as error:
            logger.warning("the number of this start cannot be recorded in %s: %s", self.job_dir.path, error)

    def record_identity(self) -> None:
        if self._writes:
            self.identity.record(self.job_dir.path, self.incarnation)

    def remake(self) -> None:
        """Somebody removed this node's memory of the job: make it anew, under the same secret."""
        made = self.job_dir
        JobDir.open_or_create(made.path.parent, made.job_id, node=made.node, secret=made.secret)
        self.record_identity()
        self._note()

    def close(self) -> None:
        self.closed = True
        if self._lock is not None:
            self._lock.close()
