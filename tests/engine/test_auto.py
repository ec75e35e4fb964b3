"""``"protection": "auto"`` in real processes: one choice on all ranks, from what the job really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_ranks
from tests.old_deepspeed import GRADIENTS_ARE_NOT_AVERAGED

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("auto_job.py")
Ranks = list[dict[str, Any]]
recomputing = pytest.mark.skipif(
    GRADIENTS_ARE_NOT_AVERAGED, reason="this DeepSpeed averages no gradients that could be captured"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(JOB, tmp_path_factory.mktemp("auto"), world=4)


@pytest.mark.parametrize(
    ("name", "scheme", "tolerance"),
    [
        ("one", "aec", 1),
        ("zero1", "aec", 1),
        ("together", "none", 0),
        ("tight", "none", 0),
        ("by_hand", "arc", 1),
        pytest.param("recomputed", "aec+aor", 1, marks=recomputing),
        pytest.param("measured", "aec+aor", 1, marks=recomputing),
        ("unpartitioned", "rs:2+aor", 2),
    ],
)
def test_all_ranks_choose_alike_and_keep_what_was_chosen(
    results: Ranks, name: str, scheme: str, tolerance: int
) -> None:
    in_force = scheme.removesuffix("+aor")
    for result in results:
        found = result[name]
        assert (found["scheme"], found["in_force"], found["tolerance"]) == (scheme, in_force, tolerance)
        assert found["committed"] == 3


@recomputing
def test_auto_recomputes_partitions_where_the_block_asks_for_it_or_it_can_and_is_cheaper_and_only_there(
    results: Ranks,
) -> None:
    for result in results:
        assert [name for name, found in result.items() if found["gradients"]] == ["recomputed", "measured"]
        assert result["recomputed"]["losses"] == result["zero1"]["losses"] == result["measured"]["losses"]
        assert "fixed at the start" in result["zero1"]["ordered"]
    said = {name: " ".join(results[0][name]["said"]) for name in ("zero1", "recomputed", "measured", "one")}
    assert "ZeRO partitions are sent to peers" in said["zero1"], "its gradients are not kept"
    assert "ZeRO partitions are recomputed by peers: sending costs a step" in said["measured"]
    assert "ZeRO partitions are recomputed by peers" in said["recomputed"]
    assert "partitions" not in said["one"]


def test_p1_p9_losses_do_not_depend_on_the_choice_and_the_state_is_known_before(results: Ranks) -> None:
    for result in results:
        assert result["one"]["losses"] == result["unpartitioned"]["losses"] == result["by_hand"]["losses"]
        assert all(result[name]["expected"] == result[name]["real"] for name in ("one", "zero1"))
    assert results[0]["zero1"]["expected"][1] > 0


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("together", "sit on 1 node(s); put them on at least 2"),
        ("tight", "more of host memory on node0 than the 3.0 MiB that reft may use there"),
    ],
)
def test_p4_what_cannot_be_reached_is_said_loudly_with_what_it_would_take(
    results: Ranks, name: str, needed: str
) -> None:
    said = " ".join(results[0][name]["said"])
    assert "IS NOT REACHED" in said
    assert needed in said


def test_rank_zero_says_what_was_chosen_and_why_and_which_wish_is_missed(results: Ranks) -> None:
    said = " ".join(results[0]["one"]["said"])
    assert "protection auto: aec: survives the loss of 1 node, 1 wanted" in said
    assert "the cheapest of" in said
    assert not any("protection auto" in text for r in results[1:] for text in r["one"]["said"])
    assert any("arc survives 1" in text for text in results[0]["by_hand"]["said"])


def test_p3_a_version_comes_back_under_the_same_choice_and_under_another(results: Ranks) -> None:
    for result in results:
        same, other = result["one1"], result["one2"]
        assert (same["path"], same["scheme"], same["committed"]) == ("memory:one/3", "aec", 6)
        assert (other["path"], other["scheme"], other["tolerance"]) == ("memory:one/6", "rs:2", 2)
        assert other["committed"] == 9
