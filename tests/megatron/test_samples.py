"""Megatron's samplers, of which reft changes nothing, where a node is lost and not replaced: each sample is trained on
once (P8), or it is said (P12). By the book that the stand-in of Megatron-DeepSpeed keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.job.cluster import WatchedCluster
from tests.megatron.runs import DeepSpeedProgram
from tests.megatron.samplers import Book

pytestmark = pytest.mark.process

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ITERATIONS, KILLED_AT = 12, 7
SECS = 300.0
ENV = {"PYTHONPATH": str(ROOT), "REFT_LOGLEVEL": "INFO"}


@dataclass(frozen=True, kw_only=True)
class Elastic(DeepSpeedProgram):
    """May go on with two nodes of three."""

    def given(self, config: Path, has_block: bool) -> tuple[Sequence[str], Sequence[str]]:
        conf = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5,join_timeout=120"
        options = ("--nnodes", "2:3", "--max-restarts", "0", "--rdzv-conf", conf)
        return options, super().given(config, has_block)[1]


BATCH = 12  # Samples of a step: of three replicas two micro-batches each, of two three


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
    _, log = lose_one_of_three(tmp_path / "job", "--dataloader-type", "cyclic", "--samples", "120")
    named = "MegatronPretrainingRandomSampler (--dataloader-type cyclic) distributes a pass by the data-parallel degree"
    assert f"the number of nodes may change (--nnodes 2:3). Megatron's {named}" in log
    assert "Use --dataloader-type single, whose order is the same at every degree" in log
    assert "and the job goes from DP3 to DP2" in log
