"""What is advised, from stragglers, losses, memory and speeds; and in the form of DLRover's operator."""

from __future__ import annotations

import json

import pytest

from reft.node.advice import (
    Advice,
    AdvisedAction,
    JobSituation,
    Memory,
    SpeedSample,
    advise,
    applicable,
    dropping_pays,
    estimate_gain,
    scale_plan,
)
from reft.node.memory_watch import MemoryUse
from reft.node.stragglers import SlownessKind, Straggler

ABCD = ("a", "b", "c", "d")


GIB = 2**30


def slow(name: str, nodes: tuple[str, ...], factor: float) -> Straggler:
    return Straggler(SlownessKind.NODE, name, (), nodes, 1, factor, 0.0, 0.0, "")


def memory(node: str, used_gib: int) -> Memory:
    return Memory(node, MemoryUse("the host", 0, used_gib * GIB, 100 * GIB))


SLOW_A = (slow("rank 0", ("a",), 3.0), slow("rank 1", ("a",), 2.0))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (JobSituation(ABCD), []),
        # A straggler: a spare takes its place; without one it goes if the others are faster alone.
        (
            JobSituation(ABCD, spares=("s",), slow=(slow("node b", ("b",), 1.1),)),
            [("replace", ("b",), 4)],
        ),
        (JobSituation(ABCD, slow=(slow("node b", ("b",), 1.2),)), [("replace", ("b",), 4)]),
        (JobSituation(ABCD, slow=(slow("node b", ("b",), 1.5),)), [("drop", ("b",), 3)]),
        (JobSituation(("a",), slow=(slow("node a", ("a",), 9.0),)), [("replace", ("a",), 1)]),
        (JobSituation(ABCD, slow=(slow("a link", ("a", "b"), 9.0),)), []),
        # The slowest gets the only spare.
        (
            JobSituation(
                ABCD, spares=("s",), slow=(slow("a", ("a",), 1.5), slow("b", ("b",), 3.0))
            ),
            [("replace", ("b",), 4), ("drop", ("a",), 3)],
        ),
        # Two slow ranks of one node take one spare.
        (
            JobSituation(ABCD, spares=("s", "t"), slow=(*SLOW_A, slow("b", ("b",), 1.5))),
            [("replace", ("a",), 4), ("replace", ("b",), 4)],
        ),
        # One node that is lost again and again.
        (JobSituation(ABCD, losses={"c": 3, "a": 1}), [("replace", ("c",), 4)]),
        (JobSituation(ABCD, losses={"c": 2}), []),
        (JobSituation(ABCD, losses={"c": 3, "a": 2, "b": 2}), []),
        (JobSituation(ABCD, losses={"gone": 5}), []),
        (
            JobSituation(ABCD, losses={"c": 3}, slow=(slow("c", ("c",), 2.0),)),
            [("drop", ("c",), 3)],
        ),
        # Memory that runs out.
        (
            JobSituation(ABCD, memory=(memory("a", 80), memory("b", 95))),
            [("memory", ("b",), 4)],
        ),
        # How many nodes: DLRover's threshold is a fifth.
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9)), most_nodes=8),
            [("add", (), 6)],
        ),
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.2)), most_nodes=5),
            [("add", (), 5)],
        ),
        (
            JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.19)), most_nodes=8),
            [("remove", (), 2)],
        ),
        (JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9)), most_nodes=4), []),
        (JobSituation(ABCD, speeds=(SpeedSample(2, 1.0), SpeedSample(4, 1.9))), []),
        (JobSituation(ABCD, speeds=(SpeedSample(4, 1.9), SpeedSample(2, 1.0)), most_nodes=8), []),
        (JobSituation(ABCD, speeds=(SpeedSample(4, 1.0),), most_nodes=8), []),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_is_advised(
    seen: JobSituation, wanted: list[tuple[str, tuple[str, ...], int]]
) -> None:
    assert [(str(a.action), a.nodes, a.workers) for a in advise(seen)] == wanted
    assert all(a.why and str(a) and json.dumps(a.to_json()) for a in advise(seen))


@pytest.mark.parametrize(
    ("spares", "advices", "chosen"),
    [
        ((), [("replace", ("b",), 4), ("drop", ("c",), 3)], 1),
        (("e",), [("memory", ("a",), 4), ("replace", ("b",), 4)], 1),
        (("e",), [("add", (), 6)], None),
        (("e", "f"), [("add", (), 6)], 0),
        ((), [("remove", (), 2)], 0),
        ((), [], None),
    ],
)
def test_what_needs_no_new_node_can_be_carried_out(
    spares: tuple[str, ...], advices: list[tuple[str, tuple[str, ...], int]], chosen: int | None
) -> None:
    given = [Advice(AdvisedAction(action), nodes, n, "why") for action, nodes, n in advices]
    found = applicable(JobSituation(ABCD, spares), given)
    assert found == (None if chosen is None else given[chosen])


def test_a_node_is_dropped_only_where_the_others_are_faster_without_it() -> None:
    """Simulated: a synchronous step takes as long as its slowest; a node less means more work for the others."""
    for nodes in (2, 3, 4, 8):
        for factor in (1.05, 1.2, 1.4, 1.9, 2.1, 3.0):
            with_it = max([1.0] * (nodes - 1) + [factor]) / nodes
            without = 1.0 / (nodes - 1)
            assert dropping_pays(nodes, factor) == (without < with_it * (1 - 1e-12))


def test_published_threshold_of_a_worker_more() -> None:
    """(change of speed / change of workers) / (speed / workers) >= 0.2."""
    assert estimate_gain(SpeedSample(10, 100.0), SpeedSample(12, 104.0)) == pytest.approx(0.2)
    one, two = SpeedSample(1, 10.0), SpeedSample(2, 20.0)
    assert estimate_gain(one, two) == estimate_gain(two, one) == 1


PUBLISHED_PLAN = {
    "apiVersion": "elastic.iml.github.io/v1alpha1",
    "kind": "ScalePlan",
    "metadata": {"labels": {"scale-type": "auto"}, "name": "deepctr-auto-job-scaleplan-2"},
    "spec": {
        "createPods": [],
        "ownerJob": "deepctr-auto-job",
        "removePods": [],
        "replicaResourceSpecs": {
            "worker": {"replicas": 4, "resource": {"cpu": "1", "memory": "4170Mi"}}
        },
    },
}
"""DLRover's example of a plan that its master writes; it also has the addresses of parameter servers."""


def test_published_scale_plan() -> None:
    more = Advice(AdvisedAction.ADD, (), 4, "")
    plan = scale_plan(
        "deepctr-auto-job", 2, [more], workers=2, spares=0, cpu=1, memory_bytes=4170 * 2**20
    )
    spec = dict(plan["spec"])
    assert (spec.pop("migratePods"), spec.pop("psHosts")) == (
        [],
        [],
    )  # of nothing, and no parameter servers
    assert plan | {"spec": spec} == PUBLISHED_PLAN


@pytest.mark.parametrize(
    ("spares", "removed", "migrated", "replicas"),
    [((), "b", "ca", 3), (("s",), "b", "ca", 4), (("s", "t"), "bc", "a", 4)],
)
def test_what_is_advised_becomes_a_plan(
    spares: tuple[str, ...], removed: str, migrated: str, replicas: int
) -> None:
    """b is slow, c is lost again and again, and a lacks memory. Without a spare b is dropped and has no successor;
    the successor of c comes before c goes. The first spare takes b's place, the second c's."""
    found = advise(
        JobSituation(
            ABCD,
            spares,
            slow=(slow("b", ("b",), 2.0),),
            losses={"c": 4},
            memory=(memory("a", 95),),
        )
    )
    spec = scale_plan(
        "job", 1, found, workers=4, spares=len(spares), cpu=8, memory_bytes=100 * GIB
    )["spec"]
    usual, more = ({"cpu": "8", "memory": memory} for memory in ("102400Mi", "121600Mi"))
    assert spec["createPods"] == []
    assert spec["removePods"] == [{"name": node, "type": "worker"} for node in removed]
    assert spec["replicaResourceSpecs"]["worker"] == {"replicas": replicas, "resource": usual}
    assert spec["migratePods"] == [
        {"name": node, "resource": more if node == "a" else usual} for node in migrated
    ]
