"""AOR in real processes: ring peers' partitions recomputed from gradients equal their owners', bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reft.engine.checks.start import why_inexact
from reft.protect.host_adam import AdamKind, AdamRecipe
from tests.device.simulated import device_or_skip
from tests.engine.aor_job import BF16_OPTIMIZER, CASES, EXACT, IMPOSSIBLE, METHODS, SHORT_STEPS, STEPS
from tests.engine.ranks import run_ranks
from tests.machine import FP16_MISSING

JOB = Path(__file__).with_name("aor_job.py")

Ranks = list[dict[str, Any]]

shared = pytest.mark.skipif(not CASES, reason="this DeepSpeed averages no gradients that could be captured")
"""Tests of what does not depend on the optimizer."""

FIRST = "there is no version yet to recompute from"
NO_STEP_YET = "the optimizer has made no step yet"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(JOB, tmp_path_factory.mktemp("aor"), world=3, timeout_secs=400)


def sent_partitions(run: dict[str, Any]) -> dict[int, int]:
    return {number: sent["owned"] for number, sent in enumerate(run["sent"]) if "owned" in sent}


LONG = [*CASES, *([EXACT] if CASES else [])]


@pytest.mark.integration
@pytest.mark.parametrize("case", LONG)
def test_partitions_equal_their_owners_after_many_steps(ranks: Ranks, case: str) -> None:
    for member, r in enumerate(ranks):
        run = r["long"][case]
        assert run["committed"] == STEPS
        assert str(member) in run["partitions"]
        assert len(run["partitions"]) > 1
        for owner, digest in run["partitions"].items():
            assert digest == ranks[int(owner)]["long"][case]["partitions"][owner]


@pytest.mark.integration
@pytest.mark.parametrize("case", LONG)
def test_zero_bytes_of_a_partition_cross_nodes_once_its_peers_have_it(ranks: Ranks, case: str) -> None:
    for r in ranks:
        run = r["long"][case]
        assert set(run["resynced"]) <= {FIRST, NO_STEP_YET}
        kept = len(run["partitions"]) - 1
        # fp16's first steps overflow: until the first one that does not there are no moments.
        started = max(sent_partitions(run)) + 1
        assert started == 1 or (case == "fp16" and started < 20)
        assert run["recomputed"] == kept * (STEPS - started)


@pytest.mark.integration
@pytest.mark.skipif(
    "fp16" not in CASES, reason=FP16_MISSING or "this DeepSpeed does not average these gradients on a CPU"
)
def test_overflows_were_among_the_steps(ranks: Ranks) -> None:
    """Some before the first step that was applied, and more later."""
    for r in ranks:
        run = r["long"]["fp16"]
        assert run["skipped_steps"] > max(sent_partitions(run)) + 1


WIDTHS = {BF16_OPTIMIZER: 4, "bf16": 2, "fp32": 4}


@pytest.mark.integration
@pytest.mark.parametrize(("case", "width"), [(c, w) for c, w in WIDTHS.items() if c in CASES])
def test_a_gradient_takes_4_or_2_bytes_instead_of_12(ranks: Ranks, case: str, width: int) -> None:
    for r in ranks:
        run = r["long"][case]
        kept = len(run["partitions"]) - 1
        nbytes = run["to_host"][-1]["gradients"]
        # Groups begin at multiples of 64 bytes, and an unscaled gradient brings its factor.
        assert 0 <= nbytes - kept * max(run["owned"]) * width // 12 <= kept * 64 * 3


@pytest.mark.integration
@pytest.mark.parametrize("case", LONG)
def test_p1_losses_are_equal_to_the_bit(ranks: Ranks, case: str) -> None:
    for r in ranks:
        assert r["long"][case]["losses"] == r["long"][case]["plain"]


@pytest.mark.gpu
@pytest.mark.integration
@shared
def test_p1_partitions_are_recomputed_from_the_gradients_of_a_device(tmp_path: Path) -> None:
    device = device_or_skip()
    ranks = run_ranks(JOB, tmp_path, world=3, timeout_secs=500, device=device)
    test_partitions_equal_their_owners_after_many_steps(ranks, EXACT)
    test_p1_losses_are_equal_to_the_bit(ranks, EXACT)
    assert all(r["long"][EXACT]["recomputed"] for r in ranks)
    if device == "cuda":  # the simulated one's square roots are torch's on a CPU, which rounds some wrongly
        test_zero_bytes_of_a_partition_cross_nodes_once_its_peers_have_it(ranks, EXACT)


@pytest.mark.integration
@shared
@pytest.mark.parametrize(
    ("name", "resynced", "sent_anew"),
    [
        ("dropped", {"nothing is known of how the optimizer made this step": 1}, [4]),
        ("corrupted", {"it is not what its owner has": 1}, [4]),
        # Peers are in the exchange already; the job would wait a minute for a version and fail.
        ("missing", {"KeyError": 2}, [3, 4]),
    ],
)
def test_p5_p6_what_is_wrong_on_one_rank_is_noticed_and_costs_that_partition_only(
    ranks: Ranks, name: str, resynced: dict[str, int], sent_anew: list[int]
) -> None:
    found = [r[name] for r in ranks]
    assert [run["resynced"] for run in found] == [{FIRST: 1} | resynced, {FIRST: 1}, {FIRST: 1}]
    # Rank 0 keeps member 1's partition.
    sent = [sent_partitions(run) for run in found]
    assert [list(s) for s in sent] == [[0], [0, *sent_anew], [0]]
    if name == "corrupted":
        assert sent[1][4] == 4096, "the one block with the wrong bit, not the whole partition"
    if name == "missing":
        assert found[0]["tracebacks"] == ["KeyError"], "once, with where it came from"
    assert_whole(ranks, name, SHORT_STEPS)


@pytest.mark.integration
@shared
def test_p5_a_version_that_was_missed_is_noticed_and_partitions_are_sent_anew(ranks: Ranks) -> None:
    for r in ranks:
        missing = "the gradients of steps since the newest version are missing"
        assert r["missed"]["resynced"] == {FIRST: 1, missing: 1}
        assert list(sent_partitions(r["missed"])) == [0, 5]
    assert_whole(ranks, "missed", SHORT_STEPS - 1)


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_a_closed_session_leaves_nothing_in_the_optimizer(ranks: Ranks, case: str) -> None:
    for r in ranks:
        run = r["closed"][case]
        replaced, hooks = ([], 1) if case == BF16_OPTIMIZER else (sorted(METHODS), 0)
        assert run["replaced"] == replaced
        assert run["replaced_after"] == []
        assert run["hooks_removed"] == hooks
        assert not run["captured"]
        assert run["given_up"] == {}, "versions of a closed session are not even begun"
        assert run["losses"] == run["plain"]


@pytest.mark.integration
@shared
def test_p5_without_a_bound_another_arithmetic_is_never_accepted_and_that_is_said(ranks: Ranks) -> None:
    assert_whole(ranks, "exact", 3 * SHORT_STEPS)
    for r in ranks:
        # The first replica is made when version 2 is; every one behind it is off.
        assert r["exact"]["resynced"] == {FIRST: 1, "it is not what its owner has": 3 * SHORT_STEPS - 2}
        (warning,) = r["exact"]["warnings"]
        assert "recomputing gains nothing" in warning
        assert "reft.ExactAdam" in warning


def assert_whole(ranks: Ranks, name: str, committed: int) -> None:
    for r in ranks:
        assert r[name]["committed"] == committed
        for owner, digest in r[name]["partitions"].items():
            assert digest == ranks[int(owner)][name]["partitions"][owner]


@pytest.mark.integration
def test_what_aor_needs_is_checked_at_the_start(ranks: Ranks) -> None:
    for r in ranks:
        assert '"reduce_scatter": false, "contiguous_gradients": false' in r["refused"]
        if CASES:  # an optimizer that cannot be repeated
            assert "SGD" in r["refused_optimizer"]
            assert "protect the partition by copies" in r["refused_optimizer"]


@pytest.mark.integration
@pytest.mark.skipif(not IMPOSSIBLE, reason="this DeepSpeed gives its ranks equal gradients")
def test_a_deepspeed_whose_ranks_have_other_gradients_is_refused_at_the_start(ranks: Ranks) -> None:
    for r in ranks:
        assert set(r["impossible"]) == set(IMPOSSIBLE)
        for name, refusal in r["impossible"].items():
            assert "use DeepSpeed 0.19.8 or later".lower() in refusal.lower()
            assert ("immediate_grad_update" in refusal) == (name == BF16_OPTIMIZER)


def test_a_device_that_rounds_differently_is_said_at_the_start_with_what_to_write() -> None:
    adam = AdamRecipe(AdamKind.TORCH_ADAMW, decoupled=True, on_device=True)
    said = why_inexact(adam)
    assert said is not None
    assert "every partition is sent after all" in said
    assert "optimizer=reft.ExactAdam(model.parameters(), lr=...)" in said
    assert '"zero_allow_untested_optimizer": true' in said
    assert why_inexact(replace(adam, on_device=False)) is None
    exact = replace(adam, kind=AdamKind.EXACT)
    assert why_inexact(exact) is None
    assert why_inexact(replace(exact, on_device=False), seen_exact=False) is None
    said = why_inexact(exact, seen_exact=False)
    assert said is not None
    assert said.endswith('Leave "+aor" out of "protection"')
