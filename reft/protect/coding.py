"""Encoding parities from a replica and decoding lost sub-blocks, for buffers of any backend.

The write hole: data of one version and parity of another decode to garbage that looks like state. Every
stored piece therefore carries its version, and decoding refuses to mix (P5).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from reft.errors import ReftError
from reft.protect.backend import Backend, Buffer, combine_ragged
from reft.protect.codes import Piece
from reft.protect.decode import Combination, DecodePlan, Factored, factor
from reft.protect.section import CodedSection


class MixedVersionsError(ReftError, RuntimeError):
    """Pieces of different versions were offered to one decoding."""


@dataclass(frozen=True, eq=False)
class StoredPiece:
    """A piece as it was found.

    Attributes:
        version: label of the version it belongs to.
        data: its bytes, a buffer of :meth:`CodedSection.piece_bytes` bytes.
    """

    version: Hashable
    data: Buffer


def encode(section: CodedSection, piece: Piece, image: Buffer, target: Buffer, backend: Backend) -> None:
    """Compute one stored piece from a full replica; queued on the current stream of a device.

    Args:
        section: the layout.
        piece: which piece; usually a parity, data is copied.
        image: the replicated section, uint8, ``section.nbytes`` long.
        target: uint8, ``section.piece_bytes(piece)`` long; overwritten.
        backend: computes; must suit the class of the buffers.

    Raises:
        ValueError: where a length does not fit.
    """
    expected = (section.nbytes, section.piece_bytes(piece))
    if (len(image), len(target)) != expected:
        raise ValueError(
            f"found an image of {len(image)} and a target of {len(target)} bytes; expected {expected}"
        )
    ranges = [section.range_of(block) for block, _ in piece.terms]
    row = tuple(coefficient for _, coefficient in piece.terms)
    combine_ragged(backend, (row,), [image[start:stop] for start, stop in ranges], (target,))


def decode(
    section: CodedSection,
    plan: DecodePlan,
    pieces: Mapping[int, StoredPiece],
    targets: Mapping[int, Buffer],
    backend: Backend,
    *,
    version: Hashable,
) -> None:
    """Compute lost sub-blocks from stored pieces.

    Args:
        section: the layout.
        plan: what to compute (:func:`reft.protect.decode.plan_decode`).
        pieces: at least ``plan.needed``, by index.
        targets: for every combination's sub-block a buffer of its true length, such as a slice of the
            image; overwritten.
        backend: computes; must suit the class of the buffers.
        version: the version to restore.

    Raises:
        MixedVersionsError: if a needed piece is of another version. Nothing has been written then.
        ValueError: if a needed piece is missing or has another length than it should.
    """
    _check(section, plan, pieces, version)
    for batch in plan.batches():
        _decode_stripe(section, batch, pieces, targets, backend)


def _check(
    section: CodedSection, plan: DecodePlan, pieces: Mapping[int, StoredPiece], version: Hashable
) -> None:
    absent = [p for p in plan.needed if p not in pieces]
    if absent:
        raise ValueError(f"found no piece {absent}; expected all that the plan needs: {plan.needed}")
    stale = {p: pieces[p].version for p in plan.needed if pieces[p].version != version}
    if stale:
        index, found = next(iter(stale.items()))
        raise MixedVersionsError(
            f"found {len(stale)} of {len(plan.needed)} pieces of another version (piece {index} of member "
            f"{section.code.pieces[index].member} is of {found}); expected all of {version}. Data and parity "
            f"of different versions never mix: plan again without them, or restore an older whole version"
        )
    for p in plan.needed:
        expected = section.piece_bytes(section.code.pieces[p])
        if len(pieces[p].data) != expected:
            raise ValueError(f"found piece {p} of {len(pieces[p].data)} bytes; expected {expected}")


def _decode_stripe(
    section: CodedSection,
    batch: Sequence[Combination],
    pieces: Mapping[int, StoredPiece],
    targets: Mapping[int, Buffer],
    backend: Backend,
) -> None:
    indices = sorted({p for combination in batch for p, _ in combination.terms})
    sources = [pieces[p].data for p in indices]
    rows = [tuple(dict(c.terms).get(p, 0) for p in indices) for c in batch]
    longest = max(map(len, sources))
    outs, short = [], []
    for combination in batch:
        start, stop = section.range_of(combination.sub_block)
        target = targets[combination.sub_block]
        if len(target) != stop - start:
            raise ValueError(
                f"found a target of {len(target)} bytes for sub-block {combination.sub_block}; "
                f"expected {stop - start}"
            )
        if len(target) < longest:
            # The last sub-blocks of a section are shorter than their stripe.
            scratch = backend.zeros(longest, target)
            short.append((target, scratch))
            target = scratch
        outs.append(target)
    factored = factor(section.code, batch, indices)
    if factored:
        _solve(factored, sources, outs, backend)
    else:
        combine_ragged(backend, rows, sources, outs)
    for target, scratch in short:
        target[:] = scratch[: len(target)]


def _solve(
    factored: Factored, sources: Sequence[Buffer], targets: Sequence[Buffer], backend: Backend
) -> None:
    """Syndromes first, then the unknowns, in ranges whose syndromes stay in the cache."""
    nbytes = len(targets[0])
    step = backend.batch_bytes(targets[0])
    scratch = [backend.zeros(min(step, nbytes), targets[0]) for _ in factored.equations]
    generic = len(targets) - factored.last_by_xor
    for start in range(0, nbytes, step):
        stop = min(start + step, nbytes)
        syndromes = [s[: stop - start] for s in scratch]
        outs = [t[start:stop] for t in targets]
        combine_ragged(backend, factored.equations, [s[start:stop] for s in sources], syndromes)
        backend.combine(factored.solution[:generic], syndromes, outs[:generic])
        if factored.last_by_xor:
            backend.combine(((1,) * len(outs),), [syndromes[0], *outs[:generic]], outs[generic:])
