"""The command line of the demonstration: derived where it can be, refused where it cannot."""

from __future__ import annotations

import pytest

from reft.errors import ConfigError
from reft.tools.demo.command import Kill, deepspeed_config, parse


def test_default_is_pp2_dp2_on_four_nodes_and_loses_one_of_them():
    options = parse([])
    assert (options.pp, options.dp, options.kills) == (2, 2, (Kill(9, 1),))
    assert parse(["--steps", "1"]).kills == parse(["--kill", "none"]).kills == ()
    assert parse(["--kill", "14:0,9:1,9:3"]).kills == (Kill(9, 1), Kill(9, 3), Kill(14, 0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--kill x:1", ("'x:1'", "STEP:NODE")),
        ("--kill 24:1", ("from 1 to 23",)),
        ("--kill 3:4", ("nodes 0 to 3",)),
        ("--kill 3:1,3:1", ("once in a step", "repetition")),
        ("--steps 0", ("--steps is 0",)),
        ("--protection aec --dp 1 --pp 1", ("protection aec", "at least 2", "found 1")),
        ("--protection arc+aec", ("protection arc+aec", "at least 3", "found 2")),
        ("--pp 8 --dp 1", ("layers", "--pp 8")),
        ("--memory-dir /no/such/dir", ("/no/such/dir", "another directory")),
    ],
)
def test_the_impossible_is_refused_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError) as refusal:
        parse(arguments.split())
    for words in said:
        assert words in str(refusal.value)


def test_both_runs_train_the_same_and_only_one_has_the_block():
    options = parse(["--protection", "arc:2"])
    quiet, protected = (deepspeed_config(options, protected=which) for which in (False, True))
    assert protected.pop("reft")["protection"] == "arc:2"
    assert quiet == protected
