"""A job goes on from memory with fewer replicas, and with more again, as a job of that layout would."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from reft.engine.on_import import refusal_of
from tests.engine.ranks import run_life
from tests.engine.resize_job import CASES, STEPS

JOB = Path(__file__).with_name("resize_job.py")
pytestmark = pytest.mark.nightly
LIVES = (3, 2, 3)  # Replicas of every life
KEYS_TO_SET = (
    """write "train_batch_size": 12 and "train_micro_batch_size_per_gpu": 2 into DeepSpeed's JSON, and no """
    '"gradient_accumulation_steps"'
)
Lives = list[list[dict[str, Any]]]


def to_universal(root: Path, tag: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    for folder in root.glob("*/checkpoint"):
        if list((folder / tag).glob("*optim_states.pt")):
            ds_to_universal.main(
                Namespace(
                    input_folder=str(folder / tag),
                    output_folder=str(folder / f"{tag}-universal"),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    root, found, tag = tmp_path_factory.mktemp("lives"), Lives(), ""
    for number, replicas in enumerate(LIVES, 1):
        found.append(run_life(JOB, root, replicas, until=number * STEPS, tag=tag, cases=tuple(CASES)))
        tag = f"step{number * STEPS}"
        to_universal(root, tag)
    return found


@pytest.mark.parametrize("case", CASES)
def test_p1_p3_a_resized_job_goes_on_where_it_was_as_a_job_of_its_layout(lives: Lives, case: str) -> None:
    """Also after a start that failed before the first version of its degree was committed. Bit for bit, masters and
    moments with their padding too; the first version of the new degree is protected before the first step."""
    for number, (replicas, ranks) in enumerate(zip(LIVES, lives, strict=True)):
        for rank in ranks if number else ():
            found = rank[case]
            assert found["path"] == f"memory:{case}/{number * STEPS}"
            assert found["begins"] == number * STEPS
            assert found["committed"] == (number + 1) * STEPS
            assert replicas in found["degrees"]
            assert len(found["losses"]) == STEPS
            assert found["losses"] == found["reference"]["losses"]
            assert found["images"] == found["reference"]["images"]


def test_p7_what_is_not_this_job_at_another_degree_is_refused(lives: Lives) -> None:
    for rank in lives[1]:
        batch, optimizer = rank["refused"]["batch"], rank["refused"]["optimizer"]
        assert "FingerprintError" in batch
        assert "config.train_batch_size: was 12, is 8" in batch
        assert KEYS_TO_SET in batch
        assert "FingerprintError" in optimizer
        assert "config.gradient_clipping: was 0.1, is 0.5" in optimizer
        assert "layout.dp" not in optimizer
        assert "config.gradient_accumulation_steps" not in optimizer


def test_p1_without_zero_a_checkpoint_of_other_replicas_is_one_of_this_layout(tmp_path: Path) -> None:
    """DeepSpeed loads the files that the script had it save; what reft saved beside them is of a replica each."""
    tag = ""
    for number, replicas in enumerate((3, 2, 3), 1):
        until = number * STEPS
        for rank in run_life(JOB, tmp_path, replicas, until=until, tag=tag, cases=["zero0"], disk=True):
            zero0 = rank["zero0"]
            assert len(zero0["losses"]) == STEPS
            if tag:
                assert f"checkpoint/{tag}/" in zero0["path"]
                assert zero0["begins"] == until - STEPS
                assert zero0["losses"] == zero0["reference"]["losses"]
                assert zero0["images"] == zero0["reference"]["images"]
                assert zero0["micro_steps"] == until * 12 // 2 // replicas
                assert "config.train_batch_size: was 12" in rank["refused"]
                assert KEYS_TO_SET in rank["refused"]
        tag = f"step{until}"


def test_a_global_batch_that_the_replicas_cannot_share_is_refused_with_the_degrees_that_can(
    lives: Lives,
) -> None:
    for rank in lives[1]:
        said = rank["refused"]["division"]
        assert '"train_batch_size" 14 cannot be split into micro-batches of 2 samples' in said
        assert "14 != 2 * 3 * 2" in said
        assert "one of these degrees: 1, 7" in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, "degrees: 1, 2, 3, 6"),
        ({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2}, "a multiple of 2"),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            'degrees: 3, or leave "gradient_accumulation_steps" out',
        ),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}, None),
        (None, None),
    ],
)
def test_degrees_that_share_a_batch(config: dict[str, Any] | None, said: str | None) -> None:
    error = AssertionError("Check batch related parameters. 12 != 2 * 1 * 5")
    refusal = refusal_of(error, config)
    assert refusal is None if said is None else said in str(refusal)
    assert refusal_of(AssertionError("something else"), config) is None


def test_p7_partitions_in_an_order_of_their_degree_are_refused_by_name(lives: Lives) -> None:
    for rank in lives[1]:
        assert "round_robin_gradients" in rank["refused"]["round-robin"]
    # What was refused is there for a job of the degree that wrote it.
    assert [rank["refused"]["path"] for rank in lives[2]] == ["memory:round-robin/3"] * 3
