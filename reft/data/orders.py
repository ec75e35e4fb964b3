"""Whether all ranks read the same order. A pipeline's first and last stage would train on inputs and labels
of different samples else, and replicas on some samples twice; no position would tell. Pure but for
:func:`order_of`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from reft.data.dealt import dealt_by

Facts = dict[str, Any]
"""Plain values that must be equal on all ranks that read one order."""
Orders = dict[str, Facts]
"""Of one rank, by what it calls what it reads."""

_MENDS = {
    "samples": "give every rank the same data set",
    "seed": "give every rank the same seed",
}


def order_of(loader: Any, replicas: int) -> Facts | None:
    """The order of a ``DataLoader`` that torch's ``DistributedSampler`` deals out to all replicas; None where
    it is another one, which may be meant to differ."""
    dealt = dealt_by(loader)
    if dealt is None or dealt.replicas != replicas:
        return None
    sampler: DistributedSampler[Any] = loader.sampler
    return {**dealt.encode(), "seed": sampler.seed, "shuffle": sampler.shuffle}


def difference(ranks: Sequence[Orders]) -> str | None:
    """Which ranks read another order than others under the same name, and what to change; None: none does.

    Args:
        ranks: of each rank, the orders that it reads. Those that read none say nothing.
    """
    for name in dict.fromkeys(name for orders in ranks for name in orders):
        readers = {rank: orders[name] for rank, orders in enumerate(ranks) if name in orders}
        keys = [
            key for key in _keys(readers) if len({repr(facts.get(key)) for facts in readers.values()}) > 1
        ]
        if keys:
            mends = "; ".join(_MENDS.get(key, f"give every rank the same {key}") for key in keys)
            return (
                f"the ranks read {name} in different orders, and would train on some samples twice and on "
                f"others not at all, or on inputs and labels of different samples. Found "
                f"{_found(readers, keys)}; expected the same on all. Where the loader is made, {mends}"
            )
    return None


def _keys(readers: Mapping[int, Facts]) -> list[str]:
    return list(dict.fromkeys(key for facts in readers.values() for key in facts))


def _found(readers: Mapping[int, Facts], keys: Sequence[str]) -> str:
    ranks = defaultdict(list)
    for rank, facts in readers.items():
        ranks[", ".join(f"{key} {facts.get(key)!r}" for key in keys)].append(rank)
    return "; ".join(f"{said} on {_listed(those)}" for said, those in ranks.items())


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
