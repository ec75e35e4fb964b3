"""``"protection": "auto"`` in real processes: one choice on all ranks, from what the job really holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from reft.config import parse_block
from reft.engine import session as session_module
from reft.engine.attach import find_session
from reft.errors import ConfigError
from reft.policy.choice import DeviceFindings
from reft.snapshot.copy_engine import CpuCopyEngine
from tests.engine.ranks import Told, be_a_rank, run_ranks
from tests.engine.test_traffic import make, train
from tests.old_deepspeed import GRADIENTS_ARE_NOT_AVERAGED

pytestmark = pytest.mark.integration


RECOMPUTED, MEASURED = "recomputed", "measured"
TRIED = DeviceFindings(
    "a device of these hosts", 1, 1e15, adam_is_exact=True, adam_parameters_per_sec=1e9
)
"""As if: what is recomputed here is exact, and gradients are on the host at once."""
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "zero1": {},
    "together": {},
    "tight": {"memory_limit_bytes": 3 * 2**20},
    "by_hand": {"protection": "arc", "tolerance": 2},
    RECOMPUTED: {"protection": "auto+aor"},
    MEASURED: {},
    "unpartitioned": {"protection": "auto+aor", "tolerance": 2},
}
ZERO1 = ("zero1", RECOMPUTED, MEASURED)
if GRADIENTS_ARE_NOT_AVERAGED:
    del CASES[RECOMPUTED], CASES[MEASURED]

AGAIN: tuple[tuple[str, dict[str, Any]], ...] = (("one", {}), ("one", {"tolerance": 2}))
"""The same job, started anew: with the same block, and with another request."""


def case(name: str, block: dict[str, Any], told: Told) -> dict[str, Any]:
    told.texts.clear()
    kept = {"reduce_scatter": False, "contiguous_gradients": False} if name in ZERO1[1:] else {}
    tried = [TRIED] * int(os.environ["WORLD_SIZE"]) if name in ("zero1", MEASURED) else []
    session_module.check_device = lambda session: tried
    CpuCopyEngine.free_bytes = 2**30 if tried else 0  # type: ignore[misc, assignment]
    engine = make(int(name in ZERO1), block, **kept)
    session = find_session(engine)
    assert session is not None
    assert parse_block(session.context.config.as_block()) == session.context.config, (
        "the daemon reads it so"
    )
    expected = session.state.adapter.expected_bytes()
    path, _ = engine.load_checkpoint(str(Path(block["memory_dir"]) / "none"))
    losses = train(engine)
    result = {
        "scheme": session.context.config.protection,
        "in_force": session.protection.record.scheme,
        "tolerance": session.tolerance,
        "expected": expected,
        "real": [image.nbytes for image in session.state.adapter.images()],
        "path": path,
        "said": [*told.texts],
        "losses": losses,
        "ordered": ordered(session, "aec+aor"),
    }
    session.close()
    copied = session.stats.traffic.to_json()["to_host"]
    return {
        **result,
        "committed": session.stats.committed_step,
        "gradients": copied.get("gradients", 0),
    }


def ordered(session: Any, scheme: str) -> str:
    """What an order that recomputes is told; it comes too late to be followed."""
    if "+aor" in session.context.config.protection:
        return ""
    try:
        session.protect(scheme)
    except ConfigError as error:
        return str(error)
    return ""


def main(root: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    out: dict[str, Any] = {}
    with Told("reft") as told:
        for name, settings in [*CASES.items(), *AGAIN]:
            together = name == "together"
            os.environ["REFT_NODE_ID"] = "node" if together else f"node{rank}"
            os.environ["LOCAL_RANK"] = str(rank if together else 0)
            memory = root / (name if together else f"{name}{rank}")
            block = {
                **{"enabled": True, "job_id": name, "memory_dir": str(memory)},
                **{"protection": "auto", "allow_unprotected": True, **settings},
            }
            out[f"{name}{sum(known.startswith(name) for known in out) or ''}"] = case(
                name, block, told
            )
    return out


Ranks = list[dict[str, Any]]
recomputing = pytest.mark.skipif(
    GRADIENTS_ARE_NOT_AVERAGED, reason="this DeepSpeed averages no gradients that could be captured"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("auto"), world=4)


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
        assert (found["scheme"], found["in_force"], found["tolerance"]) == (
            scheme,
            in_force,
            tolerance,
        )
        assert found["committed"] == 3


@recomputing
def test_auto_recomputes_partitions_where_the_block_asks_for_it_or_it_can_and_is_cheaper_and_only_there(
    results: Ranks,
) -> None:
    for result in results:
        assert [name for name, found in result.items() if found["gradients"]] == [
            "recomputed",
            "measured",
        ]
        assert (
            result["recomputed"]["losses"]
            == result["zero1"]["losses"]
            == result["measured"]["losses"]
        )
        assert "fixed at the start" in result["zero1"]["ordered"]
    said = {
        name: " ".join(results[0][name]["said"])
        for name in ("zero1", "recomputed", "measured", "one")
    }
    assert "ZeRO partitions are sent to peers" in said["zero1"], "its gradients are not kept"
    assert "ZeRO partitions are recomputed by peers: sending costs a step" in said["measured"]
    assert "ZeRO partitions are recomputed by peers" in said["recomputed"]
    assert "partitions" not in said["one"]


def test_p1_p9_losses_do_not_depend_on_the_choice_and_the_state_is_known_before(
    results: Ranks,
) -> None:
    for result in results:
        assert (
            result["one"]["losses"]
            == result["unpartitioned"]["losses"]
            == result["by_hand"]["losses"]
        )
        assert all(result[name]["expected"] == result[name]["real"] for name in ("one", "zero1"))
    assert results[0]["zero1"]["expected"][1] > 0


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("together", "sit on 1 node(s); use at least 2 nodes"),
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


if __name__ == "__main__":
    be_a_rank(main)
