"""Which job this is (P7): its name, its hold on its memory, and the fingerprint of what it trains.

All collective: every rank comes to the same result or raises the same error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.env import ENV_LAUNCHER_PID, ENV_NODE_DECLARED, ENV_NODE_ID
from reft.errors import ConfigError, FingerprintError, JobInUseError, LayoutError, ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import find_jobs, make_job_directory, newest_record, note_size, record_fingerprint
from reft.memory.joblock import JobLock, holder
from reft.naming import Label, kernel_id, own_name_of_process, siblings
from reft.state.codec import decode, encode
from reft.state.fingerprint import AT_LAUNCH, Fact, Fingerprint, differences, require_same

if TYPE_CHECKING:
    from reft.engine.memory import JobMemory
    from reft.engine.session import Session


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    node: str  # what the launcher calls the node, else the host's name
    # somebody gave the node this name (``--node-id``), and thereby says that it fails by itself
    declared: bool
    host_name: str
    kernel: str  # equal for all processes under one kernel, containers too

    @classmethod
    def here(cls) -> Place:
        host = socket.gethostname()
        given = os.environ.get(ENV_NODE_ID)
        return cls(given or host, bool(given) and os.environ.get(ENV_NODE_DECLARED) != "0", host, kernel_id())


def hosts_of(places: Sequence[Place]) -> tuple[str, ...]:
    """What fails as one (P4), for each place: the declared node, else the host, by the name that its first
    rank gives it. Pure."""
    names: dict[str, str] = {}
    for place in places:
        taken = place.host_name in names.values()
        names.setdefault(place.kernel, f"{place.host_name}-{place.kernel[:8]}" if taken else place.host_name)
    return tuple(place.node if place.declared else names[place.kernel] for place in places)


def declared_on_one_host(places: Sequence[Place]) -> tuple[str, ...]:
    """Declared nodes that share a host with another one: what the tolerance counts is then a claim. Pure."""
    nodes = {place.node: place.kernel for place in places if place.declared}
    kernels = list(nodes.values())
    return tuple(sorted(node for node, kernel in nodes.items() if kernels.count(kernel) > 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def coordinate_of(engine: Any) -> tuple[Coordinate, Degrees]:
    """Read the parallel coordinate of this rank from a DeepSpeed engine; a LayoutError where it splits ranks
    in a way reft does not know (experts, sequences)."""
    import torch.distributed as dist

    grid = getattr(engine, "grid", None)
    if grid is not None:
        at = Coordinate(grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank())
        degrees = Degrees(
            grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()
        )
    else:
        mpu = getattr(engine, "mpu", None)
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        tp_rank, tp_size = 0, 1
        if mpu is not None:
            dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            tp_rank, tp_size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        at, degrees = Coordinate(0, dp_rank, tp_rank), Degrees(1, dp_size, tp_size)
    if degrees.world_size != dist.get_world_size():
        raise LayoutError(
            f"the engine reports {degrees}, which is {degrees.world_size} ranks, but the job has "
            f"{dist.get_world_size()}. reft needs a plain pp x dp x tp grid without expert or "
            f"sequence parallel ranks"
        )
    return at, degrees


_newest: WeakValueDictionary[str, JobMemory] = WeakValueDictionary()  # by its place


def note_memory(memory: JobMemory) -> None:
    """An engine of this process has it, until it is closed."""
    _newest[os.path.realpath(memory.job_dir.path)] = memory


_LOCK_SECS = 10.0  # Trainers that were just killed hold the lock until the kernel has taken their memory down


def name_job(config: ReftConfig, control: ControlGroup) -> ReftConfig:
    """The block with the name of the job in it: the one given, the same on all ranks, else rank 0's own."""
    given = [g.decode() for g in control.gather_bytes((config.job_id or "").encode())]
    own = own_name_of_process() if control.rank == 0 and not given[0] else ""
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
        tell_of_siblings(config.memory_dir, derived)
    return config.model_copy(update={"job_id": names.pop()})


def tell_of_siblings(memory_dir: Path, name: str) -> None:
    """Say how to resume what the same program left under other arguments, where ``name`` has nothing."""
    if (memory_dir / name).exists():
        return
    others = siblings([path.name for path in find_jobs(memory_dir)], name)
    if others:
        logger.warning(
            "there is no memory of job %s, but there is memory of the same program with other arguments: "
            "%s. To continue one of these jobs, give its name: --job-id NAME, or REFT_JOB_ID=NAME under "
            "plain torchrun",
            name,
            ", ".join(others),
        )


def hold_memory(config: ReftConfig, job_id: str, control: ControlGroup) -> JobLock | None:
    """Hold the job's memory on this node against every other start, before anything in it is touched. Returns
    this rank's part, to be closed with the session; None where the launcher holds it for its trainers.
    Raises ConfigError: another engine of this process has it. Raises JobInUseError: another job, or
    another start of this one, has it on some node."""
    path = config.memory_dir / job_id
    place = f"{kernel_id()}:{os.path.realpath(path)}".encode()
    first = control.gather_bytes(place).index(place) == control.rank
    lock: JobLock | None = None

    def lead() -> None:
        nonlocal lock
        other = _newest.get(os.path.realpath(path))
        if other is not None and not other.closed:
            raise ConfigError(
                f"a second engine asks for reft in job {job_id!r}, but a job's memory has room for the state "
                f"of one engine, and another one of this process has it ({path}). Leave the block to one of "
                f'them: write "reft": {{"enabled": false}} into the configuration of the other, or, where '
                f"the first engine is done with, call reft.attach(engine).close() before the second is made"
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
            _all_or_none(attempt, control)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


def _held_by_launcher(path: Path) -> bool:
    launcher = os.environ.get(ENV_LAUNCHER_PID)
    return launcher is not None and str((holder(path) or {}).get("pid")) == launcher


def _all_or_none(attempt: Callable[[], None], control: ControlGroup) -> None:
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
        raise JobInUseError(f"another rank cannot get the job's memory: {failed[0]}")


_BATCH = frozenset({"config", "config.train_batch_size"})
"""To accept one of these changes is to accept another global batch."""


class Identity:
    """The fingerprint of the running job, and what it says to stored state."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        config: ReftConfig,
        control: ControlGroup,
        *,
        restarted: bool,
        why_one_size: str = "",
        is_one_size: bool = False,
    ) -> None:
        self.fingerprint = fingerprint
        self._why_one_size, self._is_one_size = why_one_size, is_one_size
        self._config = config
        self._control = control
        self.restarted = restarted

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
            f"model.{where.replace('.dp0', '')}": shapes for where, shapes, _ in told if ".dp0." in where
        }
        common = control.gather_bytes(Fingerprint(facts).encode() if control.rank == 0 else b"")[0]
        resizing = engine.resizing
        why = "its training loop resumes at its own degree alone" if resizing is None else resizing.why_not
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
        """Refuse stored state of another job, or of this one with other settings, by a FingerprintError that
        says in what it differs; the same on all ranks if ``was`` is."""
        was, now = was.without(but), self.fingerprint.without(but)
        if self.restarted:
            # Nobody is there to answer: the job goes on, and says so.
            for line in differences(was.only(AT_LAUNCH), now.only(AT_LAUNCH)):
                logger.warning("%s, after a restart: %s. The job goes on with %s", of, line, of)
            was, now = was.without(AT_LAUNCH), now.without(AT_LAUNCH)
        require_same(was, now, of=of, accepted=self._config.accept_changes)

    def check_memory(self, job_dir: Path, label: Label, *, reads: bool, but: Collection[str] = ()) -> None:
        """Before a version is restored from memory: was it written by this job as it is now? A
        FingerprintError on all ranks where not. ``reads``: this rank is the one of its node that reads the
        record. ``but``: facts that may differ: at another degree, or in another layout, it is no other job as
        long as the global batch is the same. Collective."""
        record = newest_record(job_dir, label.incarnation) if reads else None
        told = self._control.gather_bytes(encode(record and list(record)))
        records = {(int(r[0]), str(r[1])) for data in told if (r := decode(data)) is not None}
        # A node that was away has not recorded what came after.
        newest = max((number for number, _ in records), default=0)
        found = []
        for text in sorted(text for number, text in records if number == newest):
            try:
                found.append(Fingerprint.decode(text))
            except FingerprintError as error:
                logger.warning("a node's record is ignored: %s", error)
        of = f"the memory of job {self._config.job_id}"
        if not found and self._control.rank == 0:
            logger.warning(
                "%s has no record of the settings it was written with; whether they are those of this "
                "job cannot be checked",
                of,
            )
        for fingerprint in found:
            self.require_same(fingerprint, of, but)

    def check_checkpoint(self, was: str | None, of: str, *, own: bool, but: Collection[str] = ()) -> None:
        """Before a checkpoint with the fingerprint ``was`` is loaded from disk: was it written by this job as
        it is now, else a FingerprintError. Another job's is loaded only where the script names its directory:
        that is its user's decision, and the differences are said."""
        if was is None:
            return
        stored = Fingerprint.decode(was)
        if own:
            self.require_same(stored, of, but)
        elif self._control.rank == 0:
            for line in differences(stored, self.fingerprint):
                logger.warning("%s is another job's: %s", of, line)

    def record(self, job_dir: Path, incarnation: int) -> None:
        """Note whose work the versions from ``incarnation`` on are. By one rank per node."""
        try:
            record_fingerprint(job_dir, incarnation, self.fingerprint)
            any_batch = not _BATCH.isdisjoint(self._config.accept_changes)
            fixed = self._is_one_size and not any_batch
            note_size(job_dir, self.fingerprint, self._why_one_size, fixed=fixed, any_batch=any_batch)
        except OSError as error:
            logger.warning("the job's settings cannot be recorded next to its memory: %s", error)


def flat_facts(name: str, value: Any) -> Iterator[tuple[str, Fact]]:
    """Every number, text and truth value in ``value``, by dotted name; other objects are left out."""
    if isinstance(value, Mapping):
        for key in value:
            yield from flat_facts(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat_facts(f"{name}.{index}", item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield name, value
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield name, value.item()


def shapes_of(kind: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What this rank's part of a model consists of, for people, with a digest of every name and shape."""
    digest = hashlib.blake2b(digest_size=6)
    tensors = numbers = 0
    for name, parameter in parameters:
        tensors, numbers = tensors + 1, numbers + parameter.numel()
        digest.update(
            f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode()
        )
    return f"{kind}, {tensors} parameters of {numbers} numbers, names and shapes {digest.hexdigest()}"
