"""The matrix as data: what is covered, and that no job asks for more than can be survived."""

from __future__ import annotations

from reft.config import FaultPoint
from tests.faults.cases import MOMENTS, PAIRS, SETUPS, VARIANTS, plan_jobs, product

JOBS = plan_jobs(PAIRS)


def test_every_pair_of_all_combinations_is_in_one_of_few_jobs() -> None:
    planned = [case for job in JOBS for case in job.cases]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(PAIRS)
    assert set().union(*(c.pairs for c in PAIRS)) == set().union(*(c.pairs for c in product(SETUPS)))
    # Every moment meets every variant, so fewer than this cannot do; twice as many would be a waste.
    least = len(MOMENTS) * len(VARIANTS)
    assert least <= len(PAIRS) < 2 * least
    assert len(JOBS) <= 25


def test_jobs_ask_for_nothing_impossible() -> None:
    for job in JOBS:
        after = 0
        for before, fault in zip((None, *job.faults), job.faults, strict=False):
            assert fault.coordinate in job.shape.coordinates(fault.case.node) if fault.case else True
            assert fault.steps[-1] < job.steps
            if fault.moment is FaultPoint.DURING_RECOVERY:
                # A lost node and then another, before anything is protected anew, is beyond one copy.
                assert before is not None
                assert {before.action, fault.action} == {"kill", "kill_node"}
            elif fault.moment is FaultPoint.DURING_PERSIST:
                assert fault is job.faults[-1]
            elif fault.moment is not FaultPoint.BEFORE_COPY:
                # What the fault before led to was restored from a step below this range.
                assert fault.steps[0] > after
                after = fault.steps[-1] + 1
            if before is not None:
                assert fault.incarnation == before.incarnation + before.restarts
        assert job.lives == job.faults[-1].incarnation + job.faults[-1].restarts
