"""Which of the recoverable versions to restore. Pure; how a version comes to be committed is in
:mod:`reft.snapshot.committing.version`.

A committed version is sealed on every rank, and stays so until a newer one is committed: a rank gives it up
only after it has *learned* of a newer commit, at which point all ranks have sealed the newer one. The newest
version that happens to be whole is not good enough to restore: if a rank lacks it that holds an older one, it
was never committed, and to settle on it gives up copies that the next loss may need. Explored exhaustively in
tests/snapshot/test_version_model.py (P3).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from reft.naming import Label


def preferred_label(
    held_by: Mapping[Label, Collection[Hashable]], newest_committed: Label | None
) -> Label | None:
    """Which of the recoverable versions to restore.

    Of those not older than the newest version known to be committed, the newest one that is held by
    *every* place which holds an older one. A version v that was committed anywhere is whole at every
    place that is left. A newer one that some place lacks was therefore never committed, and has fewer
    copies: restoring it would let ranks overwrite v while a single loss can still break the newer one.

    Args:
        held_by: per *recoverable* version, the places that hold it SEALED or COMMITTED. A place is
            where arenas lie, whosever bytes they hold: (node, local rank).
        newest_committed: newest version that any arena found says is committed.

    Returns:
        The label, or None if nothing is recoverable.
    """
    current = sorted(label for label in held_by if newest_committed is None or newest_committed <= label)
    chosen: Label | None = None
    seen: set[Hashable] = set()
    for label in current or sorted(held_by):
        if seen <= set(held_by[label]):
            chosen = label
        seen.update(held_by[label])
    return chosen
