"""Recovery between real processes: every byte arrives, damage is found and repaired, nobody hangs.

Four ranks are started once and run all scenarios of ``worker.py``; the last one kills a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reft.recover.decide import plan_recovery
from reft.recover.inventory import ArenaStore
from reft.recover.plan import RecoveryPlan
from tests import mpi
from tests.prefork import Popen

from .fleet import (
    DEAD,
    JOB,
    MORE,
    NEW,
    OLD,
    OTHER_LAYOUTS,
    RING,
    SCENARIOS,
    SECRET,
    WORLD_SIZE,
    prepare_memory,
    without,
)

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
ALIVE = [rank for rank in range(WORLD_SIZE) if rank != DEAD.dp]


@pytest.fixture(
    scope="module",
    params=[
        "sockets",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mpich", "openmpi")),
    ],
)
def over(request):
    return request.param


@pytest.fixture(scope="module")
def memory(over, tmp_path_factory):
    root = tmp_path_factory.mktemp("recovery")
    prepare_memory(root)
    return root


@pytest.fixture(scope="module")
def results(over, memory):
    command = [sys.executable, "-m", "recover.worker", str(memory)]
    path = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    if over == "sockets":
        over_sockets(command, {**os.environ, "OMP_NUM_THREADS": "1", **path}, memory)
    else:
        job = mpi.require(over).start([[*command, "mpi"]] * WORLD_SIZE, path)
        output, _ = job.communicate(timeout=540)
        assert job.returncode == 0, output[-8000:]
    found = [json.loads((memory / f"result-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {
        name: [of_rank.get(name) for of_rank in found] for name in ("stranger", *MORE, *SCENARIOS)
    }


def over_sockets(command, environment, root):
    logs = [(root / f"rank-{rank}.log").open("w") for rank in range(WORLD_SIZE)]
    ranks = [
        Popen([*command, str(rank)], env=environment, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=900) for process in ranks]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    text = "\n".join(
        f"--- rank {r}\n{(root / f'rank-{r}.log').read_text()[-4000:]}" for r in range(WORLD_SIZE)
    )
    assert codes == [-9 if rank == DEAD.dp else 0 for rank in range(WORLD_SIZE)], text


def restored(results, name, label=NEW):
    for result in results[name]:
        assert result["label"] == [label.incarnation, label.step]
        assert result["equal"], f"{name}: the restored bytes differ"
        # The window, or over MPI a block for each row and for their sum, where four ranks add up.
        assert result["buffer_bytes"] <= max(4096, (WORLD_SIZE + 1) * RING.block_bytes)
    groups = {(c.pp, c.tp): r for r, c in enumerate(SCENARIOS[name].placement.coordinates)}
    for rank, at in enumerate(SCENARIOS[name].placement.coordinates):
        assert results[name][rank]["repaired"] == results[name][groups[at.pp, at.tp]]["repaired"]
    return results[name]


def test_p11_a_message_that_does_not_carry_the_jobs_secret_is_refused(results):
    first, *others = [result["error"] for result in results["forged_message"]]
    assert (first, others) == ("AuthenticationError", [None] * 3)


def test_p11_a_gathering_with_a_rank_that_has_another_secret_is_refused_by_all(results, over):
    if over == "sockets":
        pytest.skip("they do not even connect")
    assert [result["error"] for result in results["stranger"]] == [
        "AuthenticationError"
    ] * WORLD_SIZE


def test_p5_a_rank_of_another_group_finds_what_is_corrupt_on_its_node(results):
    """Both groups plan again together; only the one that it is about reports it."""
    first, second, *others = restored(results, "corrupt_in_a_moved_group")
    for result in (first, second):
        assert "replicated block 0 of pp0.dp0.tp0" in "\n".join(result["repaired"])
        assert result["flaws"] == ["STORED"]
    assert all(result["repaired"] == [] for result in others)
    assert {result["rounds"] for result in results["corrupt_in_a_moved_group"]} == {2}


@pytest.mark.parametrize(
    "name", ["nothing_lost", "node_lost", "node_of_two_lost", "coordinates_moved", "groups_moved"]
)
def test_bytes_arrive_exactly_and_from_where_the_plan_says(results, name):
    for result in restored(results, name):
        assert result["bytes_from"] == result["planned"]
        assert result["repaired"] == []
        assert result["rounds"] == 1
        assert result["prepared"] == 1
        assert "recovery of step 6" in result["text"]
    total = results[name][0]["total"]
    if name == "coordinates_moved":
        assert total["peer"] > 0
        assert total["copy"] == 0
    if name == "groups_moved":  # every block comes from a rank of another sharding group
        assert all(result["bytes_from"]["local"] == 0 for result in results[name])
    if "lost" in name and name != "nothing_lost":
        assert total["copy"] > 0
        assert total["local"] > 0


@pytest.mark.parametrize(("name", "blocks"), [("decoded", "n2"), ("two_decoded", "n1 n2")])
def test_lost_shards_are_decoded_by_those_that_hold_their_parity(results, name, blocks):
    """Every rank gets the lost shards; each block was decoded once, and nobody holds more than the window."""
    found = restored(results, name)
    assert {result["rounds"] for result in found} == {2}
    assert all(result["bytes_from"]["parity"] > 0 for result in found)
    assert all(result["repaired"] == [] for result in found)
    shard = RING.sizes(0, 0).replicated_bytes // WORLD_SIZE
    # A newcomer takes its peers' shards from them, and only what is lost from parity.
    lost = len(blocks.split())
    assert abs(found[2]["bytes_from"]["parity"] - lost * shard) <= 2 * lost * 1024


FOUND = {
    # Where a term of a decode is corrupt, no parity is accused.
    "corrupt_term": (OLD, ["STORED"], "replicated block", "an older version"),
    "corrupt_parity": (NEW, None, "parity block 0 of pp0.dp0.tp0"),
    "corrupt_locally": (NEW, None, "host block 0 of pp0.dp0.tp0"),
    "arena_vanished": (NEW, None, "rank0-slot0.arena on node n3"),
    # As many nodes as are tolerated are lost: to refuse a parity, each of which is needed, loses the version.
    "corrupt_checksums": (NEW, ["STORED"], "checksums block 0 of pp0.dp3.tp0"),
    # Its own bytes are in order, here and on the way: only what is decoded from it is not.
    "parity_of_other_data": (
        *(NEW, {"OTHER_DATA"}, "restored from other blocks of its stripe"),
        "computed from other data than the version's, in rank0-slot0.arena",
    ),
    "shrunk_corrupt": (
        *(NEW, None, "host block 0 of pp0.dp2.tp0", "owned block 2 of pp0.dp1.tp0"),
        "restored from rank0-slot0.arena on node n",
    ),
    "merged_corrupt": (
        *(NEW, None, "host block 0 of pp0.dp2.tp0", "replicated block 0 of pp1.dp1.tp0"),
        "restored from rank1-slot0.arena on node n",
    ),
    "corrupt_at_source": (
        *(NEW, ["STORED"] * 2, "replicated block 0 of pp0.dp1.tp0, step 6 (incarnation 1)"),
        "corrupt or unreadable in rank0-slot0.arena on node n1; restored from rank0-slot0.arena on node n0",
        *("owned block 1 of pp0.dp0.tp0", "on node n0; restored from rank0-slot0.arena on node n3"),
    ),
    # It was damaged after it was verified.
    "corrupt_on_the_way": (
        NEW,
        ["IN_TRANSIT"],
        "corrupt on the way from rank0-slot0.arena on node n1",
    ),
    "older_version": (OLD, None, "an older version"),
    # Only the second group lost a node, and a copy there is corrupt: the first goes back with it.
    "older_in_one_group": (OLD, None),
}
ROUNDS = {"corrupt_parity": range(3, 9), "corrupt_at_source": (2, 3)}
ROUNDS |= dict.fromkeys(("corrupt_on_the_way", "older_in_one_group"), (2,))


@pytest.mark.parametrize("name", FOUND)
def test_p5_damage_is_found_replaced_and_reported(results, name):
    label, flaws, *texts = FOUND[name]
    for result in restored(results, name, label):
        if flaws is not None:
            assert type(flaws)(result["flaws"]) == flaws
        assert [text for text in texts if text not in "\n".join(result["repaired"])] == []
        assert label == NEW or "not used: step 6" in result["text"]
        assert result["rounds"] in ROUNDS.get(name, (result["rounds"],))
        assert result["prepared"] == (2 if name == "corrupt_on_the_way" else result["prepared"])


def test_p9_a_state_passes_through_a_small_window(results):
    newcomer = restored(results, "node_lost")[2]
    assert sum(newcomer["bytes_from"].values()) > 40_000
    assert 0 < newcomer["buffer_bytes"] <= 4096


@pytest.mark.parametrize("name", [name for name in OTHER_LAYOUTS if "corrupt" not in name])
def test_p3_a_version_of_another_layout_is_taken_up_and_stays_as_it_is(results, memory, name):
    """Whoever starts again before anything newer is committed finds it as it was."""
    old, new = OTHER_LAYOUTS[name].topology.degrees, SCENARIOS[name].placement.degrees
    for result in restored(results, name):
        assert result["written"] == str(old)
        assert result["again"]["equal"]
        assert result["again"]["written"] == str(old)
        assert result["bytes_from"] == result["planned"]
        assert f"written in {old}, resumed in {new}" in result["text"]
        assert f"{old} instead of {new}" in result["refused"]
    total = results[name][0]["total"]
    assert total["parity"] > 0 if name.endswith("decoded") else total["local"] > 0
    left = {
        p.name for node in ("n0", "n1", "n2", "n3") for p in (memory / name / node).glob("*.arena")
    }
    stages = range(2) if name.startswith("merged") else range(1)
    assert {n for n in left if not n.startswith("decoded")} == {
        f"rank{n}-slot0.arena" for n in stages
    }


def test_beyond_tolerance_all_ranks_refuse_alike_and_touch_nothing(results):
    first = results["beyond_tolerance"][0]
    assert "pp0.dp1.tp0" in first["refused"] or "pp0.dp2.tp0" in first["refused"]
    assert all(result == first for result in results["beyond_tolerance"])
    assert first["calls"] == first["prepared"] == 0


BREAKS = {
    "copy_fails": ("ValueError", "ValueError('no room"),
    "prepare_fails": ("ValueError", "ValueError('no room"),
    # Nothing was sent yet, so nobody waits for the 30 seconds that a silent peer is given (P9).
    "no_room_to_decode": ("OutOfMemoryError", "OutOfMemoryError"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_p6_an_error_on_one_rank_reaches_all(results, name):
    error, said = BREAKS[name]
    assert [r["error"] for r in results[name]] == ["TransferError", error, *["TransferError"] * 2]
    for rank in (0, 2, 3):
        assert f"rank 1 (pp0.dp1.tp0, node n1) failed with {said}" in results[name][rank]["message"]


def test_injected_fault_fires_once_in_the_middle(results):
    assert results["injected_raise"][1]["error"] == "InjectedFaultError"
    assert 0 < results["injected_raise"][1]["calls"] < results["injected_raise"][0]["calls"]
    assert all("InjectedFault" in results["injected_raise"][r]["message"] for r in (0, 2, 3))


COMPLETED = ("completed", "completed_again", "completed_beside")


@pytest.mark.parametrize("name", [*COMPLETED, "corrupt_while_completing"])
def test_p3_a_version_is_completed_where_its_node_is_new(results, name):
    """The newcomer's arena holds what its predecessor's held, and all others stay as they were: a second start
    finds everything at home."""
    for rank, result in enumerate(restored(results, name)):
        spoilt = name == "corrupt_while_completing" and rank == 1
        assert result["stored"] == {"state": "committed", "equal": True, "verified": not spoilt}
    before = 2 if name == "corrupt_while_completing" else 1
    assert {result["rounds"] for result in results[name]} == {before}
    for result in results[name]:
        after = result["after"]
        assert after["equal"]
        assert after["bytes_from"]["copy"] <= (0 if before == 1 else 1024)


@pytest.mark.parametrize("name", COMPLETED)
def test_p3_a_completed_version_survives_the_next_loss(results, memory, name):
    placement = SCENARIOS[name].placement
    for lost in sorted(set(placement.nodes)):
        left = [
            ArenaStore(memory / name / n, n, SECRET).inventory()
            for n in placement.nodes
            if n != lost
        ]
        plan = plan_recovery(left, without(placement, [lost]), job_id=JOB)
        assert isinstance(plan, RecoveryPlan), f"{lost} lost: {plan}"
        assert (plan.label, plan.committed) == (NEW, True)


@pytest.mark.parametrize("name", ["no_room_to_complete", "another_scheme"])
def test_p6_where_a_version_cannot_be_completed_it_is_restored_all_the_same(results, name):
    """It is then taken again, as a version of the new incarnation."""
    found = restored(results, name)
    assert found[DEAD.dp]["stored"]["state"] in ("none", "empty")
    assert [r["stored"]["state"] for i, r in enumerate(found) if i != DEAD.dp] == ["committed"] * 3


def test_p3_killed_while_it_completes_a_version_a_newcomer_leaves_nothing_that_is_read(
    results, memory, over
):
    """Its arena is torn; what the others hold is untouched, and recovers the same version."""
    if over != "sockets":
        pytest.skip("a rank that dies ends an MPI job")
    scenario = SCENARIOS["peer_killed"]
    nodes = scenario.placement.nodes
    inventories = [
        ArenaStore(memory / "peer_killed" / node, node, SECRET).inventory() for node in nodes
    ]
    torn = [r for i in inventories for r in i.arenas if not r.usable]
    assert [r.header.coordinate for r in torn] == [DEAD]
    plan = plan_recovery(inventories, scenario.placement, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    assert plan.label == NEW
    assert plan.committed
    assert all(
        fetch.node != nodes[DEAD.dp] for fetches in plan.fetches.values() for fetch in fetches
    )


def test_a_killed_peer_is_a_transfer_error_on_every_survivor(results, over):
    if over != "sockets":
        pytest.skip("a rank that dies ends an MPI job")
    assert results["peer_killed"][DEAD.dp] is None
    for rank in ALIVE:
        result = results["peer_killed"][rank]
        assert result["is_transfer_error"], result
        assert "a peer died" in result["message"]
