"""Which job this is, and what it has on a node (P7): its name, the fingerprint of what it trains,
its directory, held while the job runs, and the number of this start.

Collective, where nothing else is said: every rank comes to the same result or raises the same
error.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueStore, StoreError
from reft.engine.fingerprint import AT_LAUNCH, Fact, Fingerprint, differences, require_same
from reft.env import (
    ENV_INCARNATION,
    ENV_LAUNCHER_PID,
    ENV_MEMORY_DIR,
    ENV_NODE_DECLARED,
    ENV_NODE_ID,
    ENV_SECRET,
    ENV_STORE,
)
from reft.errors import (
    AuthenticationError,
    ConfigError,
    FencedError,
    FingerprintError,
    JobInUseError,
    ReftError,
    TransferError,
)
from reft.grid import Coordinate, Degrees, Topology, VersionId
from reft.memory.files import JobLock, holder
from reft.memory.fingerprint_record import newest_record, record_fingerprint
from reft.memory.job_secret import (
    SECRET_BYTES,
    SECRET_FILE,
    read_secret,
    user_secret,
)
from reft.memory.jobdir import JobDir, find_jobs, make_job_directory
from reft.memory.scale_request import note_size
from reft.naming import committed_key, find_process_name, kernel_id
from reft.snapshot.stats import PeerErrors
from reft.state.codec import decode, encode
from reft.storage import fence
from reft.storage.persisted import job_directory, newest_incarnation

if TYPE_CHECKING:
    from reft.engine.session import Session


logger = logging.getLogger(__name__)

# -- what makes a job the one that it is: facts that must be equal before its state is taken up
# again; pure


# -- where this process is, what the job is called, and who holds its memory -----------------------


@dataclass(frozen=True)
class NodeIdentity:
    node: str  # what the launcher calls the node, else the host's name
    # somebody gave the node this name (``--node-id``), and thereby says that it fails by itself
    declared: bool
    host_name: str
    kernel: str  # equal for all processes under one kernel, containers too

    @classmethod
    def here(cls) -> NodeIdentity:
        host = socket.gethostname()
        given = os.environ.get(ENV_NODE_ID)
        return cls(
            given or host,
            bool(given) and os.environ.get(ENV_NODE_DECLARED) != "0",
            host,
            kernel_id(),
        )


def read_hosts(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """What fails as one (P4), for each place: the declared node, else the host, by the name that
    its first rank gives it. Pure."""
    names: dict[str, str] = {}
    for place in places:
        taken = place.host_name in names.values()
        names.setdefault(
            place.kernel, f"{place.host_name}-{place.kernel[:8]}" if taken else place.host_name
        )
    return tuple(place.node if place.declared else names[place.kernel] for place in places)


def declared_on_one_host(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """Declared nodes that share a host with another one: what the tolerance counts is then a claim.
    Pure."""
    nodes = {place.node: place.kernel for place in places if place.declared}
    kernels = list(nodes.values())
    return tuple(sorted(node for node, kernel in nodes.items() if kernels.count(kernel) > 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


# by engines of this process; by its place
held: WeakValueDictionary[str, JobMemory] = WeakValueDictionary()
# Trainers that were just killed hold the lock until the kernel has taken their memory down
_LOCK_SECS = 10.0


def name_job(config: ReftConfig, control: ControlGroup) -> ReftConfig:
    """The block with the name of the job in it: the one given, the same on all ranks, else rank 0's
    own."""
    given = [g.decode() for g in control.gather_bytes((config.job_id or "").encode())]
    own = find_process_name() if control.rank == 0 and not given[0] else ""
    derived = control.gather_bytes(own.encode())[0].decode()
    names = {name or derived for name in given}
    if len(names) > 1 or "" in names:
        found = ", ".join(sorted(name or "none" for name in names))
        raise ConfigError(
            f"the ranks of this job give it different names: {found}. Give all nodes the same "
            f'--job-id NAME, or write "job_id" into the reft block'
        )
    if derived and control.rank == 0:
        logger.info("the job's name is %s, made from its user, directory and command line", derived)
        log_sibling_jobs(config.memory_dir, derived)
    return config.model_copy(update={"job_id": names.pop()})


def log_sibling_jobs(memory_dir: Path, name: str) -> None:
    """Say how to resume what the same program left under other arguments, where ``name`` has
    nothing."""
    program, others = name.rpartition("-")[0], [path.name for path in find_jobs(memory_dir)]
    if name not in others and (others := [n for n in others if n.rpartition("-")[0] == program]):
        logger.warning(
            "there is no memory of job %s, but there is memory of the same program with other "
            "arguments: "
            "%s. To continue one of these jobs, give its name: --job-id NAME, or REFT_JOB_ID=NAME "
            "under "
            "plain torchrun",
            *(name, ", ".join(others)),
        )


def hold_memory(config: ReftConfig, job_id: str, control: ControlGroup) -> JobLock | None:
    """Hold the job's memory on this node against every other start, before anything in it is
    touched. Returns this rank's part, to be closed with the session; None where the launcher holds
    it for its trainers. Raises ConfigError: another engine of this process has it. Raises
    JobInUseError: another job, or another start of this one, has it on some node."""
    path = config.memory_dir / job_id
    place = f"{kernel_id()}:{os.path.realpath(path)}".encode()
    first = control.gather_bytes(place).index(place) == control.rank
    lock: JobLock | None = None

    def lead() -> None:
        nonlocal lock
        other = held.get(os.path.realpath(path))
        if other is not None and not other.closed:
            raise ConfigError(
                f"a second engine asks for reft in job {job_id!r}, but a job's memory has room "
                "for the state "
                f"of one engine, and another one of this process has it ({path}). Leave the block "
                "to one of "
                f'them: write "reft": {{"enabled": false}} into the configuration of the other, '
                "or, where "
                "the first engine is done with, call reft.attach(engine).close() before the "
                "second is made"
            )
        make_job_directory(config.memory_dir, job_id)
        if first and not _held_by_launcher(path):
            lock = JobLock(path, job_id, wait_secs=_LOCK_SECS)
            lock.share()

    def join() -> None:
        nonlocal lock
        if not first and not _held_by_launcher(path):
            lock = JobLock.join(path, job_id)

    try:
        for attempt in (lead, join):
            all_or_none(
                attempt,
                control,
                lambda why: JobInUseError(f"another rank cannot get the job's memory: {why}"),
            )
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


def _held_by_launcher(path: Path) -> bool:
    launcher = os.environ.get(ENV_LAUNCHER_PID)
    return launcher is not None and str((holder(path) or {}).get("pid")) == launcher


def all_or_none(
    attempt: Callable[[], None], control: ControlGroup, refused: Callable[[str], Exception]
) -> None:
    """Run ``attempt`` on all ranks; where it fails on one, raise everywhere."""
    own: Exception | None = None
    try:
        attempt()
    except (ReftError, OSError) as error:
        own = error
    told = control.gather_bytes(b"" if own is None else str(own).encode())
    if own is not None:
        raise own
    if failed := [t.decode() for t in told if t]:
        raise refused(failed[0])


_ANOTHER_BATCH = frozenset({"config", "config.train_batch_size"})
"""To accept one of these changes is to accept another global batch."""


@dataclass
class Identity:
    """The fingerprint of the running job, and what it says to stored state."""

    fingerprint: Fingerprint
    config: ReftConfig
    control: ControlGroup
    restarted: bool
    why_one_size: str = ""
    is_one_size: bool = False

    @classmethod
    def of_session(cls, session: Session) -> Identity:
        """Of what trains: rank 0's settings, everybody's shapes. Collective."""
        engine, control, degrees = session.engine, session.control, session.topology.degrees
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        mine = encode([str(session.coordinate), engine.shapes(), restarts])
        told = [decode(data) for data in control.gather_bytes(mine)]
        layout = {"layout.pp": degrees.pp, "layout.dp": degrees.dp, "layout.tp": degrees.tp}
        facts: dict[str, Fact] = {**engine.settings(), **layout}
        facts |= {
            f"model.{where.replace('.dp0', '')}": shapes
            for where, shapes, _ in told
            if ".dp0." in where
        }
        common = control.gather_bytes(Fingerprint(facts).encode() if control.rank == 0 else b"")[0]
        resizing = engine.resizing
        why = (
            "its training loop resumes at its own degree alone"
            if resizing is None
            else resizing.why_not
        )
        return cls(
            Fingerprint.decode(common),
            session.config,
            control,
            restarted=any(restarts for _, _, restarts in told),
            why_one_size=why,
            # Data that belong to a degree do not keep a job from another one.
            is_one_size=resizing is None or why not in ("", resizing.data_is_bound),
        )

    def require_same(self, was: Fingerprint, of: str, but: Collection[str] = ()) -> None:
        """Refuse stored state of another job, or of this one with other settings, by a
        FingerprintError that says in what it differs; the same on all ranks if ``was`` is."""
        was, now = was.without(but), self.fingerprint.without(but)
        if self.restarted:
            # Nobody is there to answer: the job goes on, and says so.
            for line in differences(was.only(AT_LAUNCH), now.only(AT_LAUNCH)):
                logger.warning("%s, after a restart: %s. The job goes on with %s", of, line, of)
            was, now = was.without(AT_LAUNCH), now.without(AT_LAUNCH)
        require_same(was, now, of=of, accepted=self.config.accept_changes)

    def check_memory(
        self, job_dir: Path, label: VersionId, *, reads: bool, but: Collection[str] = ()
    ) -> None:
        """Before a version is restored from memory: was it written by this job as it is now? A
        FingerprintError on all ranks where not. ``reads``: this rank is the one of its node that
        reads the record. ``but``: facts that may differ: at another degree, or in another layout,
        it is no other job as long as the global batch is the same. Collective."""
        record = newest_record(job_dir, label.incarnation) if reads else None
        told = self.control.gather_bytes(encode(record and list(record)))
        records = {(int(r[0]), str(r[1])) for data in told if (r := decode(data)) is not None}
        # A node that was away has not recorded what came after.
        newest = max((number for number, _ in records), default=0)
        found = []
        for text in sorted(text for number, text in records if number == newest):
            try:
                found.append(Fingerprint.decode(text))
            except FingerprintError as error:
                logger.warning("a node's record is ignored: %s", error)
        of = f"the memory of job {self.config.job_id}"
        if not found and self.control.rank == 0:
            logger.warning(
                "%s has no record of the settings it was written with; whether they are those of "
                "this "
                "job cannot be checked",
                of,
            )
        for fingerprint in found:
            self.require_same(fingerprint, of, but)

    def check_checkpoint(
        self, was: str | None, of: str, *, own: bool, but: Collection[str] = ()
    ) -> None:
        """Before a checkpoint with the fingerprint ``was`` is loaded from disk: was it written by
        this job as it is now, else a FingerprintError. Another job's is loaded only where the
        script names its
        directory: that is its user's decision, and the differences are said."""
        if was is None:
            return
        stored = Fingerprint.decode(was)
        if own:
            self.require_same(stored, of, but)
        elif self.control.rank == 0:
            for line in differences(stored, self.fingerprint):
                logger.warning("%s is another job's: %s", of, line)

    def record(self, job_dir: Path, incarnation: int) -> None:
        """Note whose work the versions from ``incarnation`` on are. By one rank per node."""
        try:
            record_fingerprint(job_dir, incarnation, self.fingerprint.encode().decode())
            any_batch = not _ANOTHER_BATCH.isdisjoint(self.config.accept_changes)
            fixed = self.is_one_size and not any_batch
            note_size(
                job_dir, self.fingerprint.facts, self.why_one_size, fixed=fixed, any_batch=any_batch
            )
        except OSError as error:
            logger.warning("the job's settings cannot be recorded next to its memory: %s", error)


_ANSWER_SECS = 10.0
_SILENT_SECS = 30.0  # a store that did not answer is left alone for so long


class JobRecord:
    """Facts kept in the rendezvous store, which outlives every worker node. Best effort: without a
    store (plain ``torchrun``) the arenas alone tell. Used by global rank 0 only; its methods wait
    for the store, but for :meth:`committed` and :meth:`close`."""

    def __init__(self, store: KeyValueStore | None, job_id: str) -> None:
        self._committed_key = committed_key(job_id)
        self._store = store
        self._lost_until = 0.0
        self._noted: bytes | None = None
        self._newest: deque[VersionId] = deque(maxlen=1)
        self._wake, self._closing = threading.Semaphore(0), False
        self._thread: threading.Thread | None = None

    @classmethod
    def at(cls, endpoint: str | None, job_id: str, answer_secs: float = _ANSWER_SECS) -> JobRecord:
        """The record in the store at ``host:port``, if there is one and it answers within
        ``answer_secs``, as it has to whenever it is asked."""
        store = None
        try:
            if endpoint:
                store = KeyValueStore(endpoint, user_secret(), timeout_secs=answer_secs)
                store.check([])
        except (StoreError, AuthenticationError, ValueError) as error:
            logger.warning("cannot reach the rendezvous store at %s: %s", endpoint, error)
            store = None
        return cls(store, job_id)

    def note_commit(self, label: VersionId) -> None:
        """Remember that ``label`` was committed, unless a newer start of the job has committed
        since."""
        if self._store is None or time.monotonic() < self._lost_until:
            return
        note, done = f"{label.incarnation}:{label.step}".encode(), False
        try:
            while not done:
                done, held = self._store.compare_set(self._committed_key, self._noted, note)
                self._noted = note if done else held
                if not done and held is not None and _label(held).incarnation > label.incarnation:
                    logger.error(
                        "the commit of %s is not recorded: %s was committed by a newer start of "
                        "the job. "
                        "This start was cut off and replaced",
                        *(label, _label(held)),
                    )
                    self._store = None
                    return
            self._lost_until = 0.0
        except (StoreError, AuthenticationError) as error:
            if not self._lost_until:
                logger.warning(
                    "commits are not recorded until the rendezvous store answers again: %s", error
                )
            self._lost_until = time.monotonic() + _SILENT_SECS

    def newest_commit(self) -> VersionId | None:
        """The newest commit noted, or None if there was none (or no store); a TransferError where
        there is one, but it does not say."""
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

    def committed(self, label: VersionId, peer_errors: PeerErrors) -> None:
        """A version was committed by all ranks. It is noted by a thread of its own: no vote waits
        for the store. Of commits that come while the store is asked, the newest is noted."""
        self._newest.append(label)
        self._wake.release()
        if self._thread is None:
            args = (peer_errors,)
            self._thread = threading.Thread(
                target=self._run, args=args, name="reft-record", daemon=True
            )
            self._thread.start()

    def close(self, timeout_secs: float = 2.0) -> None:
        """Have the last commit noted, within this time."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                logger.warning(
                    "the rendezvous store has not answered: it may not know of the last commit"
                )

    def _run(self, peer_errors: PeerErrors) -> None:
        closing = False
        while not closing:
            self._wake.acquire()
            closing = self._closing
            while self._newest:
                peer_errors.run_guarded(
                    "a commit cannot be recorded in the rendezvous store",
                    partial(self.note_commit, self._newest.pop()),
                )


def _label(note: bytes) -> VersionId:
    incarnation, step = note.decode().split(":")
    return VersionId(int(incarnation), int(step))


def noted_commit(record: JobRecord, control: ControlGroup, job_id: str) -> str:
    """The newest commit that the rendezvous store knows of, in words; empty if there was none; a
    TransferError on all ranks if it does not say. Collective: asked where neither memory nor disk
    holds a version."""
    note = error = ""
    if control.rank == 0:
        try:
            note = str(record.newest_commit() or "")
        except TransferError as failed:
            error = str(failed)
    note, error = decode(control.gather_bytes(encode([note, error]))[0])
    if error:
        raise TransferError(
            f"no version of job {job_id} is in memory or on disk, and it is not known whether it "
            "had "
            f"committed any: {error}. Start it again when the store answers; a new job takes "
            "another id"
        )
    return str(note)


def gather_topology(
    control: ControlGroup, coordinate: Coordinate, degrees: Degrees
) -> tuple[Topology, tuple[NodeIdentity, ...]]:
    """Tell all ranks where this one is; the topology, and the place of every global rank.
    Collective."""
    at = (coordinate.pp, coordinate.dp, coordinate.tp)
    mine = encode([list(at), list(astuple(NodeIdentity.here()))])
    facts = [decode(data) for data in control.gather_bytes(mine)]
    places = tuple(NodeIdentity(*place) for _, place in facts)
    topology = Topology(
        degrees=degrees,
        coordinates=tuple(Coordinate(*at) for at, _ in facts),
        nodes=tuple(place.node for place in places),
        hosts=read_hosts(places),
    )
    return topology, places


def open_job_dir(config: ReftConfig, job_id: str, node: str, control: ControlGroup) -> JobDir:
    """Open the job's memory on this node under the secret that all nodes share: the launcher's
    (REFT_SECRET); under plain ``torchrun`` that of a surviving node's memory, or of a new job rank
    0's. Collective."""
    secret = None
    if not os.environ.get(ENV_SECRET):
        path = config.job_memory_dir
        known = read_secret(path) if (path / SECRET_FILE).exists() else b""
        gathered = control.gather_bytes(known)
        fresh = control.gather_bytes(secrets.token_bytes(SECRET_BYTES))[0]
        secret = next((s for s in gathered if s), fresh)
    return JobDir.open_or_create(config.memory_dir, job_id, node=node, secret=secret)


def _require_own_files(path: Path, control: ControlGroup) -> None:
    """Refuse ranks that would write each other's arenas in the job's memory: a ConfigError on
    all."""
    at = path.stat()
    places = control.gather_bytes(f"{kernel_id()} {at.st_dev} {at.st_ino} {local_rank()}".encode())
    for rank, place in enumerate(places):
        if (first := places.index(place)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same memory and the same LOCAL_RANK; expected "
                "a memory "
                f"directory ({ENV_MEMORY_DIR}) for each node of a host, a LOCAL_RANK for each "
                "rank of a node"
            )


def agree_on_incarnation(config: ReftConfig, job_dir: JobDir, control: ControlGroup) -> int:
    """One more than every incarnation that any node or the disk has seen (P7): that on which the
    launchers agreed when they started the trainers, unless the disk knows a later one. Older starts
    change nothing on the disk any more. Collective; a FencedError on all ranks, if another start of
    the job has claimed the disk with the same number."""
    job_id, disk = job_dir.job_id, config.persist.dir if control.rank == 0 else None
    seen = max(job_dir.newest_incarnation(), int(os.environ.get(ENV_INCARNATION, "0")) - 1)
    if disk is not None:
        try:
            seen = max(seen, newest_incarnation(job_directory(disk, job_id), job_id))
        except (ReftError, OSError) as error:  # the job can do without
            logger.warning("the incarnations on disk cannot be read: %s", error)
    incarnation = 1 + max(values[0] for values in control.gather_ints([seen]))

    def keep_older_starts_from_writing() -> None:
        if disk is None:
            return
        try:
            directory = job_directory(disk, job_id)
            for made in (disk, directory):
                with suppress(FileExistsError):
                    made.mkdir()
            fence.claim(directory, job_id, incarnation, alone=True)
        except FencedError:
            raise
        except (ReftError, OSError) as error:
            logger.warning(
                "older starts of the job cannot be kept from writing to %s: %s", disk, error
            )

    all_or_none(keep_older_starts_from_writing, control, FencedError)
    return incarnation


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
        held[os.path.realpath(self.job_dir.path)] = self

    def count_on(self, incarnation: int) -> None:
        """The versions to come belong to this incarnation, unless a later one runs already. On all
        ranks."""
        self.incarnation = max(self.incarnation, incarnation)
        self._note()

    def _note(self) -> None:
        if not self._writes:
            return
        try:
            self.job_dir.note_incarnation(self.incarnation)
        except OSError as error:
            logger.warning(
                "the number of this start cannot be recorded in %s: %s", self.job_dir.path, error
            )

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
