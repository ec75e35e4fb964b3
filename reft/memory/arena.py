"""Arena: one rank's bytes of one version, in a file in host memory that outlives its processes.

The file is mapped by the trainer that writes it and by its readers (the daemon, `reft inspect`, the
next incarnation). The file's header (:mod:`reft.memory.header`) records which rank's version the
file holds, and the state of the version. Each change of state writes one record. If a record is
torn (written only in part), readers see the state before the change.

Invariants:

- Before any data byte is overwritten, the header says WRITING and the record of the old version
  is wiped (P3).
- An arena does not change while a reader has pinned it (holds its shared lock).
- Every block carries the checksum of its bytes (P5).
- All memory is allocated and touched at creation (P9).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from reft.errors import ArenaError
from reft.grid import Coordinate, VersionId
from reft.memory.files import (
    allocate,
    free_bytes,
    hold_directory,
    new_file,
    remove_idle_file,
    reopen,
    touch_pages,
    try_flock,
    write_all,
)
from reft.memory.header import (
    MAGIC,
    PAGE_BYTES,
    ArenaHeader,
    ArenaState,
    Entry,
    Geometry,
    Record,
    RecordKind,
    TornRecordError,
    checksum,
    decode_geometry,
    encode_geometry,
    encode_header,
    encode_record,
    newest_record,
    pack_entries,
    unpack_entries,
)

__all__ = [
    "Arena",
    "ArenaHeader",
    "ArenaState",
    "Entry",
    "checksum",
    "free_bytes",
    "reserved_bytes",
]

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 5
"""Number of times that a reader tries to read the header. A try fails only if the writer replaced
both header copies during it."""

Table = NDArray[np.void]


def reserved_bytes(data_bytes: int, max_entries: int) -> int:
    """Return the size in bytes of an arena file, including header and block table."""
    return Geometry.of(data_bytes, max_entries).file_bytes


class Arena:
    """An open arena file. Create an object with :meth:`create` or :meth:`open`.

    An arena is locked with `flock`, on a file description used for nothing else. So a crash
    releases the lock, and forked processes (data loader workers) do not keep it. A writable arena
    also holds a shared lock on its directory, which shows other processes that the job is alive.

    One thread of one process writes an arena at a time; any number of processes may read it. The
    order for a version is ``begin``, data, ``seal``, ``commit``; ``clear`` discards the version.
    """

    def __init__(
        self, path: Path, fd: int, geometry: Geometry, secret: bytes | None, writable: bool
    ) -> None:
        """Map an open file. Use :meth:`create` or :meth:`open` instead.

        Args:
            path: the file.
            fd: open descriptor of the file; the caller closes it.
            geometry: sizes of the regions.
            secret: the job's secret; None reads without authentication.
            writable: True to map the file for writing.
        """
        self._held: int | None = None
        self._fd = self._directory_fd = -1
        _opened.add(self)
        try:
            self._fd = reopen(path, fd, writable)
            if writable:
                self._directory_fd = hold_directory(path.parent)
        except BaseException:
            self._close_files()
            raise
        self.path = path
        self.writable = writable
        self._secret = secret
        self._geometry = geometry
        self._unlock_after_write = False
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map: mmap.mmap | None = mmap.mmap(fd, geometry.file_bytes, access=access)
        if not writable:
            # Tell the kernel that the data is read once. Otherwise unmapping would mark every page
            # as recently used, which takes as long as mapping the file.
            self._map.madvise(mmap.MADV_SEQUENTIAL)
        self._view = memoryview(self._map)
        self._data = self._view[geometry.data_offset : geometry.file_bytes]

    @classmethod
    def create(
        cls, path: Path, data_bytes: int, max_entries: int, secret: bytes, *, touch: bool = True
    ) -> Arena:
        """Open ``path`` for writing, with all its memory allocated and touched.

        An existing arena of exactly this size keeps its content. Any other file at ``path`` is
        replaced by an EMPTY arena. The caller has to check that the old file holds no version that
        is still needed.

        Args:
            path: file in a directory of this job.
            data_bytes: size of the data region.
            max_entries: capacity of the block table.
            secret: the job's secret.
            touch: allocate and touch all memory now; False if the caller fills the arena with
                :meth:`write` and then calls :meth:`allocate`.

        Raises:
            OutOfMemoryError: the arena does not fit; the new file is removed.
            ArenaError: another process is writing the existing file.
        """
        geometry = Geometry.of(data_bytes, max_entries)
        arena = cls._existing(path, geometry, secret)
        if arena is None:
            remove_idle_file(path)
            arena = cls._new(path, geometry, secret, allocated=touch)
        try:
            if touch and arena._map is not None:
                # An existing file may have holes (ranges without memory) if it was created with
                # touch=False and never filled. Touching a hole raises SIGBUS when memory is short,
                # so allocate first.
                arena.allocate()
                touch_pages(arena._map, path)
        except BaseException:
            arena.close()
            raise
        return arena

    @classmethod
    def _existing(cls, path: Path, geometry: Geometry, secret: bytes) -> Arena | None:
        try:
            arena = cls.open(path, secret, writable=True)
        except FileNotFoundError:
            return None
        except ArenaError as error:
            logger.warning("%s; it is replaced by an empty arena", error)
            return None
        if arena._geometry == geometry:
            return arena
        arena.close()
        return None

    @classmethod
    def _new(cls, path: Path, geometry: Geometry, secret: bytes, *, allocated: bool) -> Arena:
        # Always allocate the header: reading a hole in a mapped file raises SIGBUS when memory
        # is short.
        fd = new_file(path, geometry.file_bytes, None if allocated else geometry.data_offset)
        try:
            os.pwrite(fd, encode_geometry(geometry, secret), 0)
            empty = encode_record(RecordKind.HEADER, 1, encode_header(None, b""), secret)
            os.pwrite(fd, empty, geometry.copy_offset(0))
            return cls(path, fd, geometry, secret, writable=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(
        cls, path: Path, secret: bytes | None, writable: bool = False, job_id: str | None = None
    ) -> Arena:
        """Map an existing arena.

        Args:
            path: the file.
            secret: the job's secret; None reads without authentication (never for restoring).
            writable: map for writing; needs the secret.
            job_id: refuse versions of any other job; None accepts every job.

        Raises:
            FileNotFoundError: there is no such file.
            ArenaError: the file is not an arena, is damaged, or belongs to another job.
        """
        if writable and secret is None:
            raise ArenaError(
                f"{path}: opened for writing without the job's secret; give the secret"
            )
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            geometry = _read_geometry(fd, path, secret)
            arena = cls(path, fd, geometry, secret, writable)
        finally:
            os.close(fd)
        try:
            header = arena._newest().head
            if job_id is not None and header is not None and header.job_id != job_id:
                raise ArenaError(
                    f"holds a version of job {header.job_id!r}; expected job {job_id!r}"
                )
        except ArenaError as error:
            arena.close()
            raise ArenaError(f"{path}: header: {error}") from error
        return arena

    # ---- content ----

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes into the data region of an arena whose memory is not allocated yet.

        Writes to the file instead of the mapping: a write to the mapping would take twice as long,
        because the kernel zeroes and maps each new page.

        Args:
            offset: first byte, from the start of the data region.
            data: the bytes.

        Raises:
            ArenaError: the range is outside the data region.
            OutOfMemoryError: there is no memory left.
        """
        if not 0 <= offset <= self.data_bytes - len(data):
            raise ArenaError(
                f"{self.path}: {len(data)} bytes at {offset} are outside the data region of "
                f"{self.data_bytes} bytes"
            )
        write_all(self._fd, self.path, data, self._geometry.data_offset + offset)

    def allocate(self) -> None:
        """Allocate memory for the parts of the file that were not written (P9).

        Raises:
            OutOfMemoryError: there is no memory left.
        """
        allocate(self._fd, self.path, self.file_bytes)

    @property
    def data_bytes(self) -> int:
        return self._geometry.data_bytes

    @property
    def max_entries(self) -> int:
        return self._geometry.max_entries

    @property
    def file_bytes(self) -> int:
        return self._geometry.file_bytes

    @property
    def header_offsets(self) -> tuple[int, int]:
        return self._geometry.copy_offset(0), self._geometry.copy_offset(1)

    @property
    def data(self) -> memoryview:
        """The data region, writable if the arena is open for writing. Views of it keep the
        mapping alive."""
        return self._data

    def header(self) -> ArenaHeader | None:
        """Return the current header with its block table; None if the arena is EMPTY or
        unreadable."""
        try:
            return self._newest().header()
        except ArenaError:
            return None

    def head(self) -> ArenaHeader | None:
        """Return the header without its block table; fast even for thousands of blocks."""
        try:
            return self._newest().head
        except ArenaError:
            return None

    @property
    def state(self) -> ArenaState:
        """State in the header; EMPTY also if the header is unreadable."""
        head = self.head()
        return ArenaState.EMPTY if head is None else head.state

    def lost(self) -> str | None:
        """Return the reason why the next start of the job could not use this file.

        Returns:
            The reason, worded as the end of a sentence that begins with the path, such as "was
            removed"; None if the next start can use the file.
        """
        try:
            mine, there = os.fstat(self._fd), os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return "was removed"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if not os.path.samestat(mine, there):
            return "was replaced by another file"
        if mine.st_size != self.file_bytes:
            return f"has {mine.st_size} bytes, expected {self.file_bytes}: truncated or extended"
        try:
            self._newest()
        except ArenaError as error:
            return f"no longer has a whole header copy: {error}"
        return None

    def read_block(self, entry: Entry) -> memoryview:
        """Return a block's bytes as a view into the mapping; the checksum is not verified.

        Raises:
            ArenaError: the block lies outside the data region.
        """
        self._check_bounds(entry)
        return self._data[entry.arena_offset : entry.arena_offset + entry.nbytes]

    def verify(self, entry: Entry) -> bool:
        """Return whether a block's bytes still match the checksum that was computed when they were
        copied (P5).
        """
        return checksum(self.read_block(entry)) == entry.checksum

    # ---- transitions ----

    def begin(self, header: ArenaHeader) -> None:
        """Record that a version is being written, *before* any byte of data is overwritten.

        Unless this object already holds the exclusive lock, takes it until :meth:`seal` or
        :meth:`clear`.

        Args:
            header: the version's header; ``state`` and ``entries`` are ignored.

        Raises:
            ArenaError: a reader has pinned the arena, or it is not writable.
        """
        if self._held != fcntl.LOCK_EX:
            if not self.try_lock_exclusive():
                raise ArenaError(
                    f"{self.path}: pinned by a reader; write another slot or try again later"
                )
            self._unlock_after_write = True
        writing = replace(header, state=ArenaState.WRITING, entries=(), sealed_unix_secs=0.0)
        self._record(self._newest(), writing, b"", wipe=True)

    def seal(self, entries: Sequence[Entry] | Table, sealed_unix_secs: float | None = None) -> None:
        """Record that the data region holds the complete version, and the checksums of its blocks.

        Args:
            entries: all stored blocks, or an array of dtype :data:`reft.memory.header.TABLE`.
            sealed_unix_secs: time to record; None for now.

        Raises:
            ArenaError: the arena is not WRITING, or the blocks do not fit.
        """
        newest, header = self._in_state(ArenaState.WRITING, "sealed")
        if len(entries) > self.max_entries:
            raise ArenaError(
                f"{self.path}: {len(entries)} blocks to seal, but room was reserved for "
                f"{self.max_entries}; create the arena again with a larger max_entries"
            )
        now = time.time() if sealed_unix_secs is None else sealed_unix_secs
        sealed = replace(header, state=ArenaState.SEALED, sealed_unix_secs=now, entries=())
        self._record(newest, sealed, self._pack(entries))
        self._release_own_lock()

    def commit(self) -> None:
        """Record that every rank has sealed this version, which is the result of the ranks' second
        vote.

        Raises:
            ArenaError: the arena is not SEALED.
        """
        newest, header = self._in_state(ArenaState.SEALED, "committed")
        self._record(newest, replace(header, state=ArenaState.COMMITTED), newest.table)

    def clear(self) -> None:
        """Discard the version: write a record with the state EMPTY, and wipe the older record."""
        self._record(self._newest(), None, b"", wipe=True)
        self._release_own_lock()

    # ---- locks ----

    def try_lock_exclusive(self) -> bool:
        """Take the exclusive lock, in exchange for a shared lock of this object, if there is one.
        Returns False if a reader or another writer holds the arena."""
        if self._held == fcntl.LOCK_EX:
            return True
        self._unlock_after_write = False
        return self._take(fcntl.LOCK_EX)

    def lock_shared(self) -> bool:
        """Take a shared lock, which prevents changes of the content until :meth:`unlock`. Returns
        False if a writer holds the arena."""
        self._unlock_after_write = False
        return self._take(fcntl.LOCK_SH)

    def unlock(self) -> None:
        self._unlock_after_write = False
        if self._held is not None and self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._held = None

    def _take(self, operation: int) -> bool:
        if self._held == operation:
            return True
        self.unlock()
        if self._fd < 0:
            raise ArenaError(
                f"{self.path}: closed, or inherited by a forked process; open it again"
            )
        if not try_flock(self._fd, operation):
            return False
        self._held = operation
        return True

    def close(self) -> None:
        """Release the locks and this object's reference to the mapping.

        The memory is unmapped when the last view of :attr:`data` is freed. The memory must not
        be unmapped earlier: ``torch.frombuffer`` keeps the view alive but does not lock it, and
        would read unmapped memory.
        """
        self._close_files()
        self._data = self._view = memoryview(b"")
        self._map = None

    def _close_files(self) -> None:
        # Forget the descriptors before closing them. Otherwise a child that is forked in between
        # would close the same numbers again, when they may belong to other files.
        fds = self._fd, self._directory_fd
        self._fd = self._directory_fd = -1
        self._held = None
        for fd in fds:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)

    def __del__(self) -> None:
        self._close_files()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Arena({str(self.path)!r}, data_bytes={self.data_bytes}, writable={self.writable})"

    # ---- inside ----

    def _newest(self) -> Record:
        size = self._geometry.copy_bytes
        starts = (self._geometry.copy_offset(0), self._geometry.copy_offset(1))
        for attempt in range(_READ_ATTEMPTS):
            try:
                return newest_record([self._view[s : s + size] for s in starts], self._secret)
            except TornRecordError:
                if attempt == _READ_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _pack(self, entries: Sequence[Entry] | Table) -> bytes:
        if not isinstance(entries, np.ndarray):
            for entry in entries:
                self._check_bounds(entry)
            return pack_entries(entries)
        begin, nbytes = entries["arena_offset"], entries["nbytes"]
        # Compare without adding, because begin + nbytes may overflow 64 bits.
        outside = (begin > self.data_bytes) | (
            nbytes > self.data_bytes - np.minimum(begin, self.data_bytes)
        )
        packed = entries.tobytes()
        for row in np.flatnonzero(outside):
            self._check_bounds(unpack_entries(packed)[row])
        return packed

    def _record(
        self, newest: Record, header: ArenaHeader | None, table: bytes, wipe: bool = False
    ) -> None:
        """Write a new state over the older header copy, while the newer copy stays valid.

        With ``wipe``, the previous copy is invalidated afterwards. Without that, readers of a
        damaged new copy would use the previous one, whose block table describes data that is being
        overwritten.
        """
        if not self.writable or self._secret is None:
            raise ArenaError(
                f"{self.path}: open for reading; open it with writable=True to change it"
            )
        payload = encode_header(header, table)
        record = encode_record(RecordKind.HEADER, newest.sequence + 1, payload, self._secret)
        if len(record) > self._geometry.copy_bytes:
            raise ArenaError(
                f"{self.path}: a header of {len(record)} bytes does not fit the "
                f"{self._geometry.copy_bytes} reserved; shorten job_id or node, or reserve more "
                "entries"
            )
        # This overwrites the older of the two copies. After a crash during the write the other copy
        # is still valid, so readers see the state from before it (P3).
        self._store(self._geometry.copy_offset(1 - newest.index), record)
        if wipe:
            self._store(self._geometry.copy_offset(newest.index), bytes(len(MAGIC)))

    def _store(self, offset: int, data: bytes) -> None:
        """Write header bytes into the mapping. No other function changes header bytes.

        Data is written before the header that describes it, without a memory barrier in between.
        Readers in other processes do not need a barrier:

        - A record has a MAC. If only some of the record's bytes are visible, readers treat it as
          torn.
        - Data has checksums. On a weakly ordered processor a reader may see the record before
          the data; then the checksum does not match, and the reader treats the data as damaged.
        """
        self._view[offset : offset + len(data)] = data

    def _in_state(self, expected: ArenaState, verb: str) -> tuple[Record, ArenaHeader]:
        newest = self._newest()
        found = ArenaState.EMPTY if newest.head is None else newest.head.state
        if newest.head is None or found is not expected:
            raise ArenaError(
                f"{self.path}: is {found} and cannot be {verb}; expected it to be {expected}"
            )
        return newest, newest.head

    def _check_bounds(self, entry: Entry) -> None:
        end = entry.arena_offset + entry.nbytes
        if entry.arena_offset < 0 or entry.nbytes < 0 or end > self.data_bytes:
            raise ArenaError(
                f"{self.path}: block {entry.key} lies at [{entry.arena_offset}, {end}), outside "
                f"the data region of {self.data_bytes} bytes"
            )

    def _release_own_lock(self) -> None:
        if self._unlock_after_write:
            self.unlock()


_opened: WeakSet[Arena] = WeakSet()


def _forget_in_child() -> None:
    for arena in list(_opened):
        arena._close_files()


os.register_at_fork(after_in_child=_forget_in_child)


def _read_geometry(fd: int, path: Path, secret: bytes | None) -> Geometry:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ArenaError(f"{path}: not a regular file; remove it")
    try:
        geometry = decode_geometry(memoryview(os.pread(fd, PAGE_BYTES, 0)), secret)
    except TornRecordError as error:
        raise ArenaError(f"{path}: not an arena, or its first page is damaged ({error})") from error
    except ArenaError as error:
        raise ArenaError(f"{path}: {error}") from error
    if info.st_size != geometry.file_bytes:
        raise ArenaError(
            f"{path}: has {info.st_size} bytes, expected {geometry.file_bytes}: truncated or "
            "extended after it was made; its content is lost"
        )
    return geometry


# -- names and contents of the arena files in a job's directory ------------------------------------

ARENA_SUFFIX = ".arena"
_DECODED = "decoded-"


def arena_name(local_rank: int, slot: int) -> str:
    """Return the file name of an arena. The name identifies only rank and slot on a node; whose
    bytes the file holds is recorded in the header."""
    return f"rank{local_rank}-slot{slot}{ARENA_SUFFIX}"


def decoded_name(coordinate: str, number: int) -> str:
    return f"{_DECODED}{coordinate}-{number}{ARENA_SUFFIX}"


def is_decoded(name: str) -> bool:
    return name.startswith(_DECODED)


def scan(
    job_dir: Path,
    secret: bytes | None,
    job_id: str | None = None,
    is_wanted: Callable[[Path], bool] = lambda path: True,
) -> list[tuple[Path, Arena | str]]:
    """Open every arena of a job's directory for reading. The caller closes the arenas.

    Args:
        job_dir: the job's directory on this node.
        secret: the job's secret; None reads without authentication.
        job_id: refuse versions of any other job; None accepts every job.
        is_wanted: selects the files to open.

    Returns:
        For each file, in the order of names, the open arena or the reason why it cannot be read.
    """
    found: list[tuple[Path, Arena | str]] = []
    for path in filter(is_wanted, sorted(job_dir.glob(f"*{ARENA_SUFFIX}"))):
        try:
            found.append((path, Arena.open(path, secret, job_id=job_id)))
        except FileNotFoundError:
            continue
        except (ArenaError, OSError, ValueError) as error:
            found.append((path, str(error)))
    return found


def headers(
    job_dir: Path, secret: bytes | None, job_id: str | None = None
) -> list[tuple[Path, ArenaHeader]]:
    """Return the path and the header of each of a job's arenas that is neither EMPTY nor
    unreadable."""
    found = []
    for path, arena in scan(job_dir, secret, job_id):
        if isinstance(arena, Arena):
            with arena:
                header = arena.header()
            if header is not None:
                found.append((path, header))
    return found


def slots_with(
    job_dir: Path, secret: bytes, local_rank: int, label: VersionId
) -> dict[int, ArenaHeader]:
    """Return the slots of a local rank that hold the complete version ``label`` on this node."""
    prefix = _prefix(local_rank)
    return {
        int(path.stem.removeprefix(prefix)): header
        for path, header in headers(job_dir, secret)
        if path.name.startswith(prefix) and header.state.whole and header.label == label
    }


@dataclass(frozen=True)
class SlotFiles:
    """The arena files of one rank: one for each slot."""

    job_dir: Path  # The job's memory directory on this node
    local_rank: int  # Rank within the node, which is part of the file names
    count: int  # Number of slots; each holds one arena
    secret: bytes  # The job's secret, the key of the headers' MAC
    # Number of ranks on this node, from which local rank 0 knows which files belong to ranks that
    # no longer exist
    local_world_size: int = 1

    def path(self, slot: int) -> Path:
        return self.job_dir / arena_name(self.local_rank, slot)

    def create(self, slot: int, data_bytes: int, max_entries: int) -> Arena:
        return Arena.create(self.path(slot), data_bytes, max_entries, self.secret)

    def coordinate_in(self, path: Path) -> Coordinate | None:
        """Return the coordinate of the rank whose bytes a file holds; None if there is no file
        or it holds no complete version.
        """
        try:
            with Arena.open(path, self.secret) as arena:
                header = arena.head()
        except (ArenaError, OSError):
            return None
        return header.coordinate if header is not None and header.state.whole else None

    def set_aside(self, path: Path) -> Path:
        """Rename an arena file to a slot number that the rank does not use. Return the new path.

        Recovery still finds the file. It is removed after the next commit, like files of an earlier
        start that had more slots.
        """
        aside = next(p for n in count(self.count) if not (p := self.path(n)).exists())
        path.rename(aside)
        return aside

    @property
    def held_bytes(self) -> int:
        """Total size in bytes of the existing files in the slots."""
        paths = [self.path(slot) for slot in range(self.count)]
        return sum(path.stat().st_size for path in paths if path.exists())

    def remove_leftovers(self, unused: Collection[int]) -> None:
        """Remove arenas of an earlier incarnation that had more slots or more ranks.

        Args:
            unused: slot numbers of this rank that are no longer used; their files are removed,
                too.
        """
        mine = {arena_name(self.local_rank, slot) for slot in {*range(self.count)} - {*unused}}
        ranks = range(self.local_world_size) if self.local_rank == 0 else ()
        others = tuple(_prefix(rank) for rank in ranks if rank != self.local_rank)
        for path in self.job_dir.glob(f"*{ARENA_SUFFIX}"):
            own = path.name.startswith(_prefix(self.local_rank))
            orphan = self.local_rank == 0 and not path.name.startswith(others)
            if path.name not in mine and (own or orphan):
                path.unlink(missing_ok=True)


def _prefix(local_rank: int) -> str:
    return arena_name(local_rank, 0).removesuffix(f"0{ARENA_SUFFIX}")
