"""The matrix as data: what is covered, and that no job asks for more than can be survived."""

from __future__ import annotations

import pytest

from reft.config import Variant
from tests.faults.cases import (
    OPTIMIZERS,
    PROTECTIONS,
    SHAPES,
    VARIANTS,
    Moment,
    PlannedJob,
    pairwise,
    pairwise_cases,
    plan_jobs,
    product,
    reference_steps,
    setups,
)

SETUPS = setups()
CASES = {"pairs": pairwise_cases(SETUPS), "full": product(SETUPS)}
JOBS = {kind: plan_jobs(cases) for kind, cases in CASES.items()}


def test_the_pairs_of_all_combinations_are_covered_by_few() -> None:
    chosen = CASES["pairs"]
    pairs = set().union(*(case.pairs for case in CASES["full"]))
    assert set().union(*(case.pairs for case in chosen)) == pairs
    # Every moment meets every variant, so fewer than this cannot do; twice as many would be a waste.
    least = len(Moment) * len(VARIANTS)
    assert least <= len(chosen) < 2 * least
    assert chosen == pairwise_cases(SETUPS), "not deterministic"
    # Every variant meets every layout, each in a job of its own.
    assert len(VARIANTS) * len(SHAPES) <= len(JOBS["pairs"]) <= 25


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_meets_every_value_of_everything_else(variant: Variant) -> None:
    found = [case for case in CASES["pairs"] if case.setup.variant is variant]
    assert {case.moment for case in found} == set(Moment)
    assert {case.setup.shape for case in found} == set(SHAPES)
    assert {case.setup.optimizer for case in found} == set(OPTIMIZERS)
    assert {case.setup.protection for case in found} == set(PROTECTIONS)
    assert {case.node for case in found} == {0, 1, 2, 3}


def test_a_restricted_matrix_covers_what_is_left() -> None:
    only = setups(variants=VARIANTS[:1], protections=("rs:2",))
    assert {setup.shape.degrees.dp for setup in only} == {3, 4}, "fewer members have no room for the scheme"
    assert {case.moment for case in pairwise_cases(only)} == set(Moment)
    assert len(pairwise(only)) < len(pairwise(SETUPS))


def test_the_whole_product_has_every_moment_on_every_node() -> None:
    per_setup = [len(Moment) * setup.shape.nodes for setup in SETUPS]
    assert len(set(CASES["full"])) == sum(per_setup)
    assert len(SETUPS) == (2 * 2 + 2 * 4) * len(OPTIMIZERS) * len(VARIANTS)  # schemes that have room


@pytest.mark.parametrize("kind", JOBS)
def test_every_case_is_in_exactly_one_job(kind: str) -> None:
    planned = [case for job in JOBS[kind] for case in job.cases]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(CASES[kind])


@pytest.mark.parametrize("kind", JOBS)
def test_jobs_ask_for_nothing_impossible(kind: str) -> None:
    for job in JOBS[kind]:
        _check_possible(job)


def _check_possible(job: PlannedJob) -> None:
    after = 0
    for before, fault in zip((None, *job.faults), job.faults, strict=False):
        assert fault.coordinate in job.shape.coordinates(fault.case.node) if fault.case else True
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
