"""Trains small models through real DeepSpeed engines and resumes them from captured state.

Run by ``test_engines.py`` as one process per rank: ``engine_cases.py OUT_DIR CASE...``. For every case:
train to step ``SNAP``, copy both images and the host state away, train on to ``END``; then build a fresh
engine with other random numbers, restore, train to ``END`` again and compare bit for bit (P8). Writes
``OUT_DIR/<case>.<rank>.json``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from reft.errors import LayoutError, UnsupportedStateError
from reft.hook.cpu import avoid_build_at_start
from reft.state import codec
from reft.state.adapters import adapter_for
from reft.state.catalogue import Manifest, SectionImage
from reft.state.host import capture_host_state, restore_data_free_state, restore_host_state
from tests.old_deepspeed import step_without_autograd

SNAP, END = 3, 7
LATE = 4
"""The step from which on the parameter ``late`` gets gradients: after the snapshot."""
OVERFLOWS = (2, 5)
VOCABULARY, WIDTH, BATCH = 19, 13, 3
GRADIENT_ACCUMULATION = 2

VERSION = tuple(int(n) for n in deepspeed.__version__.split(".")[:2])

# --- models --------------------------------------------------------------------------------------


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def head(embed: Embed, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embed.weight.t()


class Block(nn.Module):
    """Odd sizes (padding), dropout (random state), a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(hidden.float().mean(dim=(0, 1)).to(self.mean.dtype), 0.25)
        inner = torch.tanh(self.inner(hidden + self.mean.to(hidden.dtype)))
        tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
        with tracker.fork("model") if tracker.get_states() else nullcontext():
            return hidden + nn.functional.dropout(inner, 0.2)


class Net(nn.Module):
    """Tied, frozen, late, zero-size and transposed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.first, self.second = Block(), Block()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.late = nn.Parameter(torch.randn(5) * 0.1)
        if VERSION >= (0, 19):  # earlier ZeRO cannot hold a parameter without elements
            self.empty = nn.Parameter(torch.empty(0))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embed.weight
        self.step = 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.embed(tokens)))
        hidden = hidden + 0.1 * self.frozen(hidden)
        if self.step >= LATE:
            hidden = hidden * (1 + self.late.sum())
        return loss_fn(self.output(hidden), labels)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy times the factor in the last column, which is infinite to make an overflow."""
    targets = labels[:, :-1].long()
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss * labels[0, -1].float()


# --- optimizers ------------------------------------------------------------------------------------


class PythonFusedAdam(FusedAdam):
    """``FusedAdam`` without its compiled kernel: same class family, same keys of state and groups, so
    that DeepSpeed wraps it in ``FP16_Optimizer``."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 0.01,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = group["step"]
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                bias = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                update = bias * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as recipes that spare vectors from weight decay have them."""
    params = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Ramp:
    """A callable with state, for LambdaLR."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + 0.1 * epoch + 0.01 * self.calls)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(module), lr=3e-3, amsgrad=True)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(module), lr=3e-2, momentum=0.9, nesterov=True)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [Ramp() for _ in optimizer.param_groups])


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler
    return scheduler.SequentialLR(
        optimizer,
        [scheduler.ConstantLR(optimizer, 0.5, 2), scheduler.CosineAnnealingWarmRestarts(optimizer, 3)],
        milestones=[2],
    )


# --- cases ---------------------------------------------------------------------------------------

TORCH_ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 5}}
FP16 = {
    "enabled": True,
    "initial_scale_power": 8,
    "loss_scale_window": 2,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BF16 = {"enabled": True}

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "fp32_z0_torch_adam": {
        "config": {"optimizer": TORCH_ADAM, "scheduler": WARMUP, "gradient_clipping": 0.5}
    },
    "fp32_z0_client_adamw": {"client": adamw, "scheduler": lambda_lr},
    "fp32_z0_client_sgd": {"client": momentum, "scheduler": cosine, "tracker": True},
    "fp16_z0_unfused": {"config": {"optimizer": TORCH_ADAM, "fp16": FP16, "scheduler": WARMUP}},
    "fp16_z0_unfused_static": {
        "config": {"optimizer": TORCH_ADAM, "fp16": {"enabled": True, "loss_scale": 64}}
    },
    "fp16_z0_fused": {
        "config": {"fp16": FP16, "gradient_clipping": 1.0},
        "client": lambda m: PythonFusedAdam(groups(m)),
    },
    "bf16_z0_unfused": {"config": {"optimizer": TORCH_ADAM, "bf16": BF16}},
    "fp32_z1": {"config": {"optimizer": TORCH_ADAM, "zero_optimization": {"stage": 1}}},
    "fp16_z1": {
        "config": {"fp16": FP16, "zero_optimization": {"stage": 1, "round_robin_gradients": True}},
        "client": adamw,
        "scheduler": cosine,
    },
    "bf16_z1_fp32_accumulation": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
        }
    },
    "bf16_z1_bf16_accumulation": {
        "config": {
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
            "zero_optimization": {"stage": 1},
        },
        "client": adamw,
    },
    "fp32_z0_before_first_step": {
        "client": momentum,
        "scheduler": cosine,
        "snap": 0,
        "fresh_steps": 2,
    },
    "bf16_z1_before_first_step": {
        "config": {
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "client": adamw,
        "snap": 0,
        "fresh_steps": 2,
    },
    "disk_fp32_z0": {"client": adamw, "scheduler": lambda_lr, "disk": True},
    "disk_fp16_z0_fused": {
        "config": {"fp16": FP16},
        "client": lambda m: PythonFusedAdam(groups(m)),
        "disk": True,
    },
    "disk_bf16_z1": {
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
        "disk": True,
    },
    "pipe_fp32_z0": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "scheduler": WARMUP}},
    "pipe_fp32_z1": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "zero_optimization": {"stage": 1}}},
    "pipe_fp16_z0_unfused": {"pipe": True, "config": {"optimizer": TORCH_ADAM, "fp16": FP16}},
    "pipe_fp16_z1": {
        "pipe": True,
        "config": {"optimizer": TORCH_ADAM, "fp16": FP16, "zero_optimization": {"stage": 1}},
    },
    "pipe_bf16_z0": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "scheduler": WARMUP,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
        },
    },
    "pipe_bf16_z1_fp32_accumulation": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        },
    },
    "pipe_bf16_z1_bf16_accumulation": {
        "pipe": True,
        "config": {
            "optimizer": TORCH_ADAM,
            "bf16": BF16,
            "data_types": {"grad_accum_dtype": "bf16"},
            "zero_optimization": {"stage": 1},
        },
    },
}


def seed(value: int, case: Case) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    if case.get("tracker"):
        tracker.add("model", value + 1)


def build(case: Case) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": GRADIENT_ACCUMULATION,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        **copy.deepcopy(case.get("config", {})),  # DeepSpeed up to 0.18 takes keys out of it
    }
    if case.get("pipe"):
        layers = [
            TiedLayerSpec("embed", Embed, tied_weight_attr="weight"),
            *(LayerSpec(Block) for _ in range(2)),
            TiedLayerSpec("embed", Embed, forward_fn=head, tied_weight_attr="weight"),
        ]
        model: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    else:
        model = Net()
    client = case.get("client")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        optimizer=client(model) if client else None,
        lr_scheduler=case.get("scheduler"),
        config=config,
    )
    return step_without_autograd(engine)


def batches(step: int, replica: int, overflow: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of a step; equal in every run."""
    for micro in range(GRADIENT_ACCUMULATION):
        generator = torch.Generator().manual_seed(step * 1000 + micro * 100 + replica)
        tokens = torch.randint(VOCABULARY, (BATCH, 6), generator=generator)
        factor = float("inf") if overflow and step in OVERFLOWS and replica == 1 else 1.0
        yield (
            tokens[:, :-1].contiguous(),
            torch.cat([tokens[:, 1:].float(), torch.full((BATCH, 1), factor)], 1),
        )


def train(engine: Any, case: Case, upto: int) -> list[str]:
    """Train until ``global_steps == upto``; losses as exact hexadecimal."""
    losses = []
    overflow = "fp16" in case.get("config", {})
    while engine.global_steps < upto:
        step = engine.global_steps
        if case.get("pipe"):
            replica = engine.grid.get_data_parallel_rank()
            losses.append(float(engine.train_batch(batches(step, replica, overflow))).hex())
            continue
        engine.module.step = step
        for tokens, labels in batches(step, engine.global_rank, overflow):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss).hex())
    return losses


def read(image: SectionImage) -> torch.Tensor:
    """The image's bytes, read in pieces that respect no boundary."""
    copied = torch.full((image.nbytes,), 0x5A, dtype=torch.uint8)
    for start in range(0, image.nbytes, 777):
        image.read_into(start, copied[start : start + 777])
    return copied


def snapshot(engine: Any, adapter: Any) -> dict[str, Any]:
    images = adapter.images()
    return {
        "images": [read(image) for image in images],
        "manifest": Manifest.of(images).encode(),
        "host": codec.encode(capture_host_state(engine, adapter, {"epoch": 3}, [1, 2])),
    }


def restore(engine: Any, snap: dict[str, Any]) -> Any:
    adapter = adapter_for(engine)
    host = codec.decode(snap["host"])
    assert host["client"] == {"epoch": 3}
    assert host["data"] == [1, 2]
    addresses = [p.data_ptr() for p in engine.module.parameters()]
    images = adapter.prepare(Manifest.decode(snap["manifest"]), host["adapter"])
    for image, data in zip(images, snap["images"], strict=True):
        source = data.clone()
        for start in range(0, image.nbytes, 1001):
            image.write_from(start, source[start : start + 1001])
        source.fill_(0xEE)  # what was restored must not alias it
    restore_host_state(engine, adapter, host)
    assert addresses == [p.data_ptr() for p in engine.module.parameters()], "parameters were rebound"
    return adapter


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found = []
    for section, (x, y) in enumerate(zip(a["images"], b["images"], strict=True)):
        if not torch.equal(x, y):
            found.append(f"image {section}: first at byte {int((x != y).nonzero()[0])} of {len(x)}")
    if a["manifest"] != b["manifest"]:
        found.append("manifest")
    left, right = codec.decode(a["host"]), codec.decode(b["host"])
    found += list(_differing(left, right, "host"))
    if a["host"] != b["host"] and not found:
        found.append("host bytes")
    return found


def _differing(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        for key in a:
            yield from _differing(a[key], b[key], f"{path}.{key}")
    elif codec.encode(a) != codec.encode(b):
        yield f"{path}: {str(a)[:200]} != {str(b)[:200]}"


def links(engine: Any) -> bool:
    """Whether DeepSpeed's fragments of masters and optimizer state are views of the live ones."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    flats = [p for group in inner.param_groups for p in group["params"]]
    for _, p in engine.module.named_parameters():
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is None:
            continue
        address = mapping.hp_fragment.data_ptr()
        flat = next(m for m in flats if m.data_ptr() <= address < m.data_ptr() + m.nbytes)
        state = inner.state.get(flat, {})
        expected = {
            key: value.data_ptr() + address - flat.data_ptr()
            for key, value in state.items()
            if torch.is_tensor(value) and value.shape == flat.shape
        }
        if {k: v.data_ptr() for k, v in (mapping.optim_fragment or {}).items()} != expected:
            return False
    return True


def restore_from_disk(engine: Any, snap: dict[str, Any], directory: Path) -> Any:
    """DeepSpeed's own checkpoint, and from the host state what DeepSpeed does not save."""
    engine.load_checkpoint(str(directory))
    restore_data_free_state(engine, codec.decode(snap["host"]))
    return adapter_for(engine)


def run(case: Case, directory: Path) -> dict[str, Any]:
    seed(11 + int(os.environ["RANK"]), case)
    engine = build(case)
    adapter = adapter_for(engine)
    at = case.get("snap", SNAP)
    train(engine, case, at)
    before = adapter.signature()
    snap = snapshot(engine, adapter)
    unchanged = before == adapter.signature()
    if case.get("disk"):
        engine.save_checkpoint(str(directory))
    expected = train(engine, case, END)
    appeared = before != adapter.signature()
    final = snapshot(engine, adapter)
    skipped = engine.skipped_steps

    seed(4711 + int(os.environ["RANK"]), case)
    fresh = build(case)
    train(fresh, case, case.get("fresh_steps", 0))
    restored = restore_from_disk(fresh, snap, directory) if case.get("disk") else restore(fresh, snap)
    at_once = differences(snap, snapshot(fresh, restored))
    linked = links(fresh)
    resumed = train(fresh, case, END)
    return {
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": type(adapter.state.optimizer).__name__,
        "adapter": type(adapter).__name__,
        "bytes": [len(image) for image in snap["images"]],
        "replicated": [hashlib.sha256(bytes(s["images"][0].numpy())).hexdigest() for s in (snap, final)],
        "host_bytes": len(snap["host"]),
        "skipped_steps": skipped,
        "unchanged": unchanged,
        "appeared": appeared,
        "after_restore": at_once,
        "linked": linked,
        "losses": resumed,
        "expected": expected,
        "end": differences(final, snapshot(fresh, restored)),
        "names": [spec.name for spec in Manifest.decode(snap["manifest"]).replicated],
    }


# --- refusals ------------------------------------------------------------------------------------


class Secretive(torch.optim.SGD):
    """Keeps state that only its own state_dict knows."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "secret": 1}


class Forgetful:
    """A scheduler without a state_dict."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def get_lr(self) -> list[float]:
        return [0.1]


class Derived(deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer):
    """A subclass of a known wrapper."""


def refusal(engine: Any) -> str:
    try:
        adapter_for(engine)
    except UnsupportedStateError as error:
        return str(error)
    return "accepted"


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a live object set to ``value`` for a while."""
    missing = object()
    before = type(target) if name == "__class__" else vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(target, name)
        else:
            setattr(target, name, before)


def refusals() -> dict[str, str]:
    """What adapter_for says to engines that reft must not take."""
    said = {}
    base = {"optimizer": TORCH_ADAM}
    for stage in (2, 3):
        said[f"zero{stage}"] = refusal(build({"config": {**base, "zero_optimization": {"stage": stage}}}))
    said["secretive"] = refusal(build({"client": lambda m: Secretive(groups(m), lr=0.1)}))
    said["scheduler"] = refusal(build({"config": base, "scheduler": Forgetful}))

    engine = build({"config": {**base, "zero_optimization": {"stage": 1}}})
    said["known"] = refusal(engine)
    with changed(engine.optimizer, "__class__", Derived):
        said["derived"] = refusal(engine)
    for name, value in (
        ("has_moe_layers", True),
        ("sequence_parallel_size", 2),
        ("torch_autocast_z0_gradscaler", torch.amp.GradScaler("cpu")),
        ("quantizer", object()),
        ("optimized_linear_base_weight_sharding", True),
        ("optimizer", None),
    ):
        with changed(engine, name, value):
            said[name] = refusal(engine)
    for name, value in (
        ("cpu_offload", True),
        ("zenflow", True),
        ("torch_autocast_gradscaler", torch.amp.GradScaler("cpu")),
        ("loss_scaler", object()),
    ):
        with changed(engine.optimizer, name, value):
            said[name] = refusal(engine)
    said.update(misfits())
    return said


def misfits() -> dict[str, str]:
    """What restoring into a job of another layout says."""
    plain = build({"client": momentum})
    snap = snapshot(plain, adapter_for(plain))
    said = {}
    for name, case in (
        ("other optimizer", {"client": adamw}),
        (
            "other groups",
            {"client": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)},
        ),
    ):
        try:
            restore(build(case), snap)
        except LayoutError as error:
            said[name] = str(error)
    return said


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    avoid_build_at_start()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), verbose=False)
    rank = int(os.environ["RANK"])
    for name in names:
        try:
            result = refusals() if name == "refusals" else run(CASES[name], out / name)
        except Exception:
            result = {"error": traceback.format_exc()}
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            os._exit(1)  # the peers may be waiting for this rank: end them too
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's groups take seconds to tear down


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
