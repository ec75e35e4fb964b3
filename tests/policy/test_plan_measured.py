"""``reft plan`` from the windows of a profiled job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.costs import Costs
from benchmarks.simulator.schedules import one_f_one_b
from reft import cli
from reft.profile.analysis import analyse
from reft.profile.result import Activity, ProfileResult, Spread
from reft.tools.planning.job import Layouting, plan_job
from reft.tools.planning.model import CLUSTERS
from tests.policy.planning import FP16, QUICK, SMALL, run
from tests.profile.simulated import run as run_steps

STAGES = ("--model", "llama2-1.3b", "--cluster", "v100", "--pp", "4", "--dp", "8", "--rank-order", "auto")


@pytest.fixture
def profiled() -> ProfileResult:
    """Of that job, as if its simulated step had been run and profiled."""
    layouting = Layouting(pp=4, dp=8, micro_batches=4)
    training = plan_job(json.loads(Path(FP16).read_text()), CLUSTERS["v100"], "1.3b", layouting).training
    ranks, _ = run_steps(one_f_one_b(4, 4), Costs.of(training))
    result = analyse(ranks, "simulated", (4, 1, 1))
    return replace(result, bandwidth_bytes_per_sec=training.machine.copy_bytes_per_sec)


def test_measured_windows_replace_estimated_ones(tmp_path: Path, profiled: ProfileResult) -> None:
    profiled.save(tmp_path / "profile.json")
    estimated = run(FP16, *STAGES, *QUICK).json
    measured = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "profile.json")).json
    assert estimated["step"]["source"] == "estimated"
    assert measured["step"]["source"] == "windows measured in job simulated"
    assert measured["step"]["secs"] == max(stage.step_secs.p50 for stage in profiled.stages)
    for stage in measured["stages"]:
        assert stage["idle_secs"] == sum(w.length_secs for w in profiled.windows(stage["stage_id"]))
    assert measured["stages"][0]["idle_secs"] == pytest.approx(estimated["stages"][0]["idle_secs"], rel=0.1)

    replace(profiled, bandwidth_bytes_per_sec=1e8).save(tmp_path / "slow.json")
    slow = run(FP16, *STAGES, "--profile", str(tmp_path / "slow.json"), "--micro-batches", "4")
    assert slow.code == cli.EXIT_NOT_WELL
    assert "measured in job simulated" in slow.out
    waits = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "slow.json")).json
    stage = profiled.stages[0]
    computing = sum(stage.secs[a].p50 for a in (Activity.FORWARD, Activity.BACKWARD))
    room = waits["stages"][0]["idle_secs"] + computing
    needed = waits["stages"][0]["to_host_bytes"] / 1e8
    assert waits["protection"]["overhead"] >= (needed - room) / stage.step_secs.p50 - 1e-6 > 0

    # That was profiled on hosts, which may have no core to spare; a device copies beside computation.
    assert profiled.method.clock == "host"
    method = replace(profiled.method, clock="device")
    replace(profiled, bandwidth_bytes_per_sec=1e8, method=method).save(tmp_path / "device.json")
    device = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "device.json")).json
    assert device["protection"]["overhead"] < waits["protection"]["overhead"]

    longer = [replace(s, step_secs=Spread(*(2 * secs for secs in s.step_secs))) for s in profiled.stages]
    replace(profiled, stages=tuple(longer)).save(tmp_path / "longer.json")
    half = run(FP16, *STAGES, *QUICK, "--profile", str(tmp_path / "longer.json")).json
    for once, twice in zip(measured["alternatives"], half["alternatives"], strict=True):
        assert twice["overhead"] == pytest.approx(once["overhead"] / 2), (
            "transfers too are a part of that step"
        )


def test_a_profile_of_something_else_is_refused(tmp_path: Path, profiled: ProfileResult) -> None:
    path = tmp_path / "profile.json"
    profiled.save(path)
    unknown = tmp_path / "unknown.json"
    replace(profiled, bandwidth_bytes_per_sec=None).save(unknown)
    for arguments, says in (
        ((FP16, *SMALL, "--profile", str(path)), "the profile is of 4 pipeline stages and a tensor-parallel"),
        ((FP16, *STAGES, "--profile", str(unknown)), "without --without-snapshots"),
        ((FP16, *STAGES, "--profile", FP16), "--profile: found format None"),
    ):
        result = run(*arguments)
        assert result.code == cli.EXIT_WRONG_USE
        assert says in result.err
