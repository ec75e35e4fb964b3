"""Data-parallel ranks, each on a node of its own, under every protection; what went where is counted twice:
by reft itself, and here at the calls that move the bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch

import reft
from reft.engine.deepspeed import session_of
from tests.engine.ranks import be_a_rank
from tests.engine.shared import Mlp, block_of, commit_every_version

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
    copy, copy_hashed, exchange, stats = engine.copy, engine.copy_hashed, wire.exchange, session.stats

    def counting_copy(pieces: Any, after: Any = None, encode: Any = None) -> Any:
        nbytes = sum(target.numel() for _, target in pieces)
        moved["copied"][stats.committed] += nbytes + (encode.args[-1].numel() if encode else 0)
        moved["tensors"][stats.committed] += len(pieces)
        return copy(pieces, after, encode)

    def counting_copy_hashed(cut: Any, chunks: tuple[int, int], *args: Any) -> Any:
        first, count = chunks[0], copy_hashed(cut, chunks, *args)
        rows = cut.ranges[int(cut.ends[first - 1]) if first else 0 : int(cut.ends[first + count - 1])]
        copied = rows[rows[:, 0] > 0]  # the others are hashed only
        moved["copied"][stats.committed] += int(copied[:, 2].sum())
        moved["tensors"][stats.committed] += len(copied)
        return count

    def counting_exchange(sends: Mapping[int, Sequence[torch.Tensor]], receives: Any) -> None:
        moved["sent"][stats.committed] += sum(t.nbytes for tensors in sends.values() for t in tensors)
        exchange(sends, receives)

    engine.copy, engine.copy_hashed = counting_copy, counting_copy_hashed
    wire.exchange = counting_exchange
    return moved


def watched(root: Path, name: str, zero: int, **options: Any) -> dict[str, Any]:
    engine = make(zero, block_of(root, name, block_bytes=16384, **options))
    engine.load_checkpoint(str(root / "none"))
    session = session_of(engine)
    assert session is not None
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


if __name__ == "__main__":
    be_a_rank(main)
