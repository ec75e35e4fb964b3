"""What benchmarks/frequency.py --real counts of a job, from steps and statuses of the test's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from frequency_real import Course, Look, goal, table


def course(slow: float) -> Course:
    """300 steps of a second, one in ten of them beside a version and longer by a half; from 100 to 200 all are
    longer: another process loads the disk."""
    at, steps, looks = 0.0, {0: 0.0}, []
    for step in range(1, 301):
        beside = step % 10 == 0
        begin = at
        at += (slow if 100 < step <= 200 else 1.0) * (1.5 if beside else 1.0)
        steps[step] = at
        writing = step if beside else None
        looks.append(Look(begin + 0.01, 10, "because", 0.05, writing, step // 10 * 10))
        looks.append(Look(at - 0.01, 10, "because", 0.05, None, step // 10 * 10))
    return Course(steps, looks)


def test_the_overhead_is_counted_within_each_part() -> None:
    """So that a slower machine is no cost of the versions."""
    seen = course(slow=3.0)
    ends = [seen.steps[100], seen.steps[200], seen.steps[300]]
    result = seen.to_json(ends)
    for part in result["parts"]:
        assert part["overhead_all_steps"] == pytest.approx(0.05, rel=0.02)
        assert part["overhead"] == pytest.approx(0.05, rel=0.12)
        assert part["versions_written"] in {9, 10}
    assert result["parts"][1]["plain_step_secs"] == pytest.approx(3.0)
    assert [s["written"] for s in result["rate_over_time"]] == list(range(0, 301, 10))
    assert "another process loads the disk" in "\n".join(table(result))


def test_of_few_versions_nothing_is_said_of_the_goal() -> None:
    seen = course(slow=3.0)
    result = seen.to_json([seen.steps[100], seen.steps[200], seen.steps[300]])
    parts = result["parts"]
    assert goal(parts, 0.06, 9)["held"] is True
    assert goal(parts, 0.035, 9)["held"] is False
    judged = goal(parts, 0.06, 20)
    assert judged["held"] is None
    assert judged["too_few_in"] == [part["part"] for part in parts]
    assert "is not judged: fewer than 20 versions in alone," in "\n".join(table(result | {"goal": judged}))
