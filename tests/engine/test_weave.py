"""Woven schedules under DeepSpeed's real PipelineEngine: P1, P2, and that copies keep to the windows."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import schedule
from pydantic import TypeAdapter
from torch import nn

import reft
from reft.engine.attach import find_session
from reft.pacing.schedule import StepTrace
from reft.pacing.weave import CloseSnapshotWindow, OpenSnapshotWindow, WovenSchedule
from tests.engine.ranks import be_a_rank, block_of, run_ranks

VARIANTS = ("has", "host", "host_device", "blocking", "inter_node")
SNAPSHOT_INSTRUCTIONS = (OpenSnapshotWindow, CloseSnapshotWindow)
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
    session.flush(60)
    plan, stats = session.copying.pacer.plan, session.stats.to_json()
    kind = GPipe if schedule_kind == "gpipe" else schedule.TrainSchedule
    expected = kind(
        micro_batches=engine.micro_batches, stages=engine.num_stages, stage_id=engine.stage_id
    )
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
    out["inert"] = find_session(plain) is None and "_INSTRUCTION_MAP" not in vars(plain)
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
        out["dualpipev"] = traced(
            root, "dualpipev", "has", schedule_kind="dualpipev", compute_share=0.0
        )
        out["dualpipev_resumed"] = resumed(root, "dualpipev", "has", kind="dualpipev")
    none = traced(root, "none", "none")
    out["none"] = {"losses": none["losses"], "stats": none["stats"]}
    return out


Ranks = list[dict[str, Any]]
WAITING = ("Recv", "Send", "Reduce", "Aggregate")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("weave"))


def traces(run: dict[str, Any]) -> list[StepTrace]:
    return TypeAdapter(list[StepTrace]).validate_python(run["traces"])


def chunks_of(run: dict[str, Any], tier: int) -> list[Any]:
    return [c for t in traces(run) for c in t.chunks if c.tier == tier]


def beside_of(run: dict[str, Any], chunk: Any) -> list[Any]:
    instructions = (i for t in traces(run) for i in t.instructions)
    return [
        i for i in instructions if i.begin_secs < chunk.end_secs and chunk.begin_secs < i.end_secs
    ]


# -- the woven schedule itself ----------------------------------------------------------------------


def schedules() -> Iterator[schedule.PipeSchedule]:
    kinds = [
        schedule.TrainSchedule,
        schedule.InferenceSchedule,
        schedule.DataParallelSchedule,
        GPipe,
    ]
    for kind, stages, micro_batches in product(kinds, (1, 2, 4), (1, 3, 8)):
        yield from (kind(micro_batches, stages, s) for s in range(stages))
    if hasattr(schedule, "DualPipeVSchedule"):
        yield from (schedule.DualPipeVSchedule(8, 4, s) for s in range(4))


def test_weaving_leaves_the_training_instructions_as_they_are() -> None:
    """The same objects, steps and order, whatever the schedule's class."""
    for plain in schedules():
        expected = list(plain)
        names: list[str] = []
        recorded = _Recorded(plain, expected)
        woven = WovenSchedule(recorded, seen=names)
        steps = list(woven)
        kept = [[c for c in step if not isinstance(c, SNAPSHOT_INSTRUCTIONS)] for step in steps]
        assert [[id(c) for c in step] for step in kept] == [
            [id(c) for c in step] for step in expected
        ]
        assert names == [type(c).__name__ for step in expected for c in step]
        assert woven.num_pipe_buffers() == plain.num_pipe_buffers()
        assert woven.micro_batches == plain.micro_batches
        _check_places(steps)


class _Recorded:
    """A schedule whose instructions were made before, so that they can be told apart by identity."""

    def __init__(self, plain: Any, steps: list[list[Any]]) -> None:
        self._plain, self._steps = plain, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._steps)


def _check_places(steps: list[list[Any]]) -> None:
    position = 0
    for step in steps:
        for i, command in enumerate(step):
            if isinstance(command, OpenSnapshotWindow):
                assert command.window_id == position
                assert type(step[i + 1]).__name__.startswith((*WAITING, "CommitP2P"))
                assert type(step[i + 2]).__name__ == "CloseSnapshotWindow"
            elif not isinstance(command, SNAPSHOT_INSTRUCTIONS):
                position += 1


def test_windows_open_where_queued_transfers_are_carried_out_and_nowhere_else() -> None:
    """DualPipeV's sends and receives return at once; its commits wait, if anything was queued."""
    if not hasattr(schedule, "DualPipeVSchedule"):
        pytest.skip("this DeepSpeed has no DualPipeV")
    for stages, stage_id in ((2, 0), (2, 1), (4, 0), (4, 2), (4, 3)):
        names: list[str] = []
        woven = WovenSchedule(
            schedule.DualPipeVSchedule(2 * stages, stages, stage_id), seen=names, queues=True
        )
        commands = [command for step in woven for command in step]
        opened = {c.window_id: c.receives for c in commands if isinstance(c, OpenSnapshotWindow)}
        queued: list[str] = []
        expected = {}
        for position, name in enumerate(names):
            if name == "CommitP2P":
                if queued:
                    expected[position] = any(n.startswith("Recv") for n in queued)
                queued = []
            elif name.startswith(("Recv", "Send")):
                queued.append(name)
            elif name.startswith("Reduce"):
                expected[position] = False
        assert opened == expected
        assert any(opened.values())


# -- under the engine -------------------------------------------------------------------------------


@pytest.mark.integration
def test_p1_p10_losses_are_equal_to_the_bit_with_every_variant_and_engines_stay_as_they_are(
    results: Ranks,
) -> None:
    for r in results:
        reference = r["reference"][:STEPS]
        for name, run in r["variants"].items():
            assert run["losses"] == reference, name
        assert all(r[name]["losses"] == reference for name in ("none", "analytic", "paper"))
        assert r["gpipe"]["losses"] == r["gpipe_reference"]
        assert len({run["evaluated"] for run in r["variants"].values()}) == 1, (
            "an evaluation in between"
        )
        assert r["class_map"], "the class stays as it is (P10)"
        assert r["inert"], "other engines stay as they are (P10)"


@pytest.mark.integration
def test_every_variant_commits_and_its_memory_resumes_bit_for_bit(results: Ranks) -> None:
    for r in results:
        for name in VARIANTS:
            assert r["variants"][name]["stats"]["committed_step"] == STEPS, name
            assert r["resumed"][name]["path"] == f"memory:{name}/{STEPS}"
            assert r["resumed"][name]["losses"] == r["reference"][STEPS:], name
        assert r["none"]["stats"]["taken"] == 0


@pytest.mark.integration
@pytest.mark.parametrize("run", ["has", "gpipe", "analytic", "paper"])
def test_the_engine_executes_exactly_the_unwoven_schedule(results: Ranks, run: str) -> None:
    for r in results:
        found = r["variants"]["has"] if run == "has" else r[run]
        steps = [t for t in traces(found) if any(i.name == "OptimizerStep" for i in t.instructions)]
        assert len(steps) == STEPS
        for trace in steps:
            executed = [i.name for i in trace.instructions if i.name != "AggregateTotalLoss"]
            assert executed == found["names"]
            assert [i.position for i in trace.instructions] == list(range(len(trace.instructions)))


@pytest.mark.integration
@pytest.mark.parametrize("run", ["has", "gpipe", "analytic", "paper"])
def test_a_chunk_of_tier_1_runs_beside_nothing_but_the_wait_it_was_let_in_for(
    results: Ranks, run: str
) -> None:
    for r in results:
        found = r["variants"]["has"] if run == "has" else r[run]
        chunks = chunks_of(found, 1)
        for chunk in chunks:
            assert chunk.window is not None
            beside = beside_of(found, chunk)
            assert len(beside) <= 1
            assert all(i.name.startswith(WAITING) for i in beside), (chunk, beside)
    # Not an empty promise: the stage that waits first, for its first activations, has copied.
    last = results[1]["variants"]["has"] if run == "has" else results[1][run]
    assert sum(c.nbytes for c in chunks_of(last, 1)) > 0


@pytest.mark.integration  # a busy machine may leave no such window
def test_a_chunk_of_tier_3_runs_beside_nothing_but_the_communication_it_was_let_in_for(
    results: Ranks,
) -> None:
    for r in results:
        found = r["linked"]["True"]
        assert found["losses"] == r["linked_reference"]
        assert found["plan"]["1"] < sum(found["plan"].values()), (
            "windows suffice: there is nothing to show"
        )
        assert found["plan"]["3"] > 0
        chunks = chunks_of(found, 3)
        assert sum(c.nbytes for c in chunks) > 0
        for chunk in chunks:
            assert chunk.window is None
            beside = beside_of(found, chunk)
            assert len(beside) <= 1
            assert all(i.name.startswith(("Send", "Reduce")) for i in beside), (chunk, beside)


@pytest.mark.integration
def test_tier_3_is_for_separate_links_and_for_what_fits_nowhere_else(results: Ranks) -> None:
    for r in results:
        shared = r["linked"]["False"]
        assert shared["losses"] == r["linked_reference"]
        assert (shared["plan"]["3"], shared["stats"]["tier_bytes"]["3"]) == (0, 0)
        assert all(run["stats"]["tier_bytes"]["3"] == 0 for run in r["variants"].values())


@pytest.mark.integration
def test_p2_nothing_is_copied_while_the_weights_change(results: Ranks) -> None:
    for r in results:
        runs = {
            **r["variants"],
            "gpipe": r["gpipe"],
            **{f"linked {k}": v for k, v in r["linked"].items()},
        }
        for name, found in runs.items():
            assert found["fence_within"], "the fence is not where the weights begin to change"
            chunks = sorted((c.begin_secs, c.end_secs) for t in traces(found) for c in t.chunks)
            assert len(chunks) > STEPS
            for begin, end in found["updates"]:
                assert not [c for c in chunks if c[0] < end and begin < c[1]], name


@pytest.mark.integration
def test_what_is_copied_is_planned_and_counted_by_tier(results: Ranks) -> None:
    for r in results:
        has, host = r["variants"]["has"], r["variants"]["host"]
        assert has["estimator"] == "profiled"
        assert (r["analytic"]["estimator"], r["paper"]["estimator"]) == ("analytic", "paper")
        copied = sum(c.nbytes for t in traces(has) for c in t.chunks)
        # The last version, after the last step, belongs to no traced step but the evaluation's.
        assert copied <= sum(has["stats"]["tier_bytes"].values())
        copied_whole(has["stats"], sum(has["plan"].values()))
        assert host["stats"]["tier_bytes"]["1"] == 0
        assert host["plan"] is None
        blocking = r["variants"]["blocking"]["stats"]["tier_bytes"]
        assert blocking["0"] == sum(blocking.values())
        # Nothing is planned beside the optimizer's step.
        assert has["without_copies_secs"] >= min(end - begin for begin, end in has["updates"])


def copied_whole(stats: dict[str, Any], nbytes: int) -> None:
    """Every version taken was copied to its last byte; beyond them only what a slower peer then gave up."""
    beyond = sum(stats["tier_bytes"].values()) - stats["taken"] * nbytes
    assert 0 <= beyond <= stats["skipped"].get("a peer skipped it", 0) * nbytes, stats


# -- DualPipeV: its idle time lies in the commits of queued transfers -------------------------------------

dual = pytest.mark.skipif(not DUAL, reason="this DeepSpeed has no DualPipeV engine")


@pytest.mark.integration
@dual
def test_p1_p3_dualpipev_loses_no_bit_and_resumes(results: Ranks) -> None:
    for r in results:
        run, reference = r["dualpipev"], r["dualpipev_reference"]
        assert run["losses"] == reference[:STEPS]
        committed = run["stats"]["committed_step"]
        assert r["dualpipev_resumed"]["path"] == f"memory:dualpipev/{committed}"
        assert r["dualpipev_resumed"]["losses"] == reference[committed:]


@pytest.mark.integration
@dual
def test_dualpipev_copies_in_the_commits_that_wait(results: Ranks) -> None:
    copied = 0
    for r in results:
        run = r["dualpipev"]
        steps = [t for t in traces(run) if any(i.name == "OptimizerStep" for i in t.instructions)]
        trained = {i.position: i.name for i in steps[-1].instructions}
        assert run["positions"]
        assert {trained[p] for p in run["positions"]} <= {"CommitP2P"}
        for chunk in chunks_of(run, 1):
            beside = beside_of(run, chunk)
            # In its first step nothing is known of the schedule: its receives exchange shapes, and wait.
            assert all(i.name in ("CommitP2P", "RecvActivation") for i in beside), beside
            copied += chunk.nbytes
    assert copied > 0


if __name__ == "__main__":
    be_a_rank(main)
