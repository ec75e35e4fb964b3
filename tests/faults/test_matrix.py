"""The part of the fault matrix that tells most. The rest: ``make faults``."""

from __future__ import annotations

import pytest

from tests.faults.cases import OPTIMIZERS, SHAPES, Case, Moment, Optimizer, Setup, Shape, plan_job
from tests.faults.job import Scratch, run_planned

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

SHAPE = {shape.name: shape for shape in SHAPES}
OPTIMIZER = {optimizer.name: optimizer for optimizer in OPTIMIZERS}


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
