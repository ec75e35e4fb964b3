"""Bytes to the host and to other nodes, counted in real processes, are those of the formulas, to the byte."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_ranks
from tests.engine.traffic_job import GRAIN_BYTES, PROTECTIONS, STEPS

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("traffic_job.py")
MEMBERS = (3, pytest.param(4, marks=pytest.mark.nightly))

Ranks = list[dict[str, Any]]

PEERS = {"none": 0, "arc": 1, "arc:2": 2, "aec": 1, "rs:2": 2, "arc+aec": 2}
"""Ring peers that keep what a member alone has: as many as the scheme survives losses."""


def published(protection: str, d: int) -> dict[str, Fraction]:
    """Bytes to the host as parts of the replicated state: REFERENCE 1.4, 1.5, 1.7."""
    shard = Fraction(1, d)
    parts = {
        "none": {},
        "arc": {"copies": shard},
        "arc:2": {"copies": 2 * shard},
        "aec": {"parity": Fraction(1, d * (d - 1))},
        "rs:2": {"parity": Fraction(2, d * (d - 2))},
        "arc+aec": {"copies": shard, "parity": Fraction(1, d * (d - 2))},
    }[protection]
    if protection in ("rs:2", "arc+aec") and d == 3:
        # Stripes of one block: its parities are copies, and are kept as such.
        parts = {"copies": 2 * shard}
    return {"shard": shard, **parts}


@pytest.fixture(scope="module", params=MEMBERS, ids=lambda d: f"DP{d}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(JOB, tmp_path_factory.mktemp("traffic"), world=request.param)


def runs(ranks: Ranks) -> list[tuple[int, str, dict[str, Any]]]:
    """Every run of every rank: ZeRO stage, protection, what it found."""
    return [(zero, name, r[f"zero{zero}"][name]) for r in ranks for zero in (0, 1) for name in PROTECTIONS]


def state(kinds: dict[str, int]) -> dict[str, int]:
    """Without what the host knows and without checksums."""
    return {kind: n for kind, n in kinds.items() if kind not in ("host_state", "checksums")}


def test_bytes_to_the_host_and_to_other_nodes_equal_the_published_formulas(ranks: Ranks) -> None:
    d = len(ranks)
    for zero, name, run in runs(ranks):
        assert run["replicated"] % GRAIN_BYTES == 0
        wanted = {kind: part * run["replicated"] for kind, part in published(name, d).items()}
        if zero:
            assert run["owned"] > 0
            wanted["owned"] = Fraction(run["owned"])
        assert len(run["versions"]) == STEPS
        for version in run["versions"]:
            assert state(version["to_host"]) == wanted, (zero, name)
            # Replicated state never crosses nodes.
            sent = {"owned": PEERS[name] * run["owned"]} if zero and name != "none" else {}
            assert state(version["sent"]) == sent, (zero, name)


def test_host_state_and_checksums_go_to_as_many_peers_as_losses_are_survived(ranks: Ranks) -> None:
    for _, name, run in runs(ranks):
        assert run["tolerance"] == PEERS[name]
        blocks = run["blocks"]
        for version in run["versions"]:
            to_host, sent = version["to_host"], version["sent"]
            assert sent.get("host_state", 0) == PEERS[name] * to_host["host_state"]
            # Eight bytes for every replicated block where there is a parity; for every block that is sent,
            # eight to verify it with, and eight for the length of the host state.
            of_shard = 8 * blocks["replicated"] if "checksums" in blocks else 0
            assert to_host.get("checksums", 0) == of_shard
            facts = 8 * (1 + sum(n for section, n in blocks.items() if section != "replicated"))
            assert sent.get("checksums", 0) == PEERS[name] * (of_shard + facts)


def test_what_was_counted_is_what_was_moved(ranks: Ranks) -> None:
    """The counters against the calls that copy, and those that send, version by version."""
    for _, name, run in [*runs(ranks), *((0, "inter_node", r["inter_node"]) for r in ranks)]:
        for number, version in enumerate(run["versions"]):
            moved = {k: n for k, n in version["to_host"].items() if k not in ("host_state", "checksums")}
            # Tensors begin at multiples of 64 bytes in the image; what lies between is zeros, not copied.
            padding = sum(moved.values()) - run["moved"]["copied"][number]
            assert 0 <= padding < 64 * run["moved"]["tensors"][number], name
            assert sum(version["sent"].values()) == run["moved"]["sent"][number], name
        for direction in ("to_host", "sent"):
            kinds = {kind for v in run["versions"] for kind in v[direction]}
            summed = {kind: sum(v[direction].get(kind, 0) for v in run["versions"]) for kind in kinds}
            assert run["total"][direction] == summed


def test_the_baseline_inter_node_sends_all_that_it_keeps(ranks: Ranks) -> None:
    for r in ranks:
        for version in r["inter_node"]["versions"]:
            assert version["sent"]["mirror"] >= sum(version["to_host"].values())


def test_p1_losses_are_equal_to_the_bit(ranks: Ranks) -> None:
    for r in ranks:
        for zero in ("zero0", "zero1"):
            for name in PROTECTIONS:
                assert r[zero][name]["losses"] == r[zero]["plain"], (zero, name)
