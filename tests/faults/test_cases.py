"""The matrix as data: what is covered, and that no job asks for more than can be survived."""

from __future__ import annotations

import pytest

from tests.faults.cases import (
    OPTIMIZERS,
    SHAPES,
    Moment,
    PlannedJob,
    pairwise,
    plan_jobs,
    product,
    reference_steps,
)

JOBS = {"pairs": plan_jobs(pairwise(product())), "full": plan_jobs(product())}


def test_the_pairs_of_all_combinations_are_covered_by_few() -> None:
    cases = product()
    chosen = pairwise(cases)
    pairs = set().union(*(case.pairs for case in cases))
    assert set().union(*(case.pairs for case in chosen)) == pairs
    # Every moment meets every layout, so fewer than this cannot do; twice as many would be a waste.
    least = len(Moment) * len(SHAPES)
    assert least <= len(chosen) < 2 * least
    assert chosen == pairwise(cases), "not deterministic"


def test_the_whole_product_has_every_moment_on_every_node() -> None:
    assert len(set(product())) == len(Moment) * sum(s.nodes for s in SHAPES) * len(OPTIMIZERS)


@pytest.mark.parametrize("kind", JOBS)
def test_every_case_is_in_exactly_one_job(kind: str) -> None:
    planned = [case for job in JOBS[kind] for case in job.cases]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(pairwise(product()) if kind == "pairs" else product())


@pytest.mark.parametrize("job", [job for jobs in JOBS.values() for job in jobs], ids=str)
def test_jobs_ask_for_nothing_impossible(job: PlannedJob) -> None:
    after = 0
    for before, fault in zip((None, *job.faults), job.faults, strict=False):
        assert fault.coordinate in fault.case.shape.coordinates(fault.case.node) if fault.case else True
        assert fault.steps[-1] < job.steps
        if fault.moment is Moment.DURING_RECOVERY:
            # A lost node and then another, before anything is protected anew, is beyond one copy.
            assert before is not None
            assert {before.action, fault.action} == {"kill", "kill_node"}
        elif fault.moment is Moment.DURING_PERSIST:
            assert fault is job.faults[-1]
        elif fault.moment is not Moment.BEFORE_ANY_COMMIT:
            # What the fault before led to was restored from a step below this range.
            assert fault.steps[0] > after
            after = fault.steps[-1] + 1
        if before is not None:
            assert fault.incarnation == before.incarnation + before.restarts
    assert job.lives == job.faults[-1].incarnation + job.faults[-1].restarts


def test_reference_runs_are_long_enough() -> None:
    steps = reference_steps(JOBS["full"])
    assert all(steps[job.shape.name, job.optimizer.name] >= job.steps for job in JOBS["full"])
