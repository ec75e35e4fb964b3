"""Megatron's samplers, of which reft changes nothing: nodes are lost, and every rank is given the samples that it would
have been given, each once (P8). By the books that the stand-ins of both programs keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.examples.runs import run_to_its_end
from tests.job.cluster import WatchedCluster
from tests.megatron.runs import DeepSpeedProgram, Program, lost_node
from tests.megatron.samplers import Book

pytestmark = pytest.mark.process

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CORE = HERE.parent / "megatron_core" / "standin" / "pretrain_gpt.py"
ITERATIONS, KILLED_AT = 12, 7
CYCLIC = ("--dataloader-type", "cyclic", "--samples", "26")
"""Three iterations are a pass; two samples of it are left out."""
SECS = 300.0
ENV = {"PYTHONPATH": str(ROOT), "REFT_LOGLEVEL": "INFO"}


def of_deepspeed(*arguments: str) -> Program:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    arguments = ("--train-iters", str(ITERATIONS), *arguments)
    script = HERE / "standin" / "pretrain_gpt.py"
    return DeepSpeedProgram(script=script, arguments=arguments, config=config, nodes=2, env=ENV)


def of_core(*arguments: str) -> Program:
    arguments = ("--train-iters", str(ITERATIONS), *arguments)
    return Program(script=CORE, arguments=arguments, nodes=2, env=ENV)


def book_of(program: Program, directory: Path, block: dict[str, Any] | None, *, lost: int = 0) -> Book:
    with program.cluster(directory, block) as job:
        codes, log = run_to_its_end(job, SECS, lost=lost)
        book = Book.read(job.events("trained"))
    assert set(codes.values()) == {0}, log[-4000:]
    return book


WITH_CORE = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed: pip install 'reft-ckpt[megatron]'",
)


@pytest.mark.parametrize(
    ("make", "order"),
    [
        pytest.param(of_deepspeed, "cyclic", marks=pytest.mark.nightly),
        pytest.param(of_deepspeed, "single", marks=pytest.mark.nightly),
        pytest.param(of_core, "cyclic", marks=(WITH_CORE, pytest.mark.nightly)),
        pytest.param(of_core, "single", marks=(WITH_CORE, pytest.mark.nightly)),
    ],
)
def test_p8_every_rank_is_given_the_samples_of_the_undisturbed_run(
    make: Any, order: str, tmp_path: Path
) -> None:
    program = make(*(CYCLIC if order == "cyclic" else ()))
    undisturbed = book_of(program, tmp_path / "undisturbed", None)
    assert len(undisturbed.lines) == 2 * ITERATIONS
    disturbed = book_of(program, tmp_path / "disturbed", lost_node(KILLED_AT), lost=1)
    assert len(disturbed.pids) >= 4, "two lives of two trainers"
    assert {at for at, made in disturbed.lines.items() if made[0] != undisturbed.lines[at][0]} == set()
    assert disturbed.differs() == []
    # What was made by a trainer that was killed before it could say so is not known.
    assert len(undisturbed.lines) - len(disturbed.lines) <= 2
    each = 3 if order == "cyclic" else ITERATIONS
    for begin in range(1, ITERATIONS + 1, each):
        steps = [disturbed.of_job().get((step, 2), []) for step in range(begin, begin + each)]
        samples = [sample for step in steps for sample in step]
        assert len(samples) == len(set(samples)), f"from iteration {begin} on"


# -- other degrees -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Elastic(DeepSpeedProgram):
    """May go on with two nodes of three."""

    def given(self, config: Path, has_block: bool) -> tuple[Sequence[str], Sequence[str]]:
        conf = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"
        options = ("--nnodes", "2:3", "--max-restarts", "0", "--rdzv-conf", conf)
        return options, super().given(config, has_block)[1]


BATCH = 12
"""Samples of a step: of three replicas two micro-batches each, of two three."""


def lose_one_of_three(directory: Path, *arguments: str) -> tuple[Book, str]:
    """What was trained on, and the log; the node is not replaced."""
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
    }
    length = ("--train-iters", str(ITERATIONS), "--global-batch-size", str(BATCH))
    script = HERE / "standin" / "pretrain_gpt.py"
    program = Elastic(script=script, arguments=(*length, *arguments), config=config, nodes=3, env=ENV)

    def told(job: WatchedCluster) -> int:
        return int(max((event["step"] for event in job.events("trained")), default=0))

    with program.cluster(directory, {"enabled": True}) as job:
        job.wait_until(lambda: told(job) >= KILLED_AT, SECS, f"iteration {KILLED_AT}")
        job.kill_node(1)
        job.wait(SECS)
        log = "".join(path.read_text(errors="replace") for path in sorted(directory.glob("node*.log")))
        return Book.read(job.events("trained")), log


@pytest.mark.integration
def test_p8_every_sample_once_where_the_degree_changes(tmp_path: Path) -> None:
    book, log = lose_one_of_three(tmp_path / "job")
    trained = book.of_job()
    assert {ranks for _, ranks in trained} == {2, 3}, log[-4000:]
    for (step, ranks), samples in trained.items():
        assert sorted(samples) == list(range(BATCH * (step - 1), BATCH * step)), (
            f"step {step} of {ranks} ranks"
        )
    assert len({step for step, _ in trained}) >= ITERATIONS - 1
    assert "MegatronPretrainingRandomSampler" not in log


@pytest.mark.nightly
def test_p12_the_random_sampler_is_named_where_the_degree_may_change_and_where_it_does(
    tmp_path: Path,
) -> None:
    """Each rank has a part of the data set of its own, by the degree."""
    _, log = lose_one_of_three(tmp_path / "job", *CYCLIC[:2], "--samples", "120")
    named = "MegatronPretrainingRandomSampler (--dataloader-type cyclic) deals a pass out by the data-parallel degree"
    assert f"the number of nodes may change (--nnodes 2:3). Megatron's {named}" in log
    assert "Use --dataloader-type single, whose order is the job's at every degree" in log
    assert "and the job goes from DP3 to DP2" in log
