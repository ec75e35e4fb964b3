"""What nodes tell of themselves, and what that makes of the job: the tolerance that is left counts who is gone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from reft.node.goodput import GoodputTimes
from reft.node.job_status import forget_replaced
from reft.node.report import (
    MAX_TEXT_CHARS,
    HealthSignal,
    NodeReport,
    ReportBoard,
    Shard,
    mark_aggregator_silence,
    mark_silence,
)
from reft.node.summary import is_well, summary
from reft.node.tolerance import tolerance_now

MOST_REPORT_BYTES = 4096


def node(
    name: str,
    *at: tuple[int, int, int],
    degrees: tuple[int, int, int] = (1, 3, 1),
    label: tuple[int, int] = (1, 7),
    scheme: str = "arc",
    gone: float | None = None,
    domain: str = "",
    **facts: object,
) -> NodeReport:
    shards = tuple(
        Shard(
            at=a, degrees=degrees, label=label, scheme=scheme, committed=True, sealed_unix_secs=50.0
        )
        for a in at
    )
    return NodeReport(
        node=name, domain=domain or name, shards=shards, offline_unix_secs=gone, **facts
    )


def three(**changes: object) -> list[NodeReport]:
    return [node(f"n{d}", (0, d, 0), **changes) for d in range(3)]


@pytest.mark.parametrize(
    ("scheme", "whole"), [("none", 0), ("arc", 1), ("aec", 1), ("arc:2", 2), ("rs:2", 2)]
)
def test_p4_what_is_left_counts_who_is_gone(scheme: str, whole: int) -> None:
    nodes = three(scheme=scheme)
    assert tolerance_now(nodes) == whole
    for gone in range(1, 4):
        nodes[gone - 1] = nodes[gone - 1].model_copy(update={"offline_unix_secs": 9.0})
        assert tolerance_now(nodes) == max(-1, whole - gone)


TWO_STAGES: Any = {"degrees": (2, 2, 1)}


TWO: Any = {"degrees": (1, 2, 1), "label": (2, 9)}


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        (
            [
                node("a", (0, 0, 0), domain="h"),
                node("b", (0, 1, 0), domain="h"),
                node("c", (0, 2, 0)),
            ],
            0,
        ),
        # Of two stages one has lost a member.
        (
            [
                *(
                    node(name, at, **TWO_STAGES)
                    for name, at in (("a", (0, 0, 0)), ("b", (0, 1, 0)))
                ),
                *(node("c", (1, 0, 0), **TWO_STAGES), node("d", (1, 1, 0), gone=1.0, **TWO_STAGES)),
            ],
            0,
        ),
        # Ranks of which nobody has told.
        (three()[:2], 0),
        (three()[:1], -1),
        # A job of another degree has its own placement.
        (
            [
                node("n0", (0, 0, 0), **TWO),
                node("n1", (0, 1, 0), **TWO),
                node("n2", (0, 2, 0), gone=1.0),
            ],
            1,
        ),
    ],
    ids=["one host", "smallest group", "one unknown", "two unknown", "another degree"],
)
def test_p4_what_is_left_is_that_of_the_weakest_group(nodes: list[NodeReport], left: int) -> None:
    assert tolerance_now(nodes) == left


def test_p4_who_has_taken_a_place_counts_once_it_holds_a_version() -> None:
    nodes = three()
    nodes[1] = nodes[1].model_copy(update={"offline_unix_secs": 9.0})
    assert tolerance_now([*nodes, node("n1.1")]) == 0
    back = [*nodes, node("n1.1", (0, 1, 0), label=(2, 8))]
    assert tolerance_now(back) == 1
    told = summary(ReportBoard(job_id="j", nodes=tuple(back)), 60.0)
    holds = {n["node"]: n["holds_shards"] for n in told["nodes"]}
    assert holds == {"n0": True, "n1": False, "n1.1": True, "n2": True}
    assert is_well(told), "a node that was replaced is nobody's trouble"


@pytest.mark.parametrize("scheme", ["", "raid5", "rs:9"])
def test_what_is_not_known_is_not_guessed(scheme: str) -> None:
    assert tolerance_now(three(scheme=scheme)) is None
    assert tolerance_now([]) is None


def test_a_node_whose_report_stands_still_is_offline_and_comes_back() -> None:
    seen, report = None, NodeReport(node="a", domain="a", number=1, signal=HealthSignal.COMPLETED)
    update = partial(mark_silence, elapsed_secs=1.0, offline_after_secs=6.0)
    for now in range(100, 107):
        seen = update(seen, report, now=float(now))
    assert seen.observed_signal is HealthSignal.COMPLETED
    for now in range(107, 110):
        seen = update(seen, report, now=float(now))
        assert (seen.observed_signal, seen.offline_unix_secs) == (HealthSignal.OFFLINE, 100.0)
    seen = update(seen, report.model_copy(update={"number": 2}), now=111.0)
    assert (seen.observed_signal, seen.silent_secs) == (HealthSignal.COMPLETED, 0.0)
    seen = update(seen, report.model_copy(update={"number": 3, "left": True}), now=112.0)
    assert (seen.observed_signal, seen.offline_unix_secs) == (HealthSignal.OFFLINE, 112.0)


def test_p4_a_node_that_is_quiet_is_not_counted_on_before_it_is_offline() -> None:
    nodes = three(number=1)
    quiet = None
    for _ in range(4):
        quiet = mark_silence(quiet, nodes[1], elapsed_secs=1.0, offline_after_secs=6.0, now=100.0)
    assert quiet is not None
    assert (quiet.observed_signal, quiet.quiet) == (HealthSignal.HEALTHY, True)
    told = summary(ReportBoard(job_id="j", nodes=(nodes[0], quiet, nodes[2])), 100.0)
    assert told["tolerance_left"] == 0
    assert "n1 has not reported for 3 s; it counts as lost until it does" in told["warnings"]
    assert not is_well(told)
    back = mark_silence(
        quiet,
        nodes[1].model_copy(update={"number": 2}),
        elapsed_secs=1.0,
        offline_after_secs=6.0,
        now=101.0,
    )
    assert not back.quiet


def test_an_aggregator_that_writes_no_board_is_quiet_to_the_others() -> None:
    nodes = tuple(three())
    seen = written = ReportBoard(job_id="j", aggregator="n0", unix_secs=50.0, nodes=nodes)
    for _ in range(4):
        seen = mark_aggregator_silence(seen, written, elapsed_secs=1.0, offline_after_secs=6.0)
    assert [n.quiet for n in seen.nodes] == [True, False, False]
    again = mark_aggregator_silence(
        seen,
        written.model_copy(update={"unix_secs": 51.0}),
        elapsed_secs=1.0,
        offline_after_secs=6.0,
    )
    assert [n.quiet for n in again.nodes] == [False, False, False]


def test_p9_of_nodes_that_were_replaced_only_some_are_kept() -> None:
    alive = three(label=(90, 900))
    gone = [node(f"g{i}", (0, 1, 0), label=(i, i), gone=1000.0 + i) for i in range(1, 60)]
    kept, forgotten = forget_replaced([*gone, *alive], 1100.0)
    assert {n.node for n in kept} == {"n0", "n1", "n2", *(f"g{i}" for i in range(44, 60))}
    assert forgotten == {f"g{i}" for i in range(1, 44)}
    assert forget_replaced([*gone, *alive], 9000.0)[0] == alive
    needed = [*alive[:2], alive[2].model_copy(update={"offline_unix_secs": 1.0})]
    assert forget_replaced(needed, 9000.0)[0] == needed


def test_p9_a_report_has_a_bound() -> None:
    long = "x1y2" * 10_000
    report = NodeReport(
        node="n" * 64,
        domain="d",
        doing=long,
        why=long,
        warnings=[long] * 100,
        shards=[
            Shard(at=(i, i, i), degrees=(99, 99, 99), label=(9, i), scheme="arc:2+aec")
            for i in range(16)
        ],
    )
    assert len(report.pack()) < MOST_REPORT_BYTES
    assert (len(report.why), len(report.warnings)) == (MAX_TEXT_CHARS, 6)
    assert NodeReport.unpack(report.pack()) == report


def test_the_speed_of_the_model_is_of_the_whole_job() -> None:
    def told(*counts: GoodputTimes) -> dict[str, object]:
        nodes = tuple(node(f"n{i}", trainers=2, counts=c) for i, c in enumerate(counts))
        since: dict[str, object] = summary(ReportBoard(job_id="job", nodes=nodes), 99.0)[
            "since_start"
        ]
        return since

    # The node of the first stage alone has seen tokens; the other one has counted for longest.
    longest = GoodputTimes(began_unix_secs=1.0, elapsed_secs=50.0, samples=100)
    found = told(longest, replace(longest, elapsed_secs=40.0, flops=8e15))
    assert found["tflops"] == pytest.approx(8e13 * (100 / 50) / 1e12)
    assert found["tflops_per_trainer"] == pytest.approx(8e13 * (100 / 50) / 1e12 / 4)
    assert told(longest)["tflops"] is None
