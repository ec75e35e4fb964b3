"""Carries out what a node does in the rendezvous, step by step, until it is where it wants to be."""

from __future__ import annotations

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

from reft.elastic.shared_state import StateHolder, limited, look_secs


class RendezvousExecutor(_DistributedRendezvousOpExecutor):
    """TorchElastic's, which looks once a second: gathering takes several looks, one after the other, while
    the whole job waits. This one looks more often where there are not hundreds of nodes to do so. A round
    is complete with as many nodes as were asked for.

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
