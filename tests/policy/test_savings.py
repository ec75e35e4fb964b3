"""``reft plan``: what failures cost without reft and with it, and how likely memory carries a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.grid import Degrees, Topology
from reft.policy.rate import DAY_SECS
from reft.protect.placement import Weibull
from reft.tools.planning.savings import (
    CheckpointHabits,
    RecoveryParts,
    draw_survival,
    estimate_lost_time,
    estimate_recovery,
    survival_curve,
)
from tests.policy.test_plan import BF16_ZERO1, LARGE, run

FOUR = Topology(Degrees(1, 4, 1), Degrees(1, 4, 1).coordinates(), tuple("ABCD"))


def test_lost_time_follows_the_printed_formula() -> None:
    recovery = RecoveryParts(15, 60, 5, 20)
    args = {"versions": 0.002, "storage": 0.001, "memory_losses_per_sec": 1e-8}
    habits = CheckpointHabits(interval_secs=1000, restart_secs=500, stall_secs=10)
    lost = estimate_lost_time(1e-5, habits, recovery, stored_secs=400, **args)
    assert lost.without == pytest.approx(0.01 + 1e-5 * (500 + 500))
    assert lost.with_reft == pytest.approx(0.002 + 0.001 + 1e-5 * 100 + 1e-8 * (200 + 500))
    own = estimate_lost_time(1e-5, habits, recovery, stored_secs=None, **args)
    assert own.with_reft == pytest.approx(0.002 + 0.01 + 1e-5 * 100 + 1e-8 * (500 + 500))


@pytest.mark.parametrize(("nodes", "notice_secs"), [(32, 5), (33, 15)])
def test_a_silent_host_is_noticed_later_in_a_large_job(nodes: int, notice_secs: float) -> None:
    parts = estimate_recovery(nodes, read_secs=1, step_secs=2, version_steps=3, start_secs=4)
    assert parts == RecoveryParts(notice_secs, 4, 1, 6)


def test_a_survival_curve_is_that_of_the_groups() -> None:
    causes = [Weibull(10 * DAY_SECS)]
    curve = survival_curve(FOUR, 1, causes, (10.0,))
    q = 0.36787944
    assert curve.unprotected == pytest.approx([q**4])
    assert curve.protected == pytest.approx([q**4 + 4 * q**3 * (1 - q)])
    assert survival_curve(FOUR, 0, causes).protected == pytest.approx(
        survival_curve(FOUR, 0, causes).unprotected
    )


def test_the_plan_of_64_nodes_says_what_failures_cost_and_draws_the_curve(tmp_path: Path) -> None:
    figure = tmp_path / "survival.svg"
    answer = run(BF16_ZERO1, *LARGE, "--json", "--figure", figure)
    savings = answer.json["savings"]
    assert savings["lost"]["without"] == pytest.approx(0.0042, abs=5e-5)
    assert savings["lost"]["with_reft"] < 0.0042 / 2
    assert [row["days"] for row in answer.json["survival"]] == [1, 7, 30, 90]
    assert "memory survives" in figure.read_text()
    twice = run(BF16_ZERO1, *LARGE, "--json", "--checkpoint-mins", 60, "--restart-mins", 20)
    assert twice.json["savings"]["lost"]["without"] == pytest.approx(2 * savings["lost"]["without"])


def test_a_figure_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no-such-directory"):
        draw_survival(FOUR, 1, [Weibull(1.0)], "arc", tmp_path / "no-such-directory" / "x.svg")
