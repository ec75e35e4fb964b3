"""The bad one of many is found, and nobody else is accused."""

from __future__ import annotations

import pytest

from reft.cli.check import first_pairs, judge, second_pairs

WELL = {"matmul_flops": 1e12, "memory_bytes": 1e10, "link_bytes": 2e10}


def reduced(pairs: list[tuple[int, ...]], *slow: int, hung: int = -1) -> dict[int, float | None]:
    """Seconds of each: a pair is as quick as the slower one, and fails with one that hangs."""
    found: dict[int, float | None] = {}
    for pair in pairs:
        secs = None if hung in pair else 0.05 if set(slow) & set(pair) else 0.01
        found |= dict.fromkeys(pair, secs)
    found.pop(hung, None)
    return found


@pytest.mark.parametrize("nodes", [4, 5, 8, 9])
@pytest.mark.parametrize("hangs", [False, True])
def test_whoever_is_in_a_bad_pair_twice_is_bad(nodes: int, hangs: bool) -> None:
    for bad in range(nodes):
        names = [f"n{i}" for i in range(nodes)]
        alone = dict.fromkeys(range(nodes), WELL)
        hung = bad if hangs else -1
        pairs = first_pairs(range(nodes))
        first = reduced(pairs, bad, hung=hung)
        again = second_pairs(range(nodes), first)
        assert sorted(n for pair in again for n in pair) == list(range(nodes))
        bad_ones, unclear = judge(
            names, alone, ((pairs, first), (again, reduced(again, bad, hung=hung))), 1.5
        )
        if nodes % 2 and not bad_ones:
            # Three of five were together in the bad one: two of them are so again.
            (said,) = unclear
            assert f"n{bad}" in said
            continue
        assert [name for name, _ in bad_ones] == [f"n{bad}"], (pairs, again)
        assert "all-reduce" in bad_ones[0][1][0]
        assert unclear == []


def test_what_a_node_cannot_do_alone_is_said_of_it() -> None:
    alone = {0: WELL, 1: WELL | {"matmul_flops": 0.4e12}, 2: WELL | {"link_bytes": 0.5e10}}
    bad_ones, _ = judge(["a", "b", "c", "d"], alone, (), 1.5)
    assert dict(bad_ones) == {
        "b": ["it multiplies matrices 2.5 times slower than the others"],
        "c": ["it copies to its device 4.0 times slower than the others"],
        "d": ["it does not answer"],
    }


def test_of_two_it_is_not_said_which() -> None:
    failed = (((0, 1),), {0: None})
    bad_ones, unclear = judge(["a", "b"], {0: WELL, 1: WELL}, (failed, failed), 1.5)
    assert bad_ones == []
    assert unclear == ["one of a, b: all-reduce with others fails, or takes too long"]


def test_nodes_that_differ_a_little_are_well() -> None:
    alone = {n: {"matmul_flops": 1e12 * (1 + 0.1 * n), "memory_bytes": 1e10} for n in range(4)}
    pairs = first_pairs(range(4))
    bad_ones, unclear = judge(
        ["a", "b", "c", "d"], alone, ((pairs, reduced(pairs)), (pairs, reduced(pairs))), 1.5
    )
    assert (bad_ones, unclear) == ([], [])
    assert judge(["a"], {0: WELL}, (), 1.5) == ([], [])
