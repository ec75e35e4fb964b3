"""Bytes to the host and to other nodes, counted in real processes, are those of the formulas, to the byte."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import reft
from reft.engine.attach import find_session
from tests.engine.ranks import Mlp, be_a_rank, block_of, commit_every_version, run_ranks

pytestmark = pytest.mark.integration


PROTECTIONS = ("none", "arc", "arc:2", "aec", "rs:2", "arc+aec")
STEPS = 3
GRAIN_BYTES = 12 * 2 * 128
"""Of a replicated state of so many bytes every sub-block of three or four members is whole: nothing is padded."""


def make(zero: int, block: dict[str, Any] | None = None, **zero_options: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": None,
        "zero_optimization": {"stage": zero, **zero_options},
    }
    if zero:
        config["bf16"] = {"enabled": True}
    if block is not None:
        config["reft"] = block
    # Its replicated state, weights and moments in fp32 or the bf16 weights alone, is a multiple of GRAIN_BYTES.
    model = Mlp(64, 512, last_bias=False)
    initialize = deepspeed.initialize if block is None else reft.initialize
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any) -> list[str]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
        x = torch.randn(2, 64, generator=generator).to(next(engine.module.parameters()).dtype)
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    return losses


def count_moves(session: Any) -> dict[str, Counter[int]]:
    """Count, version by version, what really is copied and sent from now on."""
    moved: dict[str, Counter[int]] = {"copied": Counter(), "tensors": Counter(), "sent": Counter()}
    engine, wire = session.worker.copier.engine, session.worker.control
    copy, copy_hashed, exchange, stats = (
        engine.copy,
        engine.copy_hashed,
        wire.exchange,
        session.stats,
    )

    def counting_copy(pieces: Any, after: Any = None, encode: Any = None) -> Any:
        nbytes = sum(target.numel() for _, target in pieces)
        moved["copied"][stats.committed] += nbytes + (encode.args[-1].numel() if encode else 0)
        moved["tensors"][stats.committed] += len(pieces)
        return copy(pieces, after, encode)

    def counting_copy_hashed(cut: Any, chunks: tuple[int, int], *args: Any) -> Any:
        first, count = chunks[0], copy_hashed(cut, chunks, *args)
        rows = cut.ranges[
            int(cut.ends[first - 1]) if first else 0 : int(cut.ends[first + count - 1])
        ]
        copied = rows[rows[:, 0] > 0]  # the others are hashed only
        moved["copied"][stats.committed] += int(copied[:, 2].sum())
        moved["tensors"][stats.committed] += len(copied)
        return count

    def counting_exchange(sends: Mapping[int, Sequence[torch.Tensor]], receives: Any) -> None:
        # Masks of requested blocks and confirmations, a few bytes with memory of their own, do not
        # count; blocks are parts of an arena.
        moved["sent"][stats.committed] += sum(
            t.nbytes
            for tensors in sends.values()
            for t in tensors
            if t.dtype != torch.uint8 or t.nbytes < t.untyped_storage().nbytes()
        )
        exchange(sends, receives)

    engine.copy, engine.copy_hashed = counting_copy, counting_copy_hashed
    wire.exchange = counting_exchange
    return moved


def watched(root: Path, name: str, zero: int, **options: Any) -> dict[str, Any]:
    # Comparing peers reads state, but moves none: it would count as an encoded block here.
    block = block_of(root, name, block_bytes=16384, verify={"peers": "off"}, **options)
    engine = make(zero, block)
    engine.load_checkpoint(str(root / "none"))
    session = find_session(engine)
    assert session is not None
    # Nor is a block counted that is read twice, to see whether it was written meanwhile.
    session.worker.copier._read_again = lambda *_: None
    moved = count_moves(session)
    versions: list[dict[str, Any]] = []
    commit_every_version(session, lambda: versions.append(session.stats.traffic.to_json()))
    losses = train(engine)
    layout = session.worker.layout
    assert layout is not None
    sizes, mine = layout.plan.sizes, layout.mine
    stats = session.stats.to_json()
    session.close()
    return {
        "losses": losses,
        "versions": versions,
        "total": stats["total_traffic"],
        "device_bytes": session.stats.device_bytes,
        "moved": {what: [counted[n] for n in range(STEPS)] for what, counted in moved.items()},
        "replicated": sizes.replicated_bytes,
        "owned": sizes.owned_bytes[layout.member],
        "blocks": Counter(b.key.section.value for b in mine.own),
        "tolerance": session.tolerance,
    }


def main(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for zero in (0, 1):
        out[f"zero{zero}"] = {"plain": train(make(zero))}
        for number, name in enumerate(PROTECTIONS):
            found = watched(root, f"zero{zero}-{number}", zero, protection=name)
            out[f"zero{zero}"][name] = found
    out["inter_node"] = watched(root, "inter-node", 0, variant="inter_node")
    return out


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
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("traffic"), world=request.param)


def runs(ranks: Ranks) -> list[tuple[int, str, dict[str, Any]]]:
    """Every run of every rank: ZeRO stage, protection, what it found."""
    return [
        (zero, name, r[f"zero{zero}"][name])
        for r in ranks
        for zero in (0, 1)
        for name in PROTECTIONS
    ]


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
            moved = {
                k: n for k, n in version["to_host"].items() if k not in ("host_state", "checksums")
            }
            # Tensors begin at multiples of 64 bytes in the image; what lies between is zeros, not copied.
            padding = sum(moved.values()) - run["moved"]["copied"][number]
            assert 0 <= padding < 64 * run["moved"]["tensors"][number], name
            assert sum(version["sent"].values()) == run["moved"]["sent"][number], name
            assert run["device_bytes"] == sum(moved.values()), name
        for direction in ("to_host", "sent"):
            kinds = {kind for v in run["versions"] for kind in v[direction]}
            summed = {
                kind: sum(v[direction].get(kind, 0) for v in run["versions"]) for kind in kinds
            }
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


if __name__ == "__main__":
    be_a_rank(main)
