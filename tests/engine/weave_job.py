"""Two pipeline stages under DeepSpeed's real PipelineEngine, with every variant, traced."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import schedule
from torch import nn

import reft
from reft.engine.deepspeed import session_of
from reft.engine.weave import CloseSnapshotWindow, OpenSnapshotWindow, TakeSnapshot
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of

VARIANTS = ("has", "host", "host_device", "blocking", "inter_node")
SNAPSHOT_INSTRUCTIONS = (OpenSnapshotWindow, CloseSnapshotWindow, TakeSnapshot)
WIDTH, MICRO_BATCHES, STEPS = 384, 4, 14
CHUNK_BYTES = 64 * 1024


class GPipe(schedule.PipeSchedule):
    """All forwards, then all backwards: a schedule that DeepSpeed does not know. Its last stage keeps one
    loss only, so there a backward follows its forward at once."""

    def steps(self) -> Iterator[list[Any]]:
        last = self.is_last_stage
        for m in range(self.micro_batches):
            yield [schedule.RecvActivation(m)] if not self.is_first_stage else []
            yield [schedule.LoadMicroBatch(m), schedule.ForwardPass(m)]
            yield [schedule.BackwardPass(m)] if last else [schedule.SendActivation(m)]
        for m in range(self.micro_batches):
            yield [] if last else [schedule.RecvGrad(m), schedule.BackwardPass(m)]
            yield [schedule.SendGrad(m)] if not self.is_first_stage else []
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        return int(self.micro_batches)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear(x).tanh())


DUAL = importlib.util.find_spec("deepspeed.runtime.pipe.dualpipev") is not None
"""Whether this DeepSpeed has a DualPipeV engine."""


def make(kind: str = "1f1b", stages: int = 2) -> Any:
    torch.manual_seed(7)
    made: Any = PipelineModule
    if kind == "dualpipev":
        made = importlib.import_module("deepspeed.runtime.pipe.dualpipev").DualPipeVModule
    model = made(
        [LayerSpec(Block) for _ in range(8)],
        num_stages=stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 48,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "steps_per_print": None,
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    # The engine makes its schedule anew for every step, in its own module's terms (all releases alike).
    pipe_engine.schedule = SimpleNamespace(
        **{**vars(schedule), **({"TrainSchedule": GPipe} if kind == "gpipe" else {})}
    )
    torch.manual_seed(100 + int(os.environ["RANK"]))
    return engine


def batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        x = torch.randn(48, WIDTH, generator=generator)
        yield x, x.flip(0)


def train(engine: Any, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        losses.append(float(engine.train_batch(batches(engine.global_steps))).hex())
    return losses


def block(root: Path, name: str, **options: Any) -> dict[str, Any]:
    return block_of(root, name, allow_unprotected=True, **options)


def note_updates(engine: Any) -> list[tuple[float, float]]:
    inner, began, seen = engine.optimizer, [], []
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    # Behind reft's own hook, which is the fence.
    inner.register_step_pre_hook(lambda *_: began.append(time.perf_counter()))
    inner.register_step_post_hook(lambda *_: seen.append((began[-1], time.perf_counter())))
    return seen


def slow_link(engine: Any, secs: float) -> None:
    """Chunks take longer, as from a device."""

    def slowed(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(secs)
            return original(*args, **kwargs)

        return call

    for name in ("copy", "copy_hashed"):
        setattr(engine, name, slowed(getattr(engine, name)))


def traced(
    root: Path,
    name: str,
    variant: str,
    *,
    schedule_kind: str = "1f1b",
    stages: int = 2,
    link_secs: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    engine = make(schedule_kind, stages)
    has = {"has": {"chunk_bytes": CHUNK_BYTES, **options}} if variant == "has" else {}
    session = reft.attach(engine, config=block(root, name, variant=variant, **has))
    session.tracer.traces = deque(maxlen=100)
    if link_secs:
        slow_link(session.copying.engine, link_secs)
    updates = note_updates(engine)
    losses = train(engine, STEPS)
    evaluated = float(engine.eval_batch(batches(99)))
    session.worker.drain(60)
    plan, stats = session.copying.pacer.plan, session.stats.to_json()
    kind = GPipe if schedule_kind == "gpipe" else schedule.TrainSchedule
    expected = kind(micro_batches=engine.micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)
    result = {
        "losses": losses,
        "evaluated": evaluated,
        "traces": [asdict(t) for t in session.tracer.traces],
        "updates": updates,
        "fence_within": session.fence.is_within,
        "stats": stats,
        "names": [type(c).__name__ for step in expected for c in step],
        "plan": None if plan is None else {str(t): n for t, n in plan.tier_bytes.items()},
        "positions": [] if plan is None else [p.position for p in plan.windows],
        "estimator": None if plan is None else plan.estimator,
        "without_copies_secs": None
        if plan is None
        else plan.step_secs - sum(p.length_secs for p in (*plan.windows, *plan.computing)),
    }
    session.close()
    return result


def resumed(
    root: Path, name: str, variant: str, steps: int = STEPS + 3, kind: str = "1f1b"
) -> dict[str, Any]:
    """Another incarnation: what the variant left in memory, and the losses from there on."""
    engine = make(kind)
    session = reft.attach(engine, config=block(root, name, variant=variant))
    path, _ = engine.load_checkpoint(str(root / "none"))
    losses = train(engine, steps)
    session.close()
    return {"path": path, "losses": losses}


def main(root: Path) -> dict[str, Any]:
    plain = make()
    out: dict[str, Any] = {"reference": train(plain, STEPS + 3)}
    out["class_map"] = not set(SNAPSHOT_INSTRUCTIONS) & set(type(plain)._INSTRUCTION_MAP)
    out["inert"] = session_of(plain) is None and "_INSTRUCTION_MAP" not in vars(plain)
    out["variants"] = {v: traced(root, v, v) for v in VARIANTS}
    out["resumed"] = {v: resumed(root, v, v) for v in VARIANTS}
    out["gpipe_reference"] = train(make("gpipe"), STEPS)
    out["gpipe"] = traced(root, "gpipe", "has", schedule_kind="gpipe")
    for windows in ("analytic", "paper"):
        out[windows] = traced(root, windows, "has", windows=windows)
    out["linked_reference"] = train(make(stages=1), STEPS)
    # Two replicas of one stage, whose only waits are reductions, and a state that fits no window.
    slow = {"stages": 1, "link_secs": 0.0003, "compute_share": 0.0}
    for separate in (True, False):
        found = traced(root, f"linked{separate}", "has", separate_links=separate, **slow)
        out.setdefault("linked", {})[str(separate)] = found
    if DUAL:  # last: two stages on each rank
        out["dualpipev_reference"] = train(make("dualpipev"), STEPS + 3)
        out["dualpipev"] = traced(root, "dualpipev", "has", schedule_kind="dualpipev", compute_share=0.0)
        out["dualpipev_resumed"] = resumed(root, "dualpipev", "has", kind="dualpipev")
    none = traced(root, "none", "none")
    out["none"] = {"losses": none["losses"], "stats": none["stats"]}
    return out


if __name__ == "__main__":
    be_a_rank(main)
