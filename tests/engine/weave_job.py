"""Two pipeline stages under DeepSpeed's real PipelineEngine, with every variant, traced."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import schedule
from torch import nn

import reft
from reft.engine.deepspeed import session_of
from reft.engine.weave import CloseSnapshotWindow, OpenSnapshotWindow, TakeSnapshot
from reft.grid import Section
from reft.memory.arena import Arena, scan
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of

VARIANTS = ("has", "host", "host_device", "blocking", "inter_node")
SNAPSHOT_INSTRUCTIONS = (OpenSnapshotWindow, CloseSnapshotWindow, TakeSnapshot)
WIDTH, MICRO_BATCHES, STEPS = 384, 4, 14
CHUNK_BYTES = 64 * 1024
STAGED_STEPS = 40
MOST_STAGED_STEPS = 400
"""On a machine that is busy with other things it takes more steps until all has happened that is looked at."""


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
    """Chunks to host memory take longer, as from a device; those within it do not."""

    def slowed(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(secs)
            return original(*args, **kwargs)

        return call

    for name in ("copy", "copy_hashed", "drain"):
        setattr(engine, name, slowed(getattr(engine, name)))


class Witness:
    """Keeps the state of every version handed over; compares what is committed with it, byte by byte."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.states: dict[int, bytes] = {}
        self.compared: dict[int, bool] = {}
        self.handed_over_secs: dict[int, float] = {}
        self.told, session.worker.watchers.on_commit = session.worker.watchers.on_commit, self.committed
        self.handed_over, session.submit = session.submit, self.submit

    def submit(self, **options: Any) -> Any:
        image = self.session.state.adapter.images()[0]
        data = torch.zeros(image.nbytes, dtype=torch.uint8)
        for source, target in image.pieces_into(0, data):
            target.copy_(source.detach().reshape(-1).view(torch.uint8))
        step = int(self.session.engine.global_steps)
        self.states[step], self.handed_over_secs[step] = data.numpy().tobytes(), time.perf_counter()
        return self.handed_over(**options)

    def committed(self, label: Any) -> None:
        self.told(label)
        step = label.step
        if step not in self.states:
            return  # handed over before
        for _, arena in scan(self.session.memory.job_dir.path, self.session.memory.job_dir.secret):
            header = arena.header() if isinstance(arena, Arena) else None
            if header is not None and header.state.whole and header.label.step == step:
                entries = [e for e in header.entries if e.key.section is Section.REPLICATED]
                self.compared[step] = bool(entries) and all(
                    bytes(arena.read_block(e)) == self.states[step][e.start_bytes : e.start_bytes + e.nbytes]
                    for e in entries
                )


def drained_later(
    updates: Sequence[Sequence[float]], begins: Sequence[float], handed_over: Sequence[float]
) -> bool:
    """Whether the chunks of one version, which begin at these times, were copied before and after an update.
    ``updates``: begin and end of each. ``begins``: of the chunks of all versions that were copied in
    windows. ``handed_over``: when each committed version was."""
    for since, until in pairwise([*sorted(handed_over), float("inf")]):
        of_version = [begin for begin in begins if since <= begin < until]
        if of_version and any(min(of_version) < begin < max(of_version) for begin, _ in updates):
            return True
    return False


def everywhere(here: bool) -> bool:
    answer = torch.tensor([int(here)])
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


def staged(root: Path, name: str) -> dict[str, Any]:
    """Train a state that is too large for its windows; versions are staged and committed later."""
    engine = make()
    has = {"chunk_bytes": CHUNK_BYTES, "overflow": "staging", "compute_share": 0.0}
    session = reft.attach(engine, config=block(root, name, has=has))
    session.tracer.traces = deque(maxlen=MOST_STAGED_STEPS)
    updates = note_updates(engine)
    losses = train(engine, 2)
    witness = Witness(session)
    slow_link(session.copying.engine, 0.0003)
    session.copying.pacer.model.window = 1e8  # what it would learn in some more steps

    def facts() -> dict[str, Any]:
        chunks = [c for t in session.tracer.traces for c in t.chunks if c.tier == 1]
        compared = dict(witness.compared)
        handed_over = [witness.handed_over_secs[step] for step in compared]
        return {
            "compared": compared,
            "drained_later": drained_later(updates, [c.begin_secs for c in chunks], handed_over),
        }

    def all_seen() -> bool:
        found, stats = facts(), session.stats.to_json()
        seen = len(found["compared"]) >= 3 and found["drained_later"]
        return bool(seen and stats["staged"] and sum(stats["skipped"].values()))

    losses += train(engine, STAGED_STEPS)
    while not everywhere(all_seen()) and engine.global_steps < MOST_STAGED_STEPS:
        losses += train(engine, engine.global_steps + STAGED_STEPS // 4)
    session.worker.drain(60)
    plan = session.copying.pacer.plan
    result = {
        **facts(),
        "losses": losses,
        "steps": int(engine.global_steps),
        "stats": session.stats.to_json(),
        "overflow": None if plan is None else plan.overflow.value,
        "bytes": None if plan is None else plan.total_bytes,
    }
    session.close()
    return result


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
    out["staged"] = staged(root, "staged")
    steps = out["staged"]["steps"] + 3
    out["staged_resumed"] = resumed(root, "staged", "has", steps)
    out["long_reference"] = train(make(), steps)
    if DUAL:  # last: two stages on each rank
        out["dualpipev_reference"] = train(make("dualpipev"), STEPS + 3)
        out["dualpipev"] = traced(root, "dualpipev", "has", schedule_kind="dualpipev", compute_share=0.0)
        out["dualpipev_resumed"] = resumed(root, "dualpipev", "has", kind="dualpipev")
    none = traced(root, "none", "none")
    out["none"] = {"losses": none["losses"], "stats": none["stats"]}
    return out


if __name__ == "__main__":
    be_a_rank(main)
