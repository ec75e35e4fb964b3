"""The matrix as data: what is covered, and that no job asks for more than can be survived."""

from __future__ import annotations

from tests.faults.cases import MOMENTS, PAIRS, SETUPS, VARIANTS, pairs_of, plan_jobs, product


def test_every_pair_of_all_combinations_is_in_one_of_few_jobs() -> None:
    jobs = plan_jobs(PAIRS)
    planned = [case for job in jobs for case in job.cases]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(PAIRS)
    assert set().union(*map(pairs_of, PAIRS)) == set().union(*map(pairs_of, product(SETUPS)))
    # Every moment meets every variant, so fewer than this cannot do; twice as many would be a waste.
    least = len(MOMENTS) * len(VARIANTS)
    assert least <= len(PAIRS) < 2 * least
    assert len(jobs) <= 25
