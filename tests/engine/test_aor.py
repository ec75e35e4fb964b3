"""AOR in real processes: ring peers' partitions recomputed from gradients equal their owners', bit for bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import reft
from reft.aor.host_adam import AdamRecipe
from reft.aor.recompute import PeerOptimizers
from reft.checks.start import explain_inexact
from reft.engine.attach import find_session
from reft.errors import UnsupportedStateError
from reft.snapshot.version import SkipCause
from reft.state.adam import AdamKind
from reft.state.catalogue import SectionImage
from tests.device.simulated import device_or_skip
from tests.engine.ranks import (
    Mlp,
    Told,
    be_a_rank,
    block_of,
    commit_every_version,
    groups,
    run_ranks,
)
from tests.machine import FP16_MISSING
from tests.old_deepspeed import (
    BF16_OPTIMIZER_IS_NEVER_MADE,
    GRADIENTS_ARE_NOT_AVERAGED,
    step_without_autograd,
)
from tests.snapshot.ranks import feature

STEPS = int(os.environ.get("REFT_AOR_STEPS", "60"))
SHORT_STEPS = 8
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
KEEP_GRADIENTS = {"reduce_scatter": False, "contiguous_gradients": False}
CASES: dict[str, dict[str, Any]] = {
    "bf16, accumulating in fp32": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, **KEEP_GRADIENTS}},
    "fp16": {
        # Scales that grow too far: some steps overflow and are skipped.
        "fp16": {
            "enabled": True,
            "initial_scale_power": 24,
            "loss_scale_window": 20,
            "hysteresis": 1,
        },
        "zero_optimization": {"stage": 1, **KEEP_GRADIENTS},
    },
    "fp32": {"zero_optimization": {"stage": 1, **KEEP_GRADIENTS}},
}
if FP16_MISSING:
    del CASES["fp16"]
BF16_OPTIMIZER = "bf16, accumulating in fp32"
IMPOSSIBLE: dict[str, dict[str, Any]] = {}
"""What this DeepSpeed does not give its data-parallel ranks equal gradients for."""
if GRADIENTS_ARE_NOT_AVERAGED:
    IMPOSSIBLE, CASES = CASES, {}
    usual = IMPOSSIBLE[BF16_OPTIMIZER]
    if BF16_OPTIMIZER_IS_NEVER_MADE:
        del IMPOSSIBLE[BF16_OPTIMIZER]
    else:
        CASES[BF16_OPTIMIZER] = {**usual, "bf16": {"enabled": True, "immediate_grad_update": True}}
USUAL = next(iter(CASES.values()), {})
EXACT = "reft.ExactAdam"
EXACT_ADAM = {
    "optimizer": {"type": "ExactAdam", "params": {"lr": 1e-2}},
    "zero_allow_untested_optimizer": True,
}
RECOMPUTE = "reft.aor.recompute"  # the logger of what is recomputed


def make(case: dict[str, Any], block: dict[str, Any] | None) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40}},
        "gradient_clipping": 0.1,
        "steps_per_print": None,
        **case,
    }
    if block is not None:
        config["reft"] = block
    # Groups hold the parameters that are on the device: moving them may make others.
    model = Mlp(16, 33).to(deepspeed.accelerator.get_accelerator().current_device_name())
    initialize = deepspeed.initialize if block is None else reft.initialize
    engine = initialize(model=model, model_parameters=groups(model), config=config)[0]
    return step_without_autograd(engine)


def train(
    engine: Any, steps: int, before_step: Callable[[int], None] = lambda _: None
) -> list[str]:
    losses = []
    for _ in range(steps):
        before_step(engine.global_steps)
        generator = torch.Generator().manual_seed(
            100 * engine.global_steps + int(os.environ["RANK"])
        )
        for _ in range(2):
            x = torch.randn(2, 16, generator=generator).to(next(engine.module.parameters()))
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss).hex())
    return losses


class Watched:
    """An engine under reft, every version of which is committed before the next step."""

    def __init__(self, root: Path, name: str, case: dict[str, Any], **options: Any) -> None:
        self.engine = make(case, block_of(root, name, block_bytes=4096, **options))
        self.engine.load_checkpoint(str(root / "none"))
        session = find_session(self.engine)
        assert session is not None
        self.session = session
        self.sent: list[dict[str, int]] = []
        self.to_host: list[dict[str, int]] = []

        def committed() -> None:
            traffic = session.stats.traffic.to_json()
            self.sent.append(traffic["sent"])
            self.to_host.append(traffic["to_host"])

        commit_every_version(session, committed)

    @property
    def newest(self) -> Any:
        return feature(self.session.worker, PeerOptimizers).base

    def partitions(self) -> dict[str, str]:
        """A digest of the bytes of every partition that this rank keeps, its own too."""
        writer = self.newest
        members = writer.layout.plan.placement.kept_by(writer.layout.member)
        return {
            str(m): hashlib.sha256(writer.partition(m).numpy().tobytes()).hexdigest()
            for m in members
        }

    def result(self, losses: list[str]) -> dict[str, Any]:
        self.session.flush(60)
        stats = self.session.stats.to_json()
        sizes = self.newest.layout.plan.sizes
        out = {
            "losses": losses,
            "sent": self.sent,
            "to_host": self.to_host,
            "partitions": self.partitions(),
            "owned": sizes.owned_bytes,
            "skipped_steps": self.engine.skipped_steps,
            "committed": stats["committed"],
            "recomputed": stats["recomputed"],
            "resynced": stats["resynced"],
        }
        self.session.close()
        return out


def long_run(root: Path, number: int, case: dict[str, Any], protection: str) -> dict[str, Any]:
    watched = Watched(root, f"long-{number}", case, protection=protection)
    losses = train(watched.engine, STEPS)
    return {"plain": train(make(case, None), STEPS), **watched.result(losses)}


def dropped_gradient(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The capture of one step is lost on rank 0."""
    watched = Watched(root, "dropped", case, protection="arc+aor")
    capture = watched.session.state.gradients

    def drop(step: int) -> None:
        original = type(capture).take
        lost = step == 4 and os.environ["RANK"] == "0"
        capture.take = (lambda number: None) if lost else (lambda number: original(capture, number))

    return watched.result(train(watched.engine, SHORT_STEPS, drop))


def missed_version(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One step is not snapshotted at all, so that its gradients never reach the host."""
    watched = Watched(root, "missed", case, protection="arc+aor")
    submit = watched.session.worker.submit

    def sometimes(request: Any) -> None:
        if request.label.step == 5:
            request.version = replace(request.version, cause=SkipCause("missed"))
        submit(request)

    watched.session.worker.submit = sometimes
    return watched.result(train(watched.engine, SHORT_STEPS))


def corrupted_replica(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """A bit of the replica turns in host memory, after it was committed."""
    watched = Watched(root, "corrupted", case, protection="arc+aor")

    def spoil(step: int) -> None:
        if step == 4 and os.environ["RANK"] == "0":
            kept = watched.newest.layout.plan.placement.kept_by(0)[1]
            watched.newest.partition(kept)[1234] ^= 1

    return watched.result(train(watched.engine, SHORT_STEPS, spoil))


def missing_tensor(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """On rank 0 a mistake that nobody foresaw: what was captured lacks a tensor that is
    needed to recompute."""
    watched = Watched(root, "missing", case, protection="arc+aor")
    session, told = watched.session, Told(RECOMPUTE)

    def rename(old: str) -> None:
        capture = session.state.gradients
        assert capture is not None
        capture.images = {
            member: SectionImage(
                [(name.replace(old, f"lost.{old}"), t) for name, t in tensors.items()]
            )
            for member, tensors in capture.staged.items()
        }
        session.state.replaced()

    def spoil(step: int) -> None:
        if os.environ["RANK"] != "0":
            return
        if step in (3, 4):
            rename("gradient.1")
        else:
            rename("nothing")

    with told:
        out = watched.result(train(watched.engine, SHORT_STEPS, spoil))
    return {**out, "tracebacks": told.tracebacks}


def closed(root: Path, number: int, case: dict[str, Any]) -> dict[str, Any]:
    watched = Watched(root, f"closed-{number}", case, protection="arc+aor")
    wrapper = watched.engine.optimizer
    inner = watched.session.state.adapter.state.optimizer
    capture = watched.session.state.gradients
    assert capture is not None
    losses = train(watched.engine, 3)
    hooks = len(inner._optimizer_step_pre_hooks)
    replaced = sorted(set(vars(wrapper)) & set(METHODS))
    watched.session.close()
    losses += train(watched.engine, 3)
    return {
        "losses": losses,
        "plain": train(make(case, None), 6),
        "replaced": replaced,
        "replaced_after": sorted(set(vars(wrapper)) & set(METHODS)),
        "hooks_removed": hooks - len(inner._optimizer_step_pre_hooks),
        "captured": bool(capture.images or capture.staged or capture.record is not None),
        "given_up": dict(watched.session.stats.skipped),
    }


METHODS = (
    "_release_ipg_buffers",
    "unscale_and_clip_grads",
)  # of DeepSpeedZeroOptimizer, seen by the capture


def other_arithmetic(root: Path, case: dict[str, Any], name: str) -> dict[str, Any]:
    """The replica runs another kernel than its owner, as the host of a GPU does: masters are off by one bit."""
    watched = Watched(root, name, case, protection="arc+aor")
    told, optimizers = Told(RECOMPUTE), set[int]()

    def nudge(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.copy_(torch.nextafter(param.data, torch.tensor(torch.inf)))

    def other_kernel(step: int) -> None:
        for replica in feature(watched.session.worker, PeerOptimizers).replicas.values():
            if id(replica) not in optimizers:
                optimizers.add(id(replica))
                replica.optimizer.register_step_post_hook(nudge)

    with told:
        out = watched.result(train(watched.engine, 3 * SHORT_STEPS, other_kernel))
    return {**out, "warnings": told.texts}


def refused(case: dict[str, Any], root: Path) -> str:
    try:
        memory = str(root / f"refused{os.environ['RANK']}")
        make(case, {"enabled": True, "memory_dir": memory, "protection": "aec+aor"})
    except UnsupportedStateError as error:
        return str(error)
    return ""


def main(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"long": {}}
    if os.environ["TEST_DEVICE"] != "cpu":
        out["long"][EXACT] = long_run(root, 0, {**USUAL, **EXACT_ADAM}, "aec+aor")
        return out
    out["refused"] = refused({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, root)
    out["impossible"] = {name: refused(case, root) for name, case in IMPOSSIBLE.items()}
    for number, (name, case) in enumerate(CASES.items()):
        protection = ("aec+aor", "arc:2+aor", "arc+aor", "arc+aec+aor")[number]
        out["long"][name] = long_run(root, number, case, protection)
    if not CASES:
        return out
    out["closed"] = {name: closed(root, n, case) for n, (name, case) in enumerate(CASES.items())}
    out["long"][EXACT] = long_run(root, len(CASES), {**USUAL, **EXACT_ADAM}, "aec+aor")
    out["missing"] = missing_tensor(root, USUAL)
    out["dropped"] = dropped_gradient(root, USUAL)
    out["missed"] = missed_version(root, USUAL)
    out["corrupted"] = corrupted_replica(root, USUAL)
    out["exact"] = other_arithmetic(root, USUAL, "exact")
    out["refused_optimizer"] = refused({**USUAL, **SGD}, root)
    return out


Ranks = list[dict[str, Any]]

shared = pytest.mark.skipif(
    not CASES, reason="this DeepSpeed averages no gradients that could be captured"
)
"""Tests of what does not depend on the optimizer."""

FIRST = "there is no version yet to recompute from"
NO_STEP_YET = "the optimizer has made no step yet"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("aor"), world=3, timeout_secs=400)


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
def test_zero_bytes_of_a_partition_cross_nodes_once_its_peers_have_it(
    ranks: Ranks, case: str
) -> None:
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
    "fp16" not in CASES,
    reason=FP16_MISSING or "this DeepSpeed does not average these gradients on a CPU",
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
    ranks = run_ranks(Path(__file__), tmp_path, world=3, timeout_secs=500, device=device)
    test_partitions_equal_their_owners_after_many_steps(ranks, EXACT)
    test_p1_losses_are_equal_to_the_bit(ranks, EXACT)
    assert all(r["long"][EXACT]["recomputed"] for r in ranks)
    if (
        device == "cuda"
    ):  # the simulated one's square roots are torch's on a CPU, which rounds some wrongly
        test_zero_bytes_of_a_partition_cross_nodes_once_its_peers_have_it(ranks, EXACT)


@pytest.mark.integration
@shared
@pytest.mark.parametrize(
    ("name", "resynced", "sent_anew"),
    [
        ("dropped", {"nothing is known of how the optimizer made this step": 1}, [3]),
        ("corrupted", {"it is not what its owner has": 1}, [3]),
        # Peers are in the exchange already; the job would wait a minute for a version and fail.
        ("missing", {"KeyError": 2}, [2, 3]),
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
        assert sent[1][3] == 4096, "the one block with the wrong bit, not the whole partition"
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
        # One more hook follows the parameter groups, whatever the protection.
        replaced, hooks = ([], 2) if case == BF16_OPTIMIZER else (sorted(METHODS), 1)
        assert run["replaced"] == replaced
        assert run["replaced_after"] == []
        assert run["hooks_removed"] == hooks
        assert not run["captured"]
        assert run["given_up"] == {}, "versions of a closed session are not even begun"
        assert run["losses"] == run["plain"]


@pytest.mark.integration
@shared
def test_p5_without_a_bound_another_arithmetic_is_never_accepted_and_that_is_said(
    ranks: Ranks,
) -> None:
    assert_whole(ranks, "exact", 3 * SHORT_STEPS)
    for r in ranks:
        # The first replica is made when version 2 is; every one behind it is off.
        assert r["exact"]["resynced"] == {
            FIRST: 1,
            "it is not what its owner has": 3 * SHORT_STEPS - 2,
        }
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
    said = explain_inexact(adam)
    assert said is not None
    assert "every partition is sent after all" in said
    assert '"optimizer": {"type": "ExactAdam"' in said
    assert "optimizer=reft.ExactAdam(...)" in said
    assert "--optimizer exact_adam" in said
    assert '"zero_allow_untested_optimizer": true' in said
    assert explain_inexact(replace(adam, on_device=False)) is None
    exact = replace(adam, kind=AdamKind.EXACT)
    assert explain_inexact(exact) is None
    assert explain_inexact(replace(exact, on_device=False), seen_exact=False) is None
    said = explain_inexact(exact, seen_exact=False)
    assert said is not None
    assert said.endswith('Leave "+aor" out of "protection"')


if __name__ == "__main__":
    be_a_rank(main)
