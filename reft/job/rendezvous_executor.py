"""Carries out what a node does in the rendezvous, step by step, until it is where it wants to be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
)

from reft.job.shared_state import (
    StateHolder,
    limited,
    look_secs,
    member_of,
    seats_of,
    secs_from_now,
    sizes_of,
)

logger = logging.getLogger(__name__)


class RendezvousExecutor(_DistributedRendezvousOpExecutor):
    """TorchElastic's, which looks once a second: gathering takes several looks, one after the other, while
    the whole job waits. This one looks more often where there are not hundreds of nodes to do so. A round
    is complete with as many nodes as were asked for, and as fit the job (:mod:`reft.job.sizes`).

    Args:
        node: this node.
        holder: its view of the shared state.
        settings: of the rendezvous.
    """

    def __init__(self, node: _NodeDesc, holder: StateHolder, settings: RendezvousSettings) -> None:
        super().__init__(node, holder, settings)
        self._given = settings

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """See TorchElastic.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: the deadline has passed.
        """
        while True:
            self._state_holder.sync()
            self._state = self._state_holder.state
            self._settings = limited(self._given, self._state)
            context = _RendezvousContext(self._node, self._state, self._settings)
            action = state_handler(context, deadline)
            if action is _Action.FINISH:
                return
            if action is _Action.ERROR_CLOSED:
                raise RendezvousClosedError
            if action is _Action.ERROR_TIMEOUT:
                raise RendezvousTimeoutError
            if action is _Action.SYNC:
                time.sleep(look_secs(self._given.max_nodes))
                continue
            getattr(self, f"_{action.name.lower()}")()
            if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and update_deadline is not None:
                deadline = update_deadline(self._settings.timeout.join)
            self._state_holder.mark_dirty()

    def _mark_rendezvous_complete(self) -> None:
        """With the nodes that fit: the others become spares. Without any, later."""
        state, sizes = self._state, sizes_of(self._state)
        if sizes is not None:
            there = {member_of(node): node for node in sorted(state.participants)}
            staying = sizes.staying(tuple(there), self._settings.min_nodes, self._settings.max_nodes)
            if staying is None:
                state.deadline = secs_from_now(self._settings.timeout.last_call)
                return
            for node in (node for member, node in there.items() if member not in staying):
                del state.participants[node]
                seats_of(state).pop(node, None)
                state.redundancy_list.add(node)
            if len(staying) < len(there):
                logger.warning(
                    "%d nodes have come and %d of them train: so many fit the job's layout and batch. The "
                    "others wait",
                    *(len(there), len(staying)),
                )
        super()._mark_rendezvous_complete()
