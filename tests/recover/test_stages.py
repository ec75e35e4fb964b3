"""Stages of a recovery in which a rank breaks off (P6), and sources that were refused (P5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from reft.grid import Degrees
from reft.naming import Label
from reft.recover import transfer
from reft.recover.decide import plan_recovery
from reft.recover.plan import RecoveryPlan
from reft.recover.recover import Flaw, Ledger, Participant
from reft.recover.transfer import BrokenOffError

from .fleet import JOB, NEW, OLD, Fleet, inventories, place

FLEET = Fleet(place(Degrees(1, 3, 1), "single"))


def execute(control: mock.MagicMock) -> Any:
    plan: Any = SimpleNamespace(label=Label(1, 7), fetches=mock.MagicMock())
    arenas = mock.MagicMock()
    arenas.items.side_effect = MemoryError("no room for buffers")
    return transfer.execute([plan], mock.MagicMock(), control, arenas, mock.MagicMock())


def test_p6_a_rank_whose_transfer_broke_off_does_not_wait_for_peers_that_wait_for_it() -> None:
    control = mock.MagicMock(rank=1)
    control.any_of.side_effect = control.gather_bytes.side_effect = AssertionError("it waits")
    ledger = Ledger(Participant(mock.MagicMock(), control, JOB, mock.MagicMock()))
    plans: Any = {(0, 0): SimpleNamespace(label=Label(1, 7))}
    with pytest.raises(BrokenOffError, match=r"rank 1: MemoryError: no room"):
        ledger.share(plans, {(0, 0): [0, 1]}, lambda: execute(control), Flaw.IN_TRANSIT)


def planned(bad: frozenset[Any] = frozenset()) -> RecoveryPlan:
    plan = plan_recovery(inventories(FLEET.records(NEW)), FLEET.topology, job_id=JOB, bad=bad)
    assert isinstance(plan, RecoveryPlan)
    return plan


def test_p5_what_arrived_corrupt_earlier_and_is_not_used_any_more_is_let_be() -> None:
    """It may turn out corrupt where it is stored while a later plan, which does not use it, is carried out."""
    exchange: Any = SimpleNamespace(
        agree=lambda stage, doing: stage(), control=SimpleNamespace(swap=lambda bodies: {})
    )
    ledger, parts, plan = Ledger(exchange), {(0, 0): (0, 1, 2)}, planned()
    first, second, _ = FLEET.topology.coordinates
    fetch = plan.fetches[first][-1]
    refused = frozenset([fetch.source])
    assert ledger.share({(0, 0): plan}, parts, lambda: refused, Flaw.OTHER_DATA)
    peer = next(f for f in plan.fetches[second] if f.node != fetch.node)
    assert ledger.share({(0, 0): plan}, parts, lambda: frozenset([peer.source]), Flaw.IN_TRANSIT)
    assert [f.source for f in ledger.in_transit(peer.node, NEW)] == [peer.source]
    assert ledger.in_transit(peer.node, OLD) == []
    assert ledger.share({(0, 0): planned(ledger.bad)}, parts, lambda: refused, Flaw.STORED)
    assert ledger.bad == refused | {peer.source}
