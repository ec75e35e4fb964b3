"""Which flipped bits are found, by what, within how many versions; or steps without one, of every
optimizer.

    .venv/bin/python benchmarks/corruption.py [--undisturbed STEPS]

A bit flips on one rank, in the mantissa of a number or the highest of its exponent. A version is
taken every step until one is refused or all blocks had their turn. Then checksums are looked at as
in a recovery, the state is set back, and the next version has to be committed. DeepSpeed's own
clipping of gradients stays on.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from datetime import date
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from common import enter_worker, launch, leave_worker, parser, scratch, write_result
from results import machine

from reft.memory.arena import Arena, headers
from reft.verify.peers import TURNS
from tests.engine.ranks import Mlp, join_group

WRONG, WIDTH, INNER, BLOCK_BYTES = 1, 64, 1000, 4096
KINDS = ("weight", "moment", "gradient before the reduction", "gradient after it", "copy", "arena")
BITS = {"mantissa": 11, "exponent": 2}  # from the upper end of a number
ZERO, BF16 = {"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
ENGINES: dict[str, dict[str, Any]] = {
    **{"fp32 ZeRO-0": {}, "bf16 ZeRO-1": {**BF16, **ZERO}},  # in which bits are flipped
    "bf16 ZeRO-1, fp32 gradients": {**BF16, **ZERO, "data_types": {"grad_accum_dtype": "fp32"}},
    **{"fp16 ZeRO-0": FP16, "fp16 ZeRO-1": {**FP16, **ZERO}},
}


class Trainer:
    """One rank's engine, whose versions are all awaited, and what is to be flipped next."""

    def __init__(self, keys: dict[str, Any], peers: str) -> None:
        import reft
        from reft.engine.attach import find_session

        self.random, self.flips, self.bit, model = random.Random(7), "", 0, Mlp(WIDTH, INNER)
        verify = {"peers": peers, "suspects": 10**6}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "reft": {"enabled": True, "block_bytes": BLOCK_BYTES, "verify": verify},
            **keys,
        }
        self.engine = reft.initialize(
            model=model, model_parameters=[*model.parameters()], config=config
        )[0]
        self.engine.load_checkpoint("none")
        self.session = find_session(self.engine)
        self.worker = worker = self.session.worker
        self.submit, worker.submit, worker.callbacks.faults.reach = (
            worker.submit,
            self.take,
            self.reach,
        )
        inner = self.engine.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        updated = inner.param_groups[0]["params"]
        model.first.weight.register_hook(lambda gradient: self.flip(KINDS[2], gradient))
        inner.register_step_pre_hook(lambda *_: self.flip(KINDS[3], updated[0].grad))

    def flip(self, kind: str, numbers: Any) -> None:
        """A bit of ``numbers``, if that is due here."""
        if self.flips == kind and dist.get_rank() == WRONG:
            if isinstance(numbers, memoryview):
                numbers = torch.frombuffer(numbers[:BLOCK_BYTES], dtype=torch.int32)
            self.flips, size, flat = "", numbers.element_size(), numbers.view(-1)
            bit = 8 * size * (int(self.random.choice(flat.nonzero())) + 1) - self.bit
            flat.view(torch.uint8)[bit // 8] ^= 1 << bit % 8

    def take(self, request: Any) -> None:
        """Hand a version over, and wait until it is known what becomes of it."""
        request.required, self.request = True, request
        self.images = request.images.replicated, request.images.owned
        for image in self.images:
            for spec, offset in zip(image.specs, image.offsets, strict=True):
                kind = "moment" if "exp_avg" in spec.name else "weight"
                self.flip(kind, image.live(offset, offset + spec.nbytes)[0].view(spec.torch_dtype))
        self.submit(request)
        assert request.done.wait(300)

    def reach(self, point: str, step: int) -> None:
        if point == "before_seal":
            self.flip("copy", self.worker._writer.arena.data)

    def of_all(self, mine: str) -> str:
        told = [""] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return next(
            (kind for kind in ("peers differ", "not finite", *told) if kind and kind in told), ""
        )

    def step(self) -> str:
        """Train a step. Returns why its version was refused, on any rank; empty if it was
        committed."""
        generator = torch.Generator().manual_seed(10 * self.engine.global_steps + dist.get_rank())
        x = torch.randn(2, WIDTH, generator=generator).to(next(self.engine.module.parameters()))
        self.engine.backward(self.engine(x))
        self.engine.step()
        return self.of_all(self.request.given_up.kind if self.request.given_up else "")

    def recover(self) -> str:
        """What a recovery of the newest version finds."""
        folder, bad = self.session.memory.job_dir, 0
        for path, header in headers(folder.path, folder.secret):
            if header.label == self.request.label:
                with Arena.open(path, folder.secret, writable=True) as arena:
                    self.flip("arena", arena.data)
                    bad += sum(not arena.verify(entry) for entry in header.entries)
        return self.of_all("checksum" if bad else "")

    def trial(self, kind: str, bit: int, most: int) -> tuple[str, int]:
        """What finds a bit, and with which version from its own on."""
        kept = [(image, torch.zeros(image.nbytes, dtype=torch.uint8)) for image in self.images]
        for image, data in kept:
            image.read_into(0, data)
        self.flips, self.bit, versions, found = kind, bit, 0, ""
        while not found and versions < (1 if kind in KINDS[4:] else most):
            found, versions = self.step(), versions + 1
        found = found or self.recover() or "nothing"
        assert not (self.flips and dist.get_rank() == WRONG), f"no {kind} was flipped"
        for image, data in kept:
            image.write_from(0, data)
        assert not self.step(), "a version without a flip was refused"
        return found, versions


def run_rank(undisturbed: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names = list(ENGINES) if undisturbed else list(ENGINES)[:2]
    for peers, name in product(("full",) if undisturbed else ("full", "rotate"), names):
        os.environ["REFT_JOB_ID"] = f"job{len(rows)}"
        trainer = Trainer(ENGINES[name], peers)
        told = Counter(trainer.step() for _ in range(undisturbed or 3))
        row = {"peers": peers, "engine": name, "optimizer": type(trainer.engine.optimizer).__name__}
        rows.append({**row, "compared": told.pop("", 0), "alarms": told})
        for kind, bits in () if undisturbed else product(KINDS, BITS):
            found = [
                trainer.trial(kind, BITS[bits], 5 if peers == "full" else TURNS) for _ in range(3)
            ]
            by, versions = Counter(by for by, _ in found), sorted(number for _, number in found)
            rows.append({**row, "flipped": kind, "bit": bits, "found_by": by, "versions": versions})
        trainer.session.close()
    return rows


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument(
        "--undisturbed", type=int, default=0, metavar="STEPS", help="without a flip, at DP2"
    )
    options = made.parse_args()
    if options.worker:
        space = enter_worker(options.worker)
        join_group()
        write_result(space, {"rows": run_rank(options.undisturbed)})
        leave_worker()
    result: dict[str, Any] = {"benchmark": "corruption", "date": date.today().isoformat()}
    result |= {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    for replicas in [2] if options.undisturbed or options.quick else [2, 3, 4]:
        options.dp = replicas
        with scratch(options) as space:
            result[f"DP{replicas}"] = launch(options, space)[0][WRONG]["rows"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
