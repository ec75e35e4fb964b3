"""One node's part of a check: it measures, tells the others through the rendezvous store, and meets them.

Nobody waits for a node that does not answer for longer than ``timeout_secs`` per turn. The pairs are those
that the first node that was done has written; the verdict follows, on every node, from what it has heard in
time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reft.control.rendezvous_store import RendezvousStore
from reft.errors import ConfigError
from reft.tools.check.measures import measure_alone, measure_reduction
from reft.tools.check.verdict import Alone, Pair, Verdict, first_pairs, judge, second_pairs

logger = logging.getLogger(__name__)

_POLL_SECS = 0.1


@dataclass(frozen=True)
class Settings:
    """How a check is made.

    Attributes:
        nodes: that take part.
        node: this one's name.
        factor: see :func:`reft.tools.check.verdict.judge`.
        secs: of every measure.
        nbytes: that are reduced.
        timeout_secs: for which the others are waited for, in each turn.
    """

    nodes: int
    node: str
    factor: float = 1.5
    secs: float = 1.0
    nbytes: int = 16 * 2**20
    timeout_secs: float = 60.0


@dataclass(frozen=True)
class Checked:
    """What came out.

    Attributes:
        names: of the nodes, by index.
        alone: what each measured by itself, by index.
        rounds: the seconds of a reduction, by index, in each round.
        verdict: of all.
    """

    names: tuple[str, ...]
    alone: dict[int, Alone]
    rounds: tuple[dict[int, float | None], ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        nodes = [
            {
                "node": name,
                "alone": asdict(self.alone[n]) if n in self.alone else None,
                "all_reduce_secs": [seconds.get(n) for seconds in self.rounds],
            }
            for n, name in enumerate(self.names)
        ]
        return {"nodes": nodes, **self.verdict.to_json()}


class NodeCheck:
    """One node's part.

    Args:
        store: of this check alone.
        settings: the same on all nodes but for the name.
    """

    def __init__(self, store: RendezvousStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._index = 0

    def run(self) -> Checked:
        """
        Raises:
            ConfigError: all nodes of this check have come already: it is an earlier one's place.
            StoreError: the rendezvous store does not answer.
        """
        settings = self._settings
        self._index = self._store.add("joined", 1) - 1
        if self._index >= settings.nodes:
            raise ConfigError(
                f"{settings.node} is node {self._index + 1} of a check of {settings.nodes}: an earlier check "
                f"was made under this id, or --nnodes is too small; give every check another --rdzv-id"
            )
        self._tell("name", settings.node)
        names = self._gather("name", range(settings.nodes))
        # Together: what others of the same host do shows in what each can do.
        self._tell("alone", asdict(measure_alone(settings.secs)))
        told = self._gather("alone", list(names))
        alone = {n: Alone(**fields) for n, fields in told.items()}
        shown = tuple(str(names.get(n, f"node {n} of {settings.nodes}")) for n in range(settings.nodes))
        first = self._round("1", lambda: first_pairs(list(alone)))
        second = self._round("2", lambda: second_pairs(list(alone), first[1]))
        verdict = judge(shown, alone, (first, second) if settings.nodes > 1 else (), settings.factor)
        return Checked(shown, alone, (first[1], second[1]), verdict)

    def _round(
        self, name: str, make: Callable[[], Sequence[Pair]]
    ) -> tuple[tuple[Pair, ...], dict[int, float | None]]:
        """All reduce in pairs; returns the pairs and each node's seconds."""
        pairs = tuple(tuple(pair) for pair in self._agree(f"pairs{name}", lambda: [list(p) for p in make()]))
        for number, pair in enumerate(pairs):
            if self._index in pair:
                self._tell(f"reduced{name}", self._reduce(f"{name}.{number}", pair))
        return pairs, self._gather(f"reduced{name}", [n for pair in pairs for n in pair])

    def _reduce(self, meeting: str, pair: Pair) -> float | None:
        settings = self._settings
        timeout = timedelta(seconds=settings.timeout_secs)
        try:
            rank = pair.index(self._index)
            if rank == 0:
                host = self._store.local_address()
                served = TCPStore(host, 0, len(pair), True, timeout, wait_for_workers=False)
                self._store.set(f"meet/{meeting}", f"{host} {served.port}")
            else:
                self._store.wait([f"meet/{meeting}"], timeout)
                host, port = self._store.get(f"meet/{meeting}").decode().split()
                served = TCPStore(host, int(port), len(pair), False, timeout, wait_for_workers=False)
            return measure_reduction(
                served, rank, len(pair), nbytes=settings.nbytes, timeout_secs=settings.timeout_secs
            )
        except (RuntimeError, TimeoutError, OSError, ValueError) as error:
            logger.info("the reduction with %s failed: %s", pair, str(error).splitlines()[0])
            return None

    # -- what the nodes tell each other --------------------------------------------------------------

    def _tell(self, what: str, value: Any) -> None:
        self._store.set(f"{what}/{self._index}", json.dumps(value))

    def _gather(self, what: str, nodes: Sequence[int]) -> dict[int, Any]:
        """What the nodes told, of those who did in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._settings.timeout_secs
        while True:
            for node in set(nodes) - found.keys():
                if (data := self._store.peek(f"{what}/{node}")) is not None:
                    found[node] = json.loads(data)
            if len(found) == len(nodes) or time.monotonic() > deadline:
                return dict(sorted(found.items()))
            time.sleep(_POLL_SECS)

    def _agree(self, what: str, make: Callable[[], Any]) -> Any:
        """What the first of all made of it."""
        _, held = self._store.compare_set(what, None, json.dumps(make()).encode())
        return json.loads(held or b"[]")
