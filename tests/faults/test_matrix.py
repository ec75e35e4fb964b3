"""The fault matrix: real jobs, real kills. Every run is compared, step by step and bit by bit, with an undisturbed run
without reft, and no recovery may go back behind the newest commit.

Here is the part that tells most. ``make faults`` covers every pair of moment, node, layout, optimizer, snapshot variant
and protection."""

from __future__ import annotations

import pytest

from tests.faults.cases import (
    DP2_TP2,
    DP3,
    OPTIMIZERS,
    PAIRS,
    PP2_DP2,
    Case,
    Optimizer,
    PlannedJob,
    Setup,
    Shape,
    plan_job,
    plan_jobs,
)
from tests.faults.conftest import only_when_asked_for
from tests.faults.job import Scratch, run_planned
from tests.machine import FP16_MISSING

pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]

FP32, _, BF16, _ = OPTIMIZERS
JOBS = plan_jobs(PAIRS)


@pytest.mark.parametrize(
    "protection", [pytest.param("arc", marks=pytest.mark.integration), "aec", "arc+aor"]
)
def test_p1_p3_p8_a_lost_node_changes_no_bit_of_any_loss(scratch: Scratch, protection: str) -> None:
    job = plan_job([Case("during_step", 1, Setup(DP3, BF16, protection=protection))])
    assert [r.source for r in run_planned(scratch, job, protection)] == ["memory"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "optimizer", "moments"),
    [
        # One node after the other, each from memory that the one before has just restored.
        (PP2_DP2, BF16, {"before_copy": 0, "after_seal": 3, "during_recovery": 1}),
        (DP2_TP2, FP32, {"during_copy": 0, "before_commit": 1, "during_persist": 0}),
    ],
    ids=lambda value: value.name if isinstance(value, Shape | Optimizer) else "",
)
def test_losses_are_equal_after_failures(
    scratch: Scratch, shape: Shape, optimizer: Optimizer, moments: dict[str, int]
) -> None:
    job = plan_job(
        [Case(moment, node, Setup(shape, optimizer)) for moment, node in moments.items()]
    )
    recoveries = run_planned(scratch, job, f"{shape.name}-{optimizer.name}")
    # Whoever trained after a commit came back from memory; a node that dies as soon as anything is
    # persisted does so before the first step.
    early = {"before_copy", "during_recovery", "during_persist"}
    after_commit = {fault.moment for fault in job.faults} - early
    assert [r.source for r in recoveries].count("memory") >= len(after_commit)


@only_when_asked_for
@pytest.mark.parametrize(
    ("number", "job"), [*enumerate(JOBS)], ids=lambda value: str(value).replace(" ", "-")
)
def test_p1_p3_every_pair(scratch: Scratch, number: int, job: PlannedJob) -> None:
    shape, optimizer = job.setup.shape, job.setup.optimizer
    if optimizer.needs_fp16 and FP16_MISSING:
        pytest.skip(str(FP16_MISSING))
    steps = max(j.steps for j in JOBS if (j.setup.shape, j.setup.optimizer) == (shape, optimizer))
    run_planned(scratch, job, f"job{number:03d}", steps)
