"""Parts of benchmarks by themselves: what is counted of a job."""

from __future__ import annotations

import sys

import pytest

from tests.benchmarks.test_benchmarks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from frequency_real import Course, Look, goal, table


@pytest.fixture
def course() -> Course:
    """300 steps of a second, one in ten of them beside a version and longer by a half; from 100 to 200 all are
    longer: another process loads the disk."""
    at, steps, looks = 0.0, {0: 0.0}, []
    for step in range(1, 301):
        beside = step % 10 == 0
        begin = at
        at += (3.0 if 100 < step <= 200 else 1.0) * (1.5 if beside else 1.0)
        steps[step] = at
        writing = step if beside else None
        looks.append(Look(begin + 0.01, 10, "because", 0.05, writing, step // 10 * 10))
        looks.append(Look(at - 0.01, 10, "because", 0.05, None, step // 10 * 10))
    return Course(steps, looks)


def test_the_overhead_is_counted_within_each_part_and_of_few_versions_nothing_is_said(course: Course) -> None:
    """So that a slower machine is no cost of the versions."""
    result = course.to_json([course.steps[100], course.steps[200], course.steps[300]])
    parts = result["parts"]
    for part in parts:
        assert part["overhead_all_steps"] == pytest.approx(0.05, rel=0.02)
        assert part["overhead"] == pytest.approx(0.05, rel=0.12)
        assert part["versions_written"] in {9, 10}
    assert parts[1]["plain_step_secs"] == pytest.approx(3.0)
    assert [s["written"] for s in result["rate_over_time"]] == list(range(0, 301, 10))
    assert "another process loads the disk" in "\n".join(table(result))
    assert [goal(parts, limit, 9)["held"] for limit in (0.06, 0.035)] == [True, False]
    judged = goal(parts, 0.06, 20)
    assert judged["held"] is None
    assert judged["too_few_in"] == [part["part"] for part in parts]
    assert "is not judged: fewer than 20 versions in alone," in "\n".join(table(result | {"goal": judged}))
