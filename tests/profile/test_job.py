"""A real job under ``reft profile``: two pipeline stages over gloo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.llama import PRETRAIN
from reft.control.control import ControlGroup
from reft.pacing.schedule import WindowKind
from reft.profile.clocks import ClockOffset, measure_offsets
from reft.profile.result import Activity, ProfileResult
from tests.machine import free_port
from tests.pretrain.conftest import run_bounded
from tests.profile.simulated import train_schedule
from tests.spawn import spawn

pytestmark = pytest.mark.integration

STEPS = 14
MICRO_BATCHES = 4
JOB = [PRETRAIN, "--pp", 2, "--micro-batches", MICRO_BATCHES, "--hidden", 128, "--layers", 4]
JOB += ["--seq", 128, "--steps", STEPS]


def run_job(folder: Path, *command: object) -> dict[int, str]:
    events = folder / "events"
    text = Path(os.__file__).parent / "argparse.py"
    paths = ["--data", text, "--cache-dir", folder / "cache", "--save-dir", folder / "save"]
    arguments = [*command, "--memory-dir", folder / "memory", "--nproc-per-node", "2", *JOB, *paths]
    done = run_bounded(
        [sys.executable, "-m", "reft.cli", *map(str, arguments)],
        240,
        folder,
        REFT_EVENTS=str(events),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line)
        for path in events.glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return {e["step"]: e["loss_hex"] for e in lines if e["event"] == "step" and "loss_hex" in e}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("profiled")
    files = {name: folder / f"{name}.json" for name in ("profile", "trace")}
    options = ["--steps", 6, "--warmup-steps", 3, "--keep-running"]
    outputs = ["--json", files["profile"], "--trace", files["trace"]]
    losses = run_job(folder, "profile", *options, *outputs)
    result = ProfileResult.load(files["profile"])
    return SimpleNamespace(
        losses=losses, result=result, trace=files["trace"], events=folder / "events"
    )


def test_losses_are_those_of_the_job_without_profiling(profiled, tmp_path):
    """P1; the job went on to its own end."""
    assert sorted(profiled.losses) == list(range(1, STEPS + 1))
    assert profiled.losses == run_job(tmp_path, "launch")


def test_the_steps_after_the_warm_up_were_measured(profiled):
    result = profiled.result
    assert result.steps == (4, 5, 6, 7, 8, 9)
    assert result.degrees == (2, 1, 1)
    assert [s.ranks for s in result.stages] == [(0,), (1,)]
    assert result.matched_share == 1
    assert result.clock_error_secs == 0  # one host, one clock


def test_windows_are_where_the_schedule_says(profiled):
    """However busy the machine is: what the stage waits for follows from the schedule alone."""
    for stage in profiled.result.stages:
        for window in stage.windows:
            assert window.usable == (window.name != "OptimizerStep")
            assert (window.kind is WindowKind.FILL) == (
                stage.stage_id == 1 and window.position == 0
            )
    # The last stage forwards and goes back before the first gradient comes: there the first one waits.
    names = [instruction.name for instruction in train_schedule(2, MICRO_BATCHES).streams[0]]
    assert waited_secs(profiled.result, 0, names.index("RecvGrad")) > 0
    # And the first one forwards before the first activation comes.
    assert waited_secs(profiled.result, 1, 0) > 0


def waited_secs(result: ProfileResult, stage_id: int, position: int) -> float:
    """In all measured steps together."""
    return sum(
        s.secs
        for rank in result.timelines
        for s in rank.segments
        if (rank.stage_id, s.position, s.activity) == (stage_id, position, Activity.WAIT)
    )


def test_snapshot_chunks_are_on_the_timeline(profiled):
    for stage in profiled.result.stages:
        assert stage.snapshot_bytes > 0
        # Snapshots may be dropped on a busy machine, but not all of them.
        assert 0 < stage.copied_bytes <= 1.01 * stage.snapshot_bytes
        # What only the host knows is not copied from the device; the arena reserves room for it.
        (rank,) = stage.ranks
        (events,) = profiled.events.glob(f"reft-{rank}-*.jsonl")
        lines = events.read_text().splitlines()
        *_, version = (
            e["traffic"]["to_host"] for e in map(json.loads, lines) if e["event"] == "commit"
        )
        copied = (n for kind, n in version.items() if kind not in ("host_state", "checksums"))
        assert stage.snapshot_bytes == sum(copied)
    for rank in profiled.result.timelines:
        assert all(rank.begin_secs <= c.begin_secs for c in rank.chunks)


def measure(rank: int, port: int, folder: str) -> None:
    """One process of :func:`test_clocks_are_aligned_between_processes`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    control = ControlGroup(30.0)
    # Ranks 1 and 2 pretend to be on another host.
    aligned = measure_offsets(control, "here" if rank == 0 else "there")
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps([[o.secs, o.error_secs, o.clock] for o in aligned])
    )
    control.any_of(False)
    control.leave()
    dist.destroy_process_group()


def test_clocks_are_aligned_between_processes(tmp_path):
    spawn(measure, free_port(), str(tmp_path), nprocs=3)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert told == told[:1] * 3, "all know the same"
    zero, one, two = (ClockOffset(*o) for o in told[0])
    assert zero == ClockOffset()
    assert one == two, "processes of one host are asked once"
    # All are on this host: the true offset is 0, and the bound has to contain it.
    assert abs(one.secs) <= one.error_secs < 0.1
    assert one.error_to(two) == 0
    assert one.error_to(zero) == one.error_secs
