"""The seam between the snapshot worker and everything a job can do without.

The worker takes a version in a fixed order: copy, vote, exchange, seal, vote, commit. A *feature*
adds to it by overriding methods of :class:`VersionFeature`, which the worker calls at the points of
that order:

====================================  ===========================================================
method                                when
====================================  ===========================================================
:meth:`~VersionFeature.read`          own blocks are copied; the live tensors are still unchanged
:meth:`~VersionFeature.inspect`       every own block has its checksum
:meth:`~VersionFeature.fill`          before peers send their checksums
:meth:`~VersionFeature.compare`       after that, before peers send what this rank lacks
:meth:`~VersionFeature.exchanged`     after that
:meth:`~VersionFeature.ballot`        before each of the two votes
:meth:`~VersionFeature.voted`         after each of the two votes
:meth:`~VersionFeature.committed`     every rank has sealed the version
====================================  ===========================================================

Features are handed to the worker where a session is put together. The core imports none of them: a
job without any runs through this package alone, with :class:`FixedScheme` and the gate that lets
every chunk through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reft.config import Variant
from reft.grid import VersionId
from reft.protect.codes import Scheme
from reft.snapshot.arenas import ArenaWriter
from reft.snapshot.copy_engine import CopyEngine
from reft.snapshot.gate import ChunkRecord, Gate
from reft.snapshot.plan import GroupLayout, LiveImages
from reft.snapshot.version import SkipCause


@dataclass(frozen=True)
class Halt:
    """All ranks have found in one vote that training must not continue with this state.

    Attributes:
        why: what was found, for the log and the job's end.
        restarts: whether the newest committed version may be resumed.
    """

    why: str
    restarts: bool


@dataclass(frozen=True)
class CopiedVersion:
    """A version of which this rank's own blocks lie in its arena.

    Attributes:
        images: the live tensors it was copied from; the next step may be changing them by now.
        writer: its arena, with checksums.
        captured: what features took along on the training thread, by feature.
        variant: when its bytes were copied.
        is_paced: whether its copy kept to the windows.
        records: what was copied when.
    """

    images: LiveImages
    writer: ArenaWriter
    captured: Mapping[str, Any] = field(default_factory=dict)
    variant: Variant = Variant.HOST
    is_paced: bool = False
    records: Sequence[ChunkRecord] = ()

    @property
    def label(self) -> VersionId:
        return self.writer.label


@dataclass(frozen=True)
class VoteResult:
    """What a vote said of a version; the same on all ranks.

    Attributes:
        ok: every rank has copied it, or, if ``is_final``, sealed it.
        is_final: this was the second vote: ``ok`` commits the version.
        has_committed: a version was committed since this start of the trainers.
    """

    label: VersionId
    ok: bool
    is_final: bool
    has_committed: bool


class VersionFeature:
    """Takes part in every version of one rank. Nothing is done here: features override what they
    need.

    Unless a method says otherwise, the worker thread calls it. Methods marked *collective* are
    called on every rank for every version, so they may exchange data there; what they raise but a
    TransferError costs the version.
    """

    name = ""
    """Key of this feature's numbers in a ballot."""

    # -- training thread ---------------------------------------------------------------------------

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        """The training thread hands a version over. ``goes_back``: it is no successor of the one
        before, since an older version was loaded meanwhile."""

    # -- the bytes of a version --------------------------------------------------------------------

    def read(self, images: LiveImages, label: VersionId, engine: CopyEngine, gate: Gate) -> None:
        """Read more of the same state. Copies are queued in ``engine``, or made when ``gate``
        admits them."""

    def inspect(self, version: CopiedVersion) -> SkipCause | None:
        """Look at the copied bytes. Returns why the version must not be sealed."""
        return None

    def fill(self, version: CopiedVersion) -> None:
        """Write blocks that peers would have to send otherwise. Must not raise: peers are
        waiting."""

    def compare(self, version: CopiedVersion) -> SkipCause | None:
        """Compare with peers; their checksums have arrived. Collective in the sharding group.
        Returns why the version must not be sealed."""
        return None

    def exchanged(self, version: CopiedVersion) -> None:
        """Everything from peers has arrived. Collective."""

    def committed(self, version: CopiedVersion) -> None:
        """Every rank has sealed the version. An error is logged and costs nothing else."""

    # -- votes -------------------------------------------------------------------------------------

    def neutral_ballot(self) -> tuple[int, ...]:
        """Numbers that change nothing; always equally many."""
        return ()

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        """Numbers that this rank adds to a vote; :meth:`voted` receives the largest of all ranks.

        Args:
            cause: why this rank votes against the version; None if it votes for it.
            layout: of the version; None before the first agreement.
        """
        return self.neutral_ballot()

    def delays_votes(self, numbers: tuple[int, ...]) -> bool:
        """Whether this rank will be busy before the next vote if the result has these numbers."""
        return False

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        """A vote has ended. Collective. ``numbers``: for each number the largest of all ranks."""
        return None

    # -- memory and peers --------------------------------------------------------------------------

    def laid_out(self, layout: GroupLayout) -> None:
        """All ranks have agreed on a new layout. Collective."""

    def forget_arenas(self) -> None:
        """Keep no arena mapped: their memory is about to be replaced (P9)."""

    def rejoined(self) -> None:
        """The ranks have met again after a failure and do not know what each has received.
        Collective."""


class SchemePolicy(VersionFeature, ABC):
    """Decides which protection the versions have, and when that changes."""

    name = "scheme"

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """What the next layout is planned for."""

    def fit(self, label: VersionId, layout: GroupLayout) -> GroupLayout:
        """Fit a new layout to the memory of all nodes, before its memory is reserved.
        Collective."""
        return layout

    def change(self, label: VersionId, layout: GroupLayout | None) -> GroupLayout | None:
        """Change the protection after the version ``label`` if the votes have asked for it.
        Collective. Returns the layout to go on with."""
        return layout

    @property
    def is_due(self) -> bool:
        """Whether :meth:`change` will change something now; the same on all ranks."""
        return False


class FixedScheme(SchemePolicy):
    """One protection for the whole job."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    @property
    def scheme(self) -> Scheme:
        return self._scheme
