"""Two ranks that capture their state, train on, put it into a model that was made anew, and train the same steps again:
prints what differs, by kind of training."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups

from megatron_patches.core.adapter import MegatronAdapter
from megatron_patches.core.engine import MegatronEngine
from reft.state.catalogue import Manifest
from reft.state.codec import decode, encode
from tests.megatron_core.cpu import compute_on_cpu
from tests.megatron_core.job import MICRO_BATCHES, build, seed

KINDS = [
    {"dtype": dtype, "distributed": distributed, "overlap": overlap, "experts": experts, "frozen": frozen}
    for dtype, distributed, overlap, experts, frozen in (
        ("fp32", False, False, 0, ["linear_proj"]),
        ("fp32", True, True, 0, []),
        ("bf16", False, False, 4, []),
        ("bf16", True, False, 4, ["linear_proj", "local_experts.0"]),
        ("bf16", True, True, 0, []),
        ("fp16", False, False, 0, []),
        ("fp16", True, True, 4, []),
    )
]


def differences(kind: dict[str, Any], expert_degree: int) -> list[str]:
    args = argparse.Namespace(pp=1, vpp=1, tp=1, ep=expert_degree, layers=2, **kind)
    seed(7)
    training = build(args)
    training.train(3)
    engine = MegatronEngine(training.chunks, training.optimizer, training.scheduler, MICRO_BATCHES)
    images = engine.adapter.images()
    manifest = Manifest.of(images).encode()
    kept = [torch.empty(image.nbytes, dtype=torch.uint8) for image in images]
    for image, data in zip(images, kept, strict=True):
        image.read_into(0, data)
    host = encode(engine.capture(training.client_state))
    training.train(6)
    wanted = training.state()

    seed(8)
    again = build(args)
    again.train(1)  # it has state of its own already, and weights are under way
    engine = MegatronEngine(again.chunks, again.optimizer, again.scheduler, MICRO_BATCHES)
    state = decode(host)
    for image, data in zip(
        engine.adapter.prepare(Manifest.decode(manifest), state["adapter"]), kept, strict=True
    ):
        image.write_from(0, data)
    engine.restore(state)
    again.iteration, again.consumed = state["client"]["iteration"], state["client"]["consumed"]
    again.losses.clear()
    again.train(6)
    found = again.state()
    names = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    names += [f"{name} moved unseen" for name in moved_unseen(engine.adapter, again.chunks)]
    return names + ([] if again.losses == training.losses[3:] else ["losses"])


def moved_unseen(adapter: MegatronAdapter, chunks: list[Any]) -> list[str]:
    """Frozen parameters whose tensor can be another one without the adapter's signature telling so."""
    unseen = []
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            before = adapter.signature()
            if not p.requires_grad:
                p.data = p.data.clone()
                unseen += [name] if adapter.signature() == before else []
    return unseen


def main() -> None:
    compute_on_cpu()
    dist.init_process_group("gloo")
    groups.initialize_model_parallel(expert_model_parallel_size=2)
    for kind in KINDS:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, differences(kind, 2 if kind["experts"] else 1))
        if dist.get_rank() == 0:
            print(json.dumps([kind, found]), flush=True)


if __name__ == "__main__":
    main()
