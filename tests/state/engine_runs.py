"""Trains an engine, copies its state away, restores it into another one, and compares (P8)."""

from __future__ import annotations

import copy
import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from engine_cases import Case
from engine_files import CLIENT, persisted_from, template_of, written_from
from engine_models import BATCH, VOCABULARY, Block, Embed, Net, head, loss_fn
from torch import nn

from reft.engine.protocol import find_coordinate
from reft.state import codec
from reft.state.adapters import adapter_for
from reft.state.blob import capture_host_state, restore_data_free_state, restore_host_state
from reft.state.catalogue import Manifest, SectionImage
from reft.storage.deepspeed_format import host_file_name, read_host_file
from tests.old_deepspeed import step_without_autograd

SNAP, END = 3, 7
OVERFLOWS = (2, 5)
GRADIENT_ACCUMULATION = 2


def seed(value: int, case: Case) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    if case.get("tracker"):
        tracker.add("model", value + 1)


def is_zero3(case: Case) -> bool:
    stage = case.get("config", {}).get("zero_optimization", {}).get("stage")
    return bool(stage == 3)


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
        model: nn.Module = PipelineModule(
            layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform"
        )
    else:
        init = deepspeed.zero.Init if case.get("zero_init") else nullcontext
        with init():
            model = Net(empty=not is_zero3(case))  # which ZeRO-3 cannot gather
        model.early, model.at_last = case.get("early", ()), case.get("at_last", ())
        if case.get("trains_all"):
            model.requires_grad_(True)
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
    for micro in range(GRADIENT_ACCUMULATION):
        generator = torch.Generator().manual_seed(step * 1000 + micro * 100 + replica)
        tokens = torch.randint(VOCABULARY, (BATCH, 6), generator=generator)
        factor = float("inf") if overflow and step in OVERFLOWS and replica == 1 else 1.0
        yield (
            tokens[:, :-1].contiguous(),
            torch.cat([tokens[:, 1:].float(), torch.full((BATCH, 1), factor)], 1),
        )


def train(engine: Any, case: Case, upto: int) -> list[str]:
    losses = []
    overflow = case.get("overflows", "fp16" in case.get("config", {}))
    while engine.global_steps < upto:
        step = engine.global_steps
        if case.get("pipe"):
            replica = engine.grid.get_data_parallel_rank()
            losses.append(float(engine.train_batch(batches(step, replica, overflow))).hex())
            continue
        engine.module.step = step
        for micro, (tokens, labels) in enumerate(batches(step, engine.global_rank, overflow), 1):
            engine.module.is_last = micro == GRADIENT_ACCUMULATION
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss).hex())
    return losses


def read(image: SectionImage) -> torch.Tensor:
    copied = torch.full((image.nbytes,), 0x5A, dtype=torch.uint8)
    for start in range(0, image.nbytes, 777):
        image.read_into(start, copied[start : start + 777])
    return copied


def snapshot(engine: Any, adapter: Any) -> dict[str, Any]:
    images = adapter.images()
    return {
        "images": [read(image) for image in images],
        "manifest": Manifest.of(images).encode(),
        "host": codec.encode(capture_host_state(engine, adapter, CLIENT, [1, 2])),
    }


def restore(engine: Any, snap: dict[str, Any]) -> Any:
    adapter = adapter_for(engine)
    host = codec.decode(snap["host"])
    assert host["client"] == CLIENT
    assert host["data"] == [1, 2]
    addresses = addresses_of(engine)
    images = adapter.prepare(Manifest.decode(snap["manifest"]), host["adapter"])
    for image, data in zip(images, snap["images"], strict=True):
        source = data.clone()
        for start in range(0, image.nbytes, 1001):
            image.write_from(start, source[start : start + 1001])
        source.fill_(0xEE)  # what was restored must not alias it
    restore_host_state(engine, adapter, host)
    assert addresses == addresses_of(engine), "parameters were rebound"
    return adapter


def addresses_of(engine: Any) -> list[int]:
    return [getattr(p, "ds_tensor", p).data_ptr() for p in engine.module.parameters()]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found = []
    for section, (x, y) in enumerate(zip(a["images"], b["images"], strict=True)):
        if not torch.equal(x, y):
            found.append(f"image {section}: first at byte {int((x != y).nonzero()[0])} of {len(x)}")
    if a["manifest"] != b["manifest"]:
        found.append("manifest")
    if a["host"] != b["host"]:
        left, right = codec.decode(a["host"]), codec.decode(b["host"])
        differing = [key for key in left if codec.encode(left[key]) != codec.encode(right.get(key))]
        found += [f"host.{key}: {left[key]} != {right.get(key)}"[:400] for key in differing] or [
            "host bytes"
        ]
    return found


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


def restore_from_disk(engine: Any, directory: Path) -> Any:
    """What was written from the version, by DeepSpeed; and from the host file what DeepSpeed does not save."""
    path, client = engine.load_checkpoint(str(directory))
    assert {key: client[key] for key in CLIENT} == CLIENT
    restore_data_free_state(
        engine, read_host_file(Path(path).parent / host_file_name(find_coordinate(engine)[0]))
    )
    return adapter_for(engine)


def files_of(
    engine: Any, case: Case, snap: dict[str, Any], template: bytes, root: Path
) -> dict[str, Any]:
    at, tag = find_coordinate(engine)[0], f"global_step{engine.global_steps}"
    engine.save_checkpoint(str(root / "saved"), client_state=CLIENT)
    torch.distributed.barrier()
    saved = root / "saved" / tag
    found = written_from(snap, template, at, saved, root / "rebuilt" / tag)
    if case.get("persist"):
        found["problems"] += persisted_from(snap, template, at, saved, root / "memory")
    return found


def watch(engine: Any, adapter: Any) -> list[str]:
    """What of every further step is as the fence within it needs it: the hooks of the innermost optimizer come,
    and nothing of the images changes before them; where they do not come, nothing changes at all."""
    said: list[str] = []
    original = engine._take_model_step
    images, before, hooks = [], [], 0

    def changed() -> bool:
        return any(not torch.equal(read(i), b) for i, b in zip(images, before, strict=True))

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal hooks
        # Copies stand for what a step writes before: they are made where it begins.
        images[:] = [i.with_copies(adapter.written_by_steps)[0] for i in adapter.images()]
        hooks = 0
        before[:] = [read(image) for image in images]
        result = original(*args, **kwargs)
        said.append(
            "hooks" if hooks else "changed without hooks" if changed() else "nothing changed"
        )
        return result

    def hook(*_: Any) -> None:
        nonlocal hooks
        if not hooks and changed():
            said.append("changed before the hooks")
        hooks += 1

    engine._take_model_step = step
    adapter.state.optimizer.register_step_pre_hook(hook)
    return said


def run(case: Case, directory: Path) -> dict[str, Any]:
    seed(11 + int(os.environ["RANK"]), case)
    engine = build(case)
    adapter = adapter_for(engine)
    at, coming = case.get("snap", SNAP), [adapter.coming_host_bytes()]
    train(engine, case, max(at - 1, 0))
    coming.append(adapter.coming_host_bytes())
    host = capture_host_state(engine, adapter, CLIENT, [1, 2])
    template = template_of(engine, adapter, codec.decode(codec.encode(host)))
    train(engine, case, at)
    before = adapter.signature()
    snap = snapshot(engine, adapter)
    unchanged = before == adapter.signature()
    manifest = Manifest.decode(snap["manifest"])
    files = files_of(engine, case, snap, template, directory)
    watched = watch(engine, adapter)
    expected = train(engine, case, END)
    appeared = before != adapter.signature()
    final = snapshot(engine, adapter)
    skipped = engine.skipped_steps

    seed(4711 + int(os.environ["RANK"]), case)
    fresh = build(case)
    train(fresh, case, case.get("fresh_steps", 0))
    restored = (
        restore_from_disk(fresh, directory / "rebuilt")
        if case.get("disk")
        else restore(fresh, snap)
    )
    at_once = differences(snap, snapshot(fresh, restored))
    linked = links(fresh)
    resumed = train(fresh, case, END)
    return {
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": type(adapter.state.optimizer).__name__,
        "adapter": type(adapter).__name__,
        "bytes": [len(image) for image in snap["images"]],
        "replicated": [
            hashlib.sha256(bytes(s["images"][0].numpy())).hexdigest() for s in (snap, final)
        ],
        "host_bytes": len(snap["host"]),
        "skipped_steps": skipped,
        "unchanged": unchanged,
        "files": files,
        "appeared": appeared,
        "coming": coming,
        "watched": watched,
        "after_restore": at_once,
        "linked": linked,
        "losses": resumed,
        "expected": expected,
        "end": differences(final, snapshot(fresh, restored)),
        "names": [spec.name for spec in manifest.replicated],
        "owned_names": [spec.name for spec in manifest.owned],
    }
