"""The interface between the snapshot worker and optional features.

The worker takes a version in a fixed order: copy, vote, exchange, seal, vote, commit. A *feature*
overrides methods of :class:`VersionFeature`, which the worker calls at these points:

====================================  ===========================================================
method                                when
====================================  ===========================================================
:meth:`~VersionFeature.read`          own blocks are copied; the live tensors are still unchanged
:meth:`~VersionFeature.inspect`       every own block has its checksum
:meth:`~VersionFeature.fill`          before peers send their checksums
:meth:`~VersionFeature.compare`       after that, before peers send what this rank lacks
:meth:`~VersionFeature.exchanged`     all bytes from peers have arrived
:meth:`~VersionFeature.ballot`        before each of the two votes
:meth:`~VersionFeature.voted`         after each of the two votes
:meth:`~VersionFeature.committed`     every rank has sealed the version
====================================  ===========================================================

The session creates the features and hands them to the worker. The core imports none of them: a job
without features uses only this package, with :class:`FixedScheme` and the gate that admits every
chunk.
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
    """What :meth:`VersionFeature.voted` returns if training must not continue with the current
    state.

    Attributes:
        why: reason for the log and for the job's error message.
        restarts: whether the job may restart from the newest committed version.
    """

    why: str
    restarts: bool


@dataclass(frozen=True)
class CopiedVersion:
    """A version after this rank's own blocks were copied into the arena.

    Attributes:
        images: live tensors from which the version was copied; the next step may already be
            changing them.
        writer: writer of the version's arena, with the checksums.
        captured: data that features captured on the training thread, by feature.
        variant: variant by which the bytes were copied (when in the step).
        is_paced: whether the copy was restricted to windows.
        records: time and size of each copied chunk.
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
    """Result of a vote on a version; the same on all ranks.

    Attributes:
        label: the version.
        ok: whether every rank has copied the version or, if ``is_final``, sealed it.
        is_final: whether this was the second vote, in which ``ok`` commits the version.
        has_committed: whether any version was committed since the trainers started.
    """

    label: VersionId
    ok: bool
    is_final: bool
    has_committed: bool


class VersionFeature:
    """Takes part in every version of one rank. The methods here do nothing; features override
    those they need.

    Unless a method says otherwise, the worker thread calls it. Methods marked *collective* are
    called on every rank for every version, so they may exchange data. If one raises anything but
    a TransferError, the version is given up.
    """

    name = ""
    """Name of the feature, and key of its numbers in a ballot."""

    # -- training thread ---------------------------------------------------------------------------

    def handed_over(self, label: VersionId, *, goes_back: bool) -> None:
        """Called on the training thread when it hands a version to the worker.

        Args:
            label: the version.
            goes_back: whether an older version was loaded since the previous hand-over.
        """

    # -- the bytes of a version --------------------------------------------------------------------

    def read(self, images: LiveImages, label: VersionId, engine: CopyEngine, gate: Gate) -> None:
        """Copy more of the version's state, such as tensors that only this feature needs.

        Args:
            images: live tensors, still unchanged.
            label: name of the version.
            engine: copy engine to use; an asynchronous engine queues the copies.
            gate: admits each copy if the engine is synchronous.
        """

    def inspect(self, version: CopiedVersion) -> SkipCause | None:
        """Inspect the copied bytes. Return the cause why the version must not be sealed, or
        None."""
        return None

    def fill(self, version: CopiedVersion) -> None:
        """Write blocks into the arena that peers would otherwise send. Must not raise, because
        peers are waiting."""

    def compare(self, version: CopiedVersion) -> SkipCause | None:
        """Compare this rank's checksums with those of its peers. Collective in the sharding
        group. Return the cause why the version must not be sealed, or None."""
        return None

    def exchanged(self, version: CopiedVersion) -> None:
        """Called after all bytes from peers have arrived. Collective."""

    def committed(self, version: CopiedVersion) -> None:
        """Called after every rank has sealed the version. An error raised here is only logged."""

    # -- votes -------------------------------------------------------------------------------------

    def neutral_ballot(self) -> tuple[int, ...]:
        """Return numbers that have no effect on a vote, always as many as :meth:`ballot`
        returns."""
        return ()

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        """Return the numbers that this rank contributes to a vote. :meth:`voted` receives, for
        each number, the maximum over all ranks.

        Args:
            cause: why this rank votes against the version; None if it votes for it.
            layout: layout of the version; None before the first agreement.
        """
        return self.neutral_ballot()

    def delays_votes(self, numbers: tuple[int, ...]) -> bool:
        """Return whether this rank will need time before the next vote if a vote results in
        these numbers.
        """
        return False

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        """Called after a vote. Collective.

        Args:
            result: result of the vote on the version.
            numbers: the maximum over all ranks of each number in their ballots.

        Returns:
            The reason why training must stop; None to continue.
        """
        return None

    # -- memory and peers --------------------------------------------------------------------------

    def laid_out(self, layout: GroupLayout) -> None:
        """Called after all ranks have agreed on a new layout. Collective."""

    def forget_arenas(self) -> None:
        """Release all mappings of arenas, because their memory is about to be replaced (P9)."""

    def rejoined(self) -> None:
        """Reset state that depends on votes. Called after the ranks have reconnected following a
        failure, since some may have missed the last messages. Collective."""


class SchemePolicy(VersionFeature, ABC):
    """Decides which protection scheme versions have, and when it changes."""

    name = "scheme"

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """Scheme of the next layout."""

    def fit(self, label: VersionId, layout: GroupLayout) -> GroupLayout:
        """Return the layout to use instead of a new layout that may not fit into the memory of
        all nodes. Called before memory is reserved. Collective."""
        return layout

    def change(self, label: VersionId, layout: GroupLayout | None) -> GroupLayout | None:
        """Change the protection after the version ``label`` if the votes requested it.
        Collective. Return the layout of the next version."""
        return layout

    @property
    def is_due(self) -> bool:
        """Whether a call of :meth:`change` would change something now; the same on all ranks."""
        return False


class FixedScheme(SchemePolicy):
    """The policy that uses one protection scheme for the whole job."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    @property
    def scheme(self) -> Scheme:
        return self._scheme
