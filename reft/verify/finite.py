"""Refuses versions that contain a NaN or an infinity, so that they do not replace good versions."""

from __future__ import annotations

from reft.grid import Section
from reft.snapshot.copier import shortened
from reft.snapshot.extension import CopiedVersion, Halt, VersionFeature, VoteResult
from reft.snapshot.plan import GroupLayout
from reft.snapshot.version import SkipCause

NOT_FINITE = "not finite"


class FiniteCheck(VersionFeature):
    """Refuses versions that hold a NaN or an infinity in a 16-bit or 32-bit float tensor.

    Args:
        most_in_a_row: number of consecutive refused versions after which the job is stopped.
    """

    name = "finite"

    def __init__(self, most_in_a_row: int) -> None:
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0

    def inspect(self, version: CopiedVersion) -> SkipCause | None:
        """Return the cause to refuse the version if a NaN or infinity was found while its blocks
        were hashed; otherwise None."""
        names: list[str] = []
        for placed in sorted(version.writer.not_finite, key=lambda placed: placed.key):
            is_owned = placed.key.section is Section.OWNED
            image = version.images.owned if is_owned else version.images.replicated
            begin = placed.block.start_bytes
            names += [t.name for t in image.tensors_at(begin, begin + placed.block.nbytes)]
        if not names:
            return None
        return SkipCause(NOT_FINITE, f"NaN or infinity in {shortened(names)}")

    def neutral_ballot(self) -> tuple[int, ...]:
        return (0,)

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        return (int(cause is not None and cause.kind == NOT_FINITE),)

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        if not result.is_final:
            return None
        (found_anywhere,) = numbers
        self._in_a_row = self._in_a_row + 1 if found_anywhere else 0
        if not found_anywhere or self._in_a_row != self._most_in_a_row:
            return None
        return Halt(
            f"weights or optimizer state held NaN or infinity in {self._in_a_row} versions in a "
            "row",
            restarts=result.has_committed,
        )
