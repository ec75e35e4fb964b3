"""A job at ZeRO-3 goes on with fewer replicas and with more again: every element is where DeepSpeed expects it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import reft
from reft.engine.attach import find_session
from reft.state.adapters import adapter_for
from tests.engine import test_resizing as resizing
from tests.engine.ranks import be_a_rank, mse, run_life
from tests.engine.test_resizing import RANK, STEPS, WIDTH, config
from tests.machine import FP16_MISSING
from tests.relayout.test_jobs import stored

LATE = (0, 4)  # Steps that use a parameter, which the first step of every later life does not use
ON_HOST = {"device": "cpu"}


def zero3(precision: str = "", **zero: Any) -> dict[str, Any]:
    more = {precision: {"enabled": True}} if precision else {}
    return {**more, "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, **zero}}


CASES = {
    "fp32": zero3(sub_group_size=25),
    "bf16": zero3("bf16", sub_group_size=25, stage3_param_persistence_threshold=20),
    "fp16": zero3("fp16", stage3_param_persistence_threshold=0),
    "bf16-offload": zero3("bf16", offload_optimizer=ON_HOST),
    "bf16-offload-weights": zero3(
        "bf16",
        offload_optimizer=ON_HOST,
        offload_param=ON_HOST,
        sub_group_size=25,
        stage3_param_persistence_threshold=0,
    ),
    "bf16-secondary": zero3("bf16", zero_hpz_partition_size=2),
}
if FP16_MISSING:
    del CASES["fp16"]


class Net(nn.Module):
    """Frozen, tied and late weights, and one of fewer elements than there are replicas."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, 31), nn.Linear(WIDTH, 31, bias=False)
        self.again.weight = self.first.weight
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.second = nn.Linear(31, WIDTH)
        self.tiny, self.late = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(26))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu() + self.again(self.fixed(x)).tanh()
        found = self.second(hidden * (1 + self.tiny.sum()))
        if self.step in LATE:
            found = found * (1 + self.late.sum())
        return mse(found, x)


def make(case: str, **more: Any) -> Any:
    # DeepSpeed may gather secondary partitions of frozen and of other weights together, of which a step drops one kind.
    model = Net(frozen=case != "bf16-secondary")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "weight" not in n], "weight_decay": 0.0},
    ]
    settings = {**config(CASES[case]), "zero_force_ds_cpu_optimizer": False, **more}
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]
    for name, p in engine.module.named_parameters():
        for kind, part in parts_of(engine)[name].items():
            if kind in (
                "weight",
                "master",
            ):  # DeepSpeed leaves the padding of these as it was allocated
                part[max(0, p.ds_numel - RANK * len(part)) :] = torch.nan
    return engine


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        engine.module.step = engine.global_steps
        total = torch.zeros(1)
        for batch in list(resizing.batches(engine)):
            loss = engine(batch.to(next(engine.module.parameters()).dtype))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(f"{float(total).hex()} {engine.global_samples} {engine.get_lr()}")
    return losses


Parts = dict[str, torch.Tensor]


def parts_of(engine: Any) -> dict[str, Parts]:
    """This rank's parts of every parameter, where DeepSpeed has them."""
    wrapper, found, begin = engine.optimizer, {}, 0
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for name, p in engine.module.named_parameters():
        found[name] = {"weight": p.ds_tensor}
    for p in (p for group in wrapper.fp16_groups for p in group):
        group, at, numel = wrapper.grad_position[wrapper.get_param_id(p)]
        master, parts = wrapper.fp32_partitioned_groups_flat[group], found[names[id(p)]]
        parts["master"] = master.detach()[at : at + numel]
        parts["gradient"] = wrapper.grad_partitions_flat_buffer[begin : begin + numel]
        if wrapper.offload_optimizer:
            parts["gradient of the master"] = master.grad[at : at + numel]
        for key, value in wrapper.optimizer.state[master].items():
            parts[key] = value[at : at + numel] if value.dim() else value
        begin += numel
    return found


def whole(engine: Any) -> dict[str, Parts]:
    """All elements of every parameter, and of what the optimizer has for it."""
    found: dict[str, Parts] = {}
    sizes = {name: p.ds_numel for name, p in engine.module.named_parameters()}
    for name, parts in parts_of(engine).items():
        found[name] = {}
        for kind, part in parts.items():
            if not part.dim():
                found[name][kind] = part.clone()
                continue
            local = part.contiguous().view(torch.uint8)
            others = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(others, local)
            found[name][kind] = torch.cat(others).view(part.dtype)[: sizes[name]]
    return found


def put(engine: Any, state: dict[str, Parts]) -> None:
    for name, parts in parts_of(engine).items():
        for kind, part in parts.items():
            value = state[name][kind]
            if part.dim():
                size = part.numel()
                value = nn.functional.pad(value, (0, size * dist.get_world_size() - len(value)))
                value = value[RANK * size : (RANK + 1) * size]
            part.copy_(value)


def host_of(engine: Any) -> dict[str, Any]:
    groups = engine.optimizer.optimizer.param_groups
    return {
        "engine": {n: vars(engine)[n] for n in ("global_steps", "global_samples", "skipped_steps")},
        "scheduler": engine.lr_scheduler.state_dict(),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "scale": dict(vars(engine.optimizer.loss_scaler)),
    }


def reference(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    """A job of this degree that was given the same state."""
    torch.manual_seed(4711 + RANK)
    engine = make(case)
    train(engine, 1)  # the optimizer makes its state
    saved = torch.load(root / f"{case}-{life['until'] - STEPS}.pt", weights_only=False)
    host = saved["host"]
    put(engine, saved["state"])
    vars(engine).update(host["engine"])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    engine.lr_scheduler.load_state_dict(host["scheduler"])
    vars(engine.lr_scheduler)["_last_lr"] = [group["lr"] for group in host["groups"]]
    for live, group in zip(engine.optimizer.optimizer.param_groups, host["groups"], strict=True):
        live.update(group)
    vars(engine.optimizer.loss_scaler).update(host["scale"])
    engine.optimizer.parameter_offload.partition_all_parameters()
    for p in engine.module.parameters():
        p.ds_secondary_tensor = None
    losses = train(engine, life["until"])
    return {"losses": losses, "state": whole(engine), "host": host_of(engine)}


def differing(one: dict[str, Any], other: dict[str, Any], known: list[str] | None = None) -> Any:
    """What differs; ``known``: parameters whose gradients a version holds."""
    found = [key for key in one["host"] if one["host"][key] != other["host"][key]]
    for name, parts in one["state"].items():
        for kind, value in parts.items():
            compared = known is None or name in known or "gradient" not in kind
            if compared and not torch.equal(value, other["state"][name][kind]):
                found.append(f"{kind} of {name}")
    return found


def protected(root: Path, case: str, life: dict[str, Any]) -> Any:
    torch.manual_seed(100 + RANK)
    block = resizing.block(root, case)
    if life["disk"]:
        block["persist"] = {"dir": str(root / case / "persisted")}
    engine = make(case, reft=block)
    reft.attach(engine)
    return engine


def live(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    engine = protected(root, case, life)
    path, _ = engine.load_checkpoint(str(root / "none"))
    out: dict[str, Any] = {"path": path, "begins": engine.global_steps}
    sub_groups = [len(group) for group in engine.optimizer.fp16_groups]
    before = root / f"{case}-{life['until'] - STEPS}.pt"
    if before.exists():
        saved = torch.load(before, weights_only=False)
        known = adapter_for(engine).host_state()["idle"]
        now = {"state": whole(engine), "host": host_of(engine)}
        out |= {"restored": differing(saved, now, known), "known": known}
    losses = train(engine, life["until"])
    session = find_session(engine)
    session.flush(60)
    session.close()
    end = {"state": whole(engine), "host": host_of(engine)}
    dist.barrier()
    if RANK == 0:
        torch.save(end, root / f"{case}-{life['until']}.pt")
    dist.barrier()
    if before.exists():
        compared = reference(root, case, life)
        out |= {"losses": losses, "wanted": compared["losses"], "differs": differing(end, compared)}
    return out | {"sub_groups": sub_groups}


def save(root: Path, life: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's files, saved and then loaded at another degree."""
    engine = protected(root, "bf16", life)
    if life["saves"]:
        engine.load_checkpoint(str(root / "none"))
        train(engine, 1)
        engine.save_checkpoint(str(root / "files"))
        return {}
    before = whole(engine)
    with pytest.raises(reft.LayoutError) as refused:
        engine.load_checkpoint(str(root / "files"))
    after = whole(engine)
    same = all(torch.equal(before[n][k], after[n][k]) for n in before for k in ("weight",))
    return {"refused": str(refused.value), "same": same}


def main(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    if "saves" in life:
        return save(root, life)
    return {case: live(root, case, life) for case in life["cases"]}


def goes_on(root: Path, replicas: tuple[int, ...], *cases: str, disk: bool = False) -> None:
    before: list[dict[str, Any]] = []
    for number, world_size in enumerate(replicas, 1):
        until = number * STEPS
        ranks = run_life(
            Path(__file__), root, world_size, until=until, tag="", cases=cases, disk=disk
        )
        for case in cases:
            if disk:
                folders = sorted((root / case).glob(f"memory*-{until}/{case}"))
                stored(folders, root / case / "persisted")
            for rank in (found[case] for found in ranks if before):
                assert ("persisted" if disk else f"memory:{case}/") in rank["path"]
                assert rank["begins"] == until - STEPS
                assert rank["restored"] == [], case
                assert rank["known"] == ["late"], case
                assert len(rank["losses"]) == STEPS, case
                assert rank["losses"] == rank["wanted"], case
                assert rank["differs"] == [], case
                if "sub_group_size" in CASES[case]["zero_optimization"]:
                    assert rank["sub_groups"] != before[0][case]["sub_groups"], case
        before = ranks


@pytest.mark.process
def test_p3_one_replica_goes_on_with_what_two_had(tmp_path: Path) -> None:
    goes_on(tmp_path, (2, 1), "bf16")


@pytest.mark.integration
@pytest.mark.parametrize(
    "replicas", [(3, 2), pytest.param((3, 2, 3), marks=pytest.mark.nightly)], ids=str
)
def test_p1_p3_a_job_goes_on_with_fewer_replicas_and_with_more_again(
    tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    goes_on(tmp_path, replicas, *(case for case in CASES if case != "bf16-secondary"))


@pytest.mark.integration
def test_p1_p3_so_it_does_from_storage(tmp_path: Path) -> None:
    goes_on(tmp_path, (2, 3), "bf16", disk=True)


@pytest.mark.integration
def test_p7_deepspeeds_files_of_another_degree_are_refused_by_name(tmp_path: Path) -> None:
    for replicas in (2, 1):
        life = {"until": replicas, "tag": "", "disk": True, "saves": replicas == 2}
        ranks = run_life(Path(__file__), tmp_path, replicas, **life)
    assert "DeepSpeed's files of it at their own degree alone" in ranks[0]["refused"]
    assert ranks[0]["same"], "nothing was written"


@pytest.mark.nightly
def test_p1_p3_secondary_partitions_are_made_again(tmp_path: Path) -> None:
    goes_on(tmp_path, (2, 6), "bf16-secondary")


if __name__ == "__main__":
    be_a_rank(main)
