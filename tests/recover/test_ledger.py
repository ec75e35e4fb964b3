"""The ledger of refused sources: what arrived corrupt is looked at once, where it is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from reft.grid import Degrees
from reft.recover.decide import plan_recovery
from reft.recover.plan import RecoveryPlan
from reft.recover.stages import Flaw, Ledger

from .fleet import JOB, NEW, OLD, Fleet, inventories, place

FLEET = Fleet(place(Degrees(1, 3, 1), "single"))


def test_what_arrived_corrupt_earlier_and_is_not_used_any_more_is_let_be() -> None:
    """It may turn out corrupt where it is stored while a later plan, which does not use it, is carried out."""
    exchange: Any = SimpleNamespace(
        agree=lambda stage, doing: stage(), control=SimpleNamespace(swap=lambda bodies: {})
    )
    ledger = Ledger(exchange)
    plan = plan_recovery(inventories(FLEET.records(NEW)), FLEET.topology, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    fetch = plan.fetches[FLEET.topology.coordinates[0]][-1]
    refused = frozenset([fetch.source])
    parts = {(0, 0): (0, 1, 2)}
    assert ledger.share({(0, 0): plan}, parts, lambda: refused, Flaw.OTHER_DATA)
    peer = next(f for f in plan.fetches[FLEET.topology.coordinates[1]] if f.node != fetch.node)
    assert ledger.share({(0, 0): plan}, parts, lambda: frozenset([peer.source]), Flaw.IN_TRANSIT)
    without = plan_recovery(inventories(FLEET.records(NEW)), FLEET.topology, job_id=JOB, bad=ledger.bad)
    assert isinstance(without, RecoveryPlan)
    suspects = ledger.in_transit(peer.node, NEW)
    assert [f.source for f in suspects] == [peer.source]
    assert ledger.in_transit(peer.node, OLD) == []
    assert ledger.share({(0, 0): without}, parts, lambda: refused, Flaw.STORED)
    assert ledger.bad == refused | {peer.source}
