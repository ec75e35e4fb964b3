"""The part of the fault matrix that tells most. The rest: ``make faults``."""

from __future__ import annotations

import pytest

from reft.grid import Degrees
from tests.faults.cases import OPTIMIZERS, SHAPES, Case, Moment, Optimizer, Setup, Shape, plan_job
from tests.faults.job import Scratch, run_planned

pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]

SHAPE = {shape.name: shape for shape in SHAPES}
OPTIMIZER = {optimizer.name: optimizer for optimizer in OPTIMIZERS}
DP3 = Shape("PP1xDP3", Degrees(1, 3, 1), nodes=3, procs_per_node=1)


@pytest.mark.parametrize("protection", ["arc", "aec", "arc+aor"])
def test_p1_p3_p8_a_lost_node_changes_no_bit_of_any_loss(scratch: Scratch, protection: str) -> None:
    optimizer = OPTIMIZER["zero1-bf16-fp32"]
    job = plan_job([Case(Moment.DURING_STEP, 1, Setup(DP3, optimizer, protection=protection))])
    outcome = run_planned(scratch, job, protection, scratch.reference(DP3, optimizer, job.steps))
    assert outcome.problems == (), f"logs: {outcome.directory}"
    assert [r.source for r in outcome.recoveries] == ["memory"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "optimizer", "moments"),
    [
        # One node after the other, each from memory that the one before has just restored.
        (
            SHAPE["PP2xDP2"],
            OPTIMIZER["zero1-bf16-fp32"],
            {Moment.BEFORE_ANY_COMMIT: 0, Moment.AFTER_SEAL: 3, Moment.DURING_RECOVERY: 1},
        ),
        (
            SHAPE["TP2xDP2"],
            OPTIMIZER["zero0-fp32"],
            {Moment.DURING_COPY: 0, Moment.BEFORE_COMMIT: 1, Moment.DURING_PERSIST: 0},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Shape | Optimizer) else "",
)
def test_losses_are_equal_after_failures(
    scratch: Scratch, shape: Shape, optimizer: Optimizer, moments: dict[Moment, int]
) -> None:
    job = plan_job([Case(moment, node, Setup(shape, optimizer)) for moment, node in moments.items()])
    reference = scratch.reference(shape, optimizer, job.steps)
    outcome = run_planned(scratch, job, f"{shape.name}-{optimizer.name}", reference)
    assert outcome.problems == (), f"logs: {outcome.directory}"
    # Whoever trained after a commit came back from memory; a node that dies as soon as anything is
    # persisted does so before the first step.
    early = {Moment.BEFORE_ANY_COMMIT, Moment.DURING_RECOVERY, Moment.DURING_PERSIST}
    after_commit = {fault.moment for fault in job.faults} - early
    assert [r.source for r in outcome.recoveries].count("memory") >= len(after_commit)
