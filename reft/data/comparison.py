"""Checks that all ranks read in the same order. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from reft.data.order import explain_refusal

Orders = dict[str, dict[str, Any]]
"""Describes the data order of one rank: loader name -> settings that determine its order, which
must be equal on all ranks."""


def difference(ranks: Sequence[Orders]) -> str | None:
    """Compare the orders of all ranks.

    Args:
        ranks: orders by rank. A rank that lacks a loader is left out of the comparison of that
            loader.

    Returns:
        Text that names the ranks that differ, and what to change; None if all agree.
    """
    for name in dict.fromkeys(name for orders in ranks for name in orders):
        readers = {rank: orders[name] for rank, orders in enumerate(ranks) if name in orders}
        all_keys = dict.fromkeys(key for facts in readers.values() for key in facts)
        keys = []
        for key in all_keys:
            values = {repr(facts.get(key)) for facts in readers.values()}
            if len(values) > 1:
                keys.append(key)
        if keys:
            mends = " and ".join("data set" if key == "samples" else key for key in keys)
            return (
                f"the ranks read {name} in different orders, and would use some samples twice and "
                "others never, or train on inputs and labels of different samples. Found "
                f"{_found(readers, keys)}; expected the same on all. Where the loader is made, "
                f"give every rank the same {mends}"
            )
    return None


def dynamic_refused(ranks: Sequence[Orders], why_equal: str | None) -> str | None:
    """Return why ``order="dynamic"`` is refused; None if it is not used, or allowed.

    All ranks get the same result: pipeline stages that read no data have to stop as well, or
    they would wait for the others.
    """
    dynamic = (
        name for orders in ranks for name, facts in orders.items() if facts.get("step_samples")
    )
    return next((explain_refusal(name, why_equal) for name in dynamic), None)


def _found(readers: Mapping[int, dict[str, Any]], keys: Sequence[str], most: int = 8) -> str:
    ranks = defaultdict(list)
    for rank, facts in readers.items():
        ranks[", ".join(f"{key} {facts.get(key)!r}" for key in keys)].append(rank)
    found = []
    for text, those in ranks.items():
        more = f" and {len(those) - most} more" if len(those) > most else ""
        found.append(
            f"{text} on rank{'s'[: len(those) - 1]} {', '.join(map(str, those[:most]))}{more}"
        )
    return "; ".join(found)
