"""When a job carries out its own advice, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.policy.advice import Action, Advice
from reft.policy.following import COOL_DOWN_SECS, SUSTAINED_STEPS, JobNow, Sustained, decide

NODES = ("a", "b", "c")
NOW = JobNow(
    nodes=NODES,
    spares=1,
    least=2,
    most=4,
    settled=True,
    tolerance=1,
    wished=1,
    unix_secs=10_000.0,
    tolerance_without={"a": 1, "b": 1, "c": 0},
)
REPLACE = Advice(Action.REPLACE, ("b",), 3, "it is slow")
DROP = Advice(Action.DROP, ("b",), 2, "it is slow")
ADD = Advice(Action.ADD, (), 5, "it is worth it")


@pytest.mark.parametrize(
    ("advice", "now", "nodes", "without", "why"),
    [
        ([], NOW, None, (), "nothing was advised"),
        ([Advice(Action.MEMORY, ("b",), 3, "full", 1)], NOW, None, (), "nothing was advised"),
        ([Advice(Action.REMOVE, (), 2, "not worth it")], NOW, None, (), "nothing was advised"),
        ([REPLACE], NOW, 3, ("b",), "replace b: it is slow"),
        ([REPLACE], replace(NOW, spares=0), None, (), "no spare waits"),
        ([REPLACE], replace(NOW, settled=False), None, (), "recovers"),
        ([REPLACE], replace(NOW, tolerance=0), None, (), "0 node losses are survived, 1 are needed"),
        (
            [REPLACE],
            replace(NOW, tolerance=0, wished=0),
            None,
            (),
            "0 node losses are survived, 1 are needed",
        ),
        ([REPLACE], replace(NOW, tolerance=None), None, (), "0 node losses are survived"),
        (
            [REPLACE],
            replace(NOW, tolerance=1, wished=2),
            None,
            (),
            "1 node losses are survived, 2 are needed",
        ),
        ([REPLACE], replace(NOW, ordered_unix_secs=10_001.0 - COOL_DOWN_SECS), None, (), "less than 600 s"),
        ([REPLACE], replace(NOW, ordered_unix_secs=10_000.0 - COOL_DOWN_SECS), 3, ("b",), "replace b"),
        ([REPLACE], replace(NOW, nodes=("a", "c", "d")), None, (), "does not train"),
        ([DROP], NOW, 2, ("b",), "drop b"),
        ([DROP], replace(NOW, least=3), None, (), "needs 3 nodes"),
        ([replace(DROP, nodes=("c",))], NOW, None, (), "without it 0 node losses would be survived, not 1"),
        ([replace(DROP, nodes=("c",))], replace(NOW, wished=0), 2, ("c",), "drop c"),
        ([DROP], replace(NOW, tolerance_without={}), None, (), "without it 0 node losses"),
        ([ADD], NOW, 4, (), "add to 5 nodes"),
        ([ADD], replace(NOW, most=3), None, (), "no node waits"),
        ([ADD], replace(NOW, ordered_nodes=3), None, (), "3 nodes were ordered"),
        ([ADD], replace(NOW, ordered_nodes=4, spares=2, most=5), 4, (), "add to 5 nodes"),
        ([ADD], replace(NOW, spares=0), None, (), "no node waits"),
        # The first that can be followed is.
        ([REPLACE, DROP], replace(NOW, spares=0), 2, ("b",), "drop b"),
    ],
)
def test_what_is_done(
    advice: list[Advice], now: JobNow, nodes: int | None, without: tuple[str, ...], why: str
) -> None:
    decision = decide(advice, now)
    assert (decision.nodes, decision.without) == (nodes, without)
    assert why in decision.why


def test_advice_counts_that_has_stood_for_long_without_a_break() -> None:
    watch = Sustained()
    assert watch.look([REPLACE], 100) == []
    assert watch.look([replace(REPLACE, why="slower"), DROP], 100 + SUSTAINED_STEPS - 1) == []
    # Other words are the same advice; what came later has not stood for long.
    assert watch.look([replace(REPLACE, why="slower"), DROP], 100 + SUSTAINED_STEPS) == [
        replace(REPLACE, why="slower")
    ]
    assert watch.look([], 140) == []
    assert watch.look([REPLACE], 141) == []
    assert watch.look([REPLACE], 141 + SUSTAINED_STEPS) == [REPLACE]
    # The job went back: these steps are made again.
    assert watch.look([REPLACE], 130) == []
    assert watch.look([REPLACE], 130 + SUSTAINED_STEPS) == [REPLACE]
