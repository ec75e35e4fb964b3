"""A Hugging Face Trainer that loses a node ends with the weights of a run without reft, in every bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import reft
import reft.hf

from .test_examples import EXAMPLES, ON_HOST, Example, lose_a_node

pytest.importorskip("transformers", reason="needs the extra hf: pip install 'reft-ckpt[hf]'")
pytest.importorskip("accelerate", reason="needs the extra hf: pip install 'reft-ckpt[hf]'")

TRAINER = Example("trainer.py", "trainer.json", ("--epochs", "2"))
ZERO = {
    "offloaded": ON_HOST,
    "zero3": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
PASS = 16  # steps of a pass over the example's 256 samples: two ranks, batches of 4, two batches a step


def weights(run: Path) -> bytes:
    (path,) = (run / "checkpoints").glob("*model.safetensors")
    return path.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trainer") / "undisturbed"
    log = TRAINER.run(directory, {"enabled": False}).log
    assert log.count("'loss'") == 2 * 2 * PASS, "two nodes log two passes"
    return directory


@pytest.mark.nightly
@pytest.mark.parametrize("step", [PASS // 2, PASS], ids=["within a pass", "at the end of a pass"])
def test_a_trainer_goes_on_where_the_version_was_taken(
    undisturbed: Path, tmp_path: Path, step: int
) -> None:
    lose_a_node(TRAINER, tmp_path / "disturbed", step)
    assert weights(tmp_path / "disturbed") == weights(undisturbed)


@pytest.mark.process
@pytest.mark.integration
@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_a_trainer_of_a_zero_stage_goes_on_where_the_version_was_taken(
    tmp_path: Path, zero: dict[str, Any]
) -> None:
    example = Example("trainer.py", "trainer.json", ("--epochs", "1"), zero=zero)
    example.run(tmp_path / "undisturbed", {"enabled": False})
    lose_a_node(example, tmp_path / "disturbed", PASS // 2)
    assert weights(tmp_path / "disturbed") == weights(tmp_path / "undisturbed")


@pytest.mark.process
@pytest.mark.integration
@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_of_adapters_goes_on_where_the_version_was_taken(
    tmp_path: Path, stage: int
) -> None:
    """Losses tell that the frozen weights are the same; the adapters are what it saves."""
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    example = Example("trainer.py", "trainer.json", ("--epochs", "1", "--lora"), zero=zero)
    undisturbed = example.run(tmp_path / "undisturbed", {"enabled": False})
    disturbed = lose_a_node(example, tmp_path / "disturbed", PASS // 2)
    disturbed.check_against(undisturbed)
    assert "are frozen weights: every version has them" in disturbed.log
    assert weights(tmp_path / "disturbed") == weights(tmp_path / "undisturbed")


@pytest.mark.process
@pytest.mark.integration
@pytest.mark.parametrize("steps", [4, 5], ids=["last step saved", "last step in memory alone"])
def test_p3_a_trainer_that_resumes_after_its_last_step_loads_its_best_model(
    tmp_path: Path, steps: int
) -> None:
    config = json.loads((EXAMPLES / "trainer.json").read_text())
    config["reft"] = {"enabled": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    script = Path(__file__).with_name("best_model.py")
    saved = tmp_path / "saved"
    launch = (sys.executable, "-m", "reft.cli", "launch", "--standalone", "--max-restarts", "1")
    memory = ("--memory-dir", tmp_path / "memory")
    options = ("--steps", str(steps), "--deepspeed_config", path, "--save-dir", saved)
    job = subprocess.run(
        [*launch, *memory, script, *options], capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr[-4000:]
    assert f"resumed at step {steps} from memory" in job.stderr, job.stderr[-4000:]
    best = saved / "checkpoint-2" / "model.safetensors"
    assert (saved / "model.safetensors").read_bytes() == best.read_bytes()


def test_callbacks_go_on_with_their_state() -> None:
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    def life(*counters: int) -> tuple[reft.hf.Resumption, list[EarlyStoppingCallback]]:
        callbacks = [EarlyStoppingCallback(early_stopping_patience=3) for _ in counters]
        for callback, counter in zip(callbacks, counters, strict=True):
            callback.early_stopping_patience_counter = counter
        handler = CallbackHandler(callbacks, None, None, None, None)
        trainer = SimpleNamespace(
            callback_handler=handler, state=TrainerState(), control=TrainerControl()
        )
        return reft.hf.Resumption(trainer), callbacks

    captured = json.loads(json.dumps(life(2, 1)[0].capture()))
    resumed, callbacks = life(0, 0, 0)
    resumed.restore_callbacks(captured["callbacks"])
    assert [c.early_stopping_patience_counter for c in callbacks] == [2, 1, 0]


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(
        reft.ConfigError, match=r"found builtins.list.*expected the Trainer of transformers 5.0"
    ):
        reft.hf.resumable([])
