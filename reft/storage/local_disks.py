"""Versions on the nodes' own disks, where a node sees only what it has written itself.

Every node writes its arenas as they lie in memory, with the copies and parities that protect them,
and reads its own part after a restart; what its disk lacks comes from its peers, as in a recovery
from memory. So a version survives the loss of as many disks as memory survives nodes.

The nodes cannot meet in a directory. They meet in the rendezvous store, in one record:

1. A node gives its part the final name, and adds itself to the record.
2. The node that completes the record notes, in the same operation, that the version is complete.
   Only then do the nodes name the version in ``latest`` and remove older ones (P3).
3. A node that cannot write its part marks the version as failed, unless it is complete. The others
   then remove their parts.

A load does not read the record: the parts that are found decide which version is restored.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.control.keyvalue import KeyValueStore, RendezvousStore, StoreError
from reft.env import ENV_STORE
from reft.errors import OvertakenError, PersistError
from reft.grid import VersionId
from reft.memory.job_secret import user_secret

logger = logging.getLogger(__name__)

_ANSWER_SECS = 10.0
# A file system may show a file to other hosts a little later
_SEEN_SECS, _POLL_SECS = 1.0, 0.1


class GivenUpElsewhereError(PersistError):
    """Another node has given up writing the version."""


class OvertakenElsewhereError(GivenUpElsewhereError, OvertakenError):
    """Another node's memory no longer holds the version, or other nodes write a newer one: this
    version's checkpoint will never be complete."""


class StoreSilentError(PersistError):
    """The rendezvous store does not answer."""


# --- the start of the job -------------------------------------------------------------------------


def find_local_disks(config: ReftConfig, control: ControlGroup, nodes: Sequence[str]) -> ReftConfig:
    """Find out whether the nodes share the persist directory. Collective.

    Args:
        config: the job's ``reft`` block.
        control: messages between the ranks.
        nodes: node of each rank.

    Returns:
        The block, with ``persist.local`` set.
    """
    blind: set[str] = set()
    if config.persist.dir is not None and len(set(nodes)) > 1:
        blind = _find_blind_nodes(config.persist.dir, control, nodes)
    local = blind == set(nodes) - {nodes[0]} and bool(blind)
    if blind and not local and control.rank == 0:
        logger.warning(
            "%s is not the same directory on all nodes: node %s does not see what node %s writes "
            "there, and others do. No version on storage can be complete: let all nodes share it, "
            "or give each node one of its own",
            *(config.persist.dir, ", ".join(sorted(blind)), nodes[0]),
        )
    if config.persist.local == local:
        return config
    persist = config.persist.model_copy(update={"local": local})
    return config.model_copy(update={"persist": persist})


def _find_blind_nodes(directory: Path, control: ControlGroup, nodes: Sequence[str]) -> set[str]:
    """Return the nodes that do not see what rank 0's node writes into a directory. Collective.

    Nodes that have no such directory are not among them, and none is if rank 0 cannot write.
    """
    probe = directory / f".probe-{secrets.token_hex(8)}"
    name = b""
    with suppress(OSError):
        # If the parent is missing, the file system is taken as not mounted.
        directory.mkdir(exist_ok=True)
        if control.rank == 0:
            probe.touch()
            name = probe.name.encode()
    name = control.gather_bytes(name)[0]
    blind = bool(name) and directory.is_dir() and not _appears(directory, name.decode())
    replies = control.gather_ints([blind])
    if control.rank == 0:
        probe.unlink(missing_ok=True)
    return {nodes[rank] for rank, (is_blind,) in enumerate(replies) if is_blind}


def _appears(directory: Path, name: str) -> bool:
    deadline = time.monotonic() + _SEEN_SECS
    while True:
        # A listing asks the server of a network file system; a look-up may be answered by a cache.
        with suppress(OSError):
            if name in os.listdir(directory):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECS)


# --- the record in the store ----------------------------------------------------------------------


@dataclass(frozen=True)
class PartsRecord:
    """The parts of one version that are on the nodes' disks."""

    label: VersionId  # Newest version that a node has begun to write
    ranks: Mapping[str, int] = field(default_factory=dict)  # Ranks in each node's part, by node
    complete: VersionId | None = None  # Newest version of which every part was written
    failed: str = ""  # Why the version ``label`` was given up; "" if it was not
    overtaken: bool = False  # Whether it was given up because memory no longer holds it

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> PartsRecord:
        fields = json.loads(data)
        for name in ("label", "complete"):
            fields[name] = fields[name] and VersionId(**fields[name])
        return cls(**fields)

    def require_open(self, label: VersionId) -> None:
        """Raise if the version ``label`` can no longer become complete.

        Raises:
            GivenUpElsewhereError: another node has given it up.
            OvertakenElsewhereError: memory of another node no longer holds it, or other nodes
                write a newer version.
        """
        if self.complete == label:
            return
        if self.label > label:
            raise OvertakenElsewhereError(f"{label}: overtaken by {self.label}, which others write")
        if self.label == label and self.failed:
            kind = OvertakenElsewhereError if self.overtaken else GivenUpElsewhereError
            raise kind(f"{label}: {self.failed}")


def with_part(
    record: PartsRecord | None, label: VersionId, node: str, ranks: int, world_size: int
) -> PartsRecord:
    """Return the record after a node has written its part of a version.

    Raises:
        GivenUpElsewhereError: the version can no longer become complete.
    """
    before = _opened(record, label)
    before.require_open(label)
    parts = {**before.ranks, node: ranks}
    complete = label if sum(parts.values()) >= world_size else before.complete
    return replace(before, ranks=parts, complete=complete)


def with_failure(
    record: PartsRecord | None, label: VersionId, reason: str, *, overtaken: bool
) -> PartsRecord:
    """Return the record after a node has given up a version; unchanged if the version is complete,
    or the record is of a newer one."""
    before = _opened(record, label)
    if before.label > label or before.complete == label or before.failed:
        return before
    return replace(before, failed=reason, overtaken=overtaken)


def _opened(record: PartsRecord | None, label: VersionId) -> PartsRecord:
    if record is None:
        return PartsRecord(label)
    return record if record.label >= label else PartsRecord(label, complete=record.complete)


class NodeParts:
    """One node's access to the record of a job.

    Args:
        store: the rendezvous store.
        job_id: the job.
        node: this node.
    """

    def __init__(self, store: RendezvousStore, job_id: str, node: str) -> None:
        self._store, self._node = store, node
        self._key = f"reft/{job_id}/parts"

    @classmethod
    def of_job(cls, job_id: str, node: str) -> NodeParts:
        """Open the record in the store that the launcher names.

        Raises:
            PersistError: there is no store.
        """
        endpoint = os.environ.get(ENV_STORE)
        if not endpoint:
            raise PersistError(
                "persist.dir is on disks that only their own node sees, and the nodes agree on "
                "their versions through the rendezvous store of 'reft launch', which is missing: "
                "start the job by 'reft launch', or name a directory that every node sees"
            )
        store = KeyValueStore(endpoint, user_secret(), timeout_secs=_ANSWER_SECS)
        return cls(store, job_id, node)

    def close(self) -> None:
        self._store.close()

    def require_open(self, label: VersionId) -> None:
        """Raise if the version can no longer become complete, or the store does not answer.

        Raises:
            PersistError: as :meth:`PartsRecord.require_open`, or the store does not answer.
        """
        record = self._read()[1]
        if record is not None:
            record.require_open(label)

    def add(self, label: VersionId, ranks: int, world_size: int) -> None:
        """Record that this node's part of a version is on its disk.

        Args:
            label: the version.
            ranks: number of ranks in this node's part.
            world_size: number of ranks of the job.

        Raises:
            PersistError: the version can no longer become complete, or the store does not answer.
        """
        self._change(lambda record: with_part(record, label, self._node, ranks, world_size))

    def is_complete(self, label: VersionId) -> bool:
        """Whether every node has written its part of a version.

        Raises:
            PersistError: the version can no longer become complete, or the store does not answer.
        """
        record = self._read()[1]
        if record is None or self._node not in record.ranks:
            raise PersistError(
                f"{label}: the rendezvous store has lost the record of its parts, so it is not "
                "known whether the other nodes have theirs. This node's part is kept"
            )
        record.require_open(label)
        return record.complete == label

    def fail(self, label: VersionId, error: BaseException) -> bool:
        """Mark a version as failed.

        Returns:
            Whether it is certain that the version never becomes complete.
        """
        reason = f"node {self._node} gave up: {type(error).__name__}: {error}"
        overtaken = isinstance(error, OvertakenError)
        try:
            before = self._read()[1]
            # If the store has lost the record that this node was in, the version may have been
            # complete before.
            known = before is not None and before.label == label
            after = self._change(lambda r: with_failure(r, label, reason, overtaken=overtaken))
        except PersistError:
            return False
        return known and after.label == label and bool(after.failed)

    def _read(self) -> tuple[bytes | None, PartsRecord | None]:
        try:
            data = self._store.peek(self._key)
        except StoreError as error:
            raise StoreSilentError(f"the nodes cannot agree on a version: {error}") from error
        return data, None if data is None else PartsRecord.decode(data)

    def _change(self, change: Callable[[PartsRecord | None], PartsRecord]) -> PartsRecord:
        while True:
            data, record = self._read()
            changed = change(record)
            if changed == record:
                return changed
            try:
                if self._store.compare_set(self._key, data, changed.encode())[0]:
                    return changed
            except StoreError as error:
                raise StoreSilentError(f"the nodes cannot agree on a version: {error}") from error
