"""The command line of the demonstration: derived where it can be, refused where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.errors import ConfigError
from reft.grid import Degrees
from reft.tools.demo.cluster import KillKind
from reft.tools.demo.options import Kill, derive_layout, parse


def test_default_is_pp2_dp2_on_four_nodes_and_loses_one_of_them():
    options = parse([])
    assert (options.nodes, options.procs_per_node, options.degrees) == (4, 1, Degrees(2, 2, 1))
    assert options.kills == (Kill(9, 1),)
    assert options.kill_kind is KillKind.NODE
    assert options.dropout > 0, "without dropout the random states of the ranks would not matter"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(pp=2, dp=3), (6, 1, Degrees(2, 3, 1))),
        (dict(pp=1, dp=4, nodes=2), (2, 2, Degrees(1, 4, 1))),
        (dict(nodes=2), (2, 1, Degrees(1, 2, 1))),
        (dict(nodes=3), (3, 1, Degrees(1, 3, 1))),
        (dict(nodes=6), (6, 1, Degrees(2, 3, 1))),
        (dict(dp=4), (4, 1, Degrees(1, 4, 1))),
        (dict(nodes=1, pp=1), (1, 1, Degrees(1, 1, 1))),
    ],
)
def test_what_is_left_out_of_the_layout_is_derived(given, expected):
    every = dict(nodes=None, procs=None, pp=None, dp=None)
    assert derive_layout(**{**every, **given}) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nodes 4 --pp 3", ("4 node(s) x 1", "--pp 3", "Change")),
        ("--nodes 3 --pp 2 --dp 2", ("3 node(s) x 1", "needs 4")),
        ("--nodes 4 --procs-per-node 1 --pp 2 --dp 3", ("= 4 trainers", "needs 6")),
        ("--nodes 0", ("--nodes is 0", "positive")),
        ("--kill 9", ("'9'", "STEP:NODE")),
        ("--kill x:1", ("'x:1'", "STEP:NODE")),
        ("--kill 24:1", ("step 24", "from 1 to 23")),
        ("--kill 0:1", ("step 0", "from 1 to 23")),
        ("--kill 3:4", ("node 4", "0 to 3")),
        ("--kill 3:1,3:1", ("once in a step", "repetition")),
        ("--steps 0", ("--steps is 0",)),
        ("--dropout 1.0", ("--dropout is 1.0",)),
        ("--interval 0", ("--interval is 0",)),
        ("--timeout 0", ("--timeout is 0",)),
        ("--persist-interval -1", ("--persist-interval is -1",)),
        ("--interval 4 --persist-interval 6", ("persist.interval_steps is 6", "multiple of 4")),
        ("--protection none --copies 1", ("contradict",)),
        ("--protection aec --dp 1 --nodes 1 --pp 1", ("protection aec", "at least 2", "found 1")),
        ("--protection rs:3", ("protection rs:3", "at least 4", "found 2")),
        ("--protection arc+aec+aor --zero 1", ("protection arc+aec", "at least 3", "found 2")),
        ("--copies 0", ("protects nothing",)),
        ("--pp 8 --dp 1", ("layers", "--pp 8")),
        ("--memory-dir /no/such/dir", ("/no/such/dir", "another directory")),
    ],
)
def test_the_impossible_is_refused_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError) as refusal:
        parse(arguments.split())
    for words in said:
        assert words in str(refusal.value)


def test_failures_are_in_the_order_of_steps():
    options = parse(["--nodes", "4", "--kill", "14:0,9:1,9:3"])
    assert options.kills == (Kill(9, 1), Kill(9, 3), Kill(14, 0))
    assert parse(["--kill", "none"]).kills == ()


def test_one_step_leaves_no_room_for_a_failure():
    assert parse(["--steps", "1"]).kills == ()


def test_both_runs_train_the_same_and_only_one_has_the_block():
    options = parse(["--zero", "1", "--dtype", "bf16", "--copies", "1", "--persist-interval", "4"])
    block = options.reft_block(Path("/persist"))
    assert block["persist"] == {"dir": "/persist", "interval_steps": 4}
    quiet, protected = options.trainer_options(Path("x")), options.trainer_options(Path("x"), block)
    assert protected["deepspeed"].pop("reft") == block
    assert quiet == protected
