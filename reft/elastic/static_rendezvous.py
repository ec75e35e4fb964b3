"""TorchElastic's ``static`` rendezvous over reft's store."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from reft.elastic.handler import LOOPBACK
from reft.store.rendezvous_store import RendezvousStore


class StaticRendezvous(RendezvousHandler):
    """A fixed set of nodes, numbered by ``--node-rank``.

    Args:
        store: of the job, served by node 0.
        rank: of this node.
        size: number of nodes.
        run_id: of the job.
    """

    def __init__(self, store: RendezvousStore, rank: int, size: int, run_id: str) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._run_id = run_id

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store: Any = self._store.with_prefix(f"run/{self._run_id}")
        return RendezvousInfo(store, self._rank, self._size, LOOPBACK)

    def is_closed(self) -> bool:
        return False

    def refuse_size(self) -> bool:
        return False

    def goes_on_without(self, gone: int) -> bool:
        return not gone

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    is_spare = is_leaving = is_scaled_down = is_left_by_silent = False
    is_whole = has_place = True
    is_full = False
    left: frozenset[int] = frozenset()
    fitting: tuple[int, ...] = ()
    newest_incarnation = 0
    incarnation = 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
