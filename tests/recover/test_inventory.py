"""Inventories cross hosts: compact, exact, authenticated (P11), and blind to nothing on the node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.control.wire import authenticate, check_authentic
from reft.errors import AuthenticationError
from reft.grid import Coordinate, Degrees
from reft.memory.header import ArenaState
from reft.recover.decide import plan_recovery
from reft.recover.inventory import Inventory, Place
from reft.recover.plan import NotRecoverable, RecoveryPlan

from .fleet import JOB, NEW, OLD, SECRET, Fleet, inventories, place

FLEET = Fleet(place(Degrees(1, 2, 1), "single"))


def test_round_trip_is_exact():
    states = {Coordinate(0, 0, 0): ArenaState.WRITING, Coordinate(0, 1, 0): ArenaState.SEALED}
    for inventory in inventories(FLEET.records(NEW, states) + FLEET.records(OLD, slot=1)):
        sent = replace(inventory, problems=("rank9-slot0.arena: torn",))
        assert Inventory.unpack(sent.pack()) == sent
    assert Inventory.unpack(Inventory("n", ()).pack()) == Inventory("n", ())


def test_p11_every_flipped_byte_and_every_other_secret_is_refused():
    purpose = b"reft-recovery-1"
    message = authenticate(inventories(FLEET.records(NEW))[0].pack(), SECRET, purpose)
    for at in range(len(message)):
        forged = bytearray(message)
        forged[at] ^= 1
        with pytest.raises(AuthenticationError, match="REFT_SECRET"):
            check_authentic(bytes(forged), SECRET, purpose)
    with pytest.raises(AuthenticationError):
        check_authentic(message, b"x" * 32, purpose)
    with pytest.raises(AuthenticationError):
        check_authentic(message[:10], SECRET, purpose)
    with pytest.raises(AuthenticationError):  # another kind of message of the same job
        check_authentic(message, SECRET, b"reft-profile-1")


def test_a_place_lists_arenas_and_names_unreadable_ones(tmp_path):
    FLEET.write(tmp_path, OLD, NEW)
    (tmp_path / "n0" / "rank7-slot0.arena").write_bytes(b"not an arena" * 1000)
    taken = [Place(tmp_path / node, node, SECRET).inventory() for node in ("n0", "n1")]
    assert [r.path for r in taken[0].arenas] == ["rank0-slot0.arena", "rank0-slot1.arena"]
    assert {r.header.label for r in taken[0].arenas} == {OLD, NEW}
    assert len(taken[0].problems) == 1
    assert "rank7-slot0.arena" in taken[0].problems[0]
    plan = plan_recovery(taken, FLEET.topology, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    assert plan.label == NEW
    assert any("rank7-slot0.arena" in note for note in plan.notes)

    assert Place(tmp_path / "missing", "n9", SECRET).inventory() == Inventory("n9", ())
    stranger = Place(tmp_path / "n0", "n0", b"y" * 32).inventory()
    assert stranger.arenas == ()
    assert len(stranger.problems) == 3
    assert isinstance(plan_recovery([stranger], FLEET.topology, job_id=JOB), NotRecoverable)
