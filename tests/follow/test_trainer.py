"""Hugging Face's Trainer: its scheduler, its callbacks and its control continue where the version was (P8)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reft.hf
from reft.engine.attach import find_session
from tests.follow.lives import SECS, CutOffError, Row

pytest.importorskip("transformers", reason="needs the extra hf: pip install 'reft-ckpt[hf]'")
pytest.importorskip("accelerate", reason="needs the extra hf: pip install 'reft-ckpt[hf]'")

pytestmark = pytest.mark.integration
STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.first(x).tanh()).square().mean()}


def life(root: Path, job: str, cut: int | None, rows: dict[int, Row], schedule: str) -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watcher(TrainerCallback):
        """Counts for itself, and cuts the life off where a step begins."""

        def __init__(self) -> None:
            self.smoothed = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == cut:
                session = find_session(trainer.model_wrapped)
                assert session is not None
                assert session.flush(SECS)
                assert session.stats.committed_step == cut
                raise CutOffError

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rate = trainer.optimizer.param_groups[0]["lr"]
            self.smoothed = 0.9 * self.smoothed + rate
            rows[state.global_step] = (rate.hex(), self.smoothed.hex())
            if control.should_log:
                control.should_log = False

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    block = {
        "enabled": True,
        "allow_unprotected": True,
        "job_id": job,
        "memory_dir": str(root / "memory"),
        "interval_steps": 1000,
    }
    options = TrainingArguments(
        output_dir=str(root / "out"),
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "reft": block,
        },
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type=schedule,
        warmup_steps=3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": torch.full((8,), float(i))} for i in range(2 * STEPS)]
    trainer: Any = reft.hf.resumable(
        Trainer(Net(), options, train_dataset=data, callbacks=[Watcher()])
    )
    try:
        trainer.train()
    except CutOffError:
        pass
    finally:
        session = find_session(trainer.model_wrapped)
        if session is not None:
            session.close(1.0)
        gc.collect()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_p8_the_trainers_schedule_and_callbacks_continue(root: Path, schedule: str) -> None:
    undisturbed: dict[int, Row] = {}
    life(root, "undisturbed", None, undisturbed, schedule)
    rows: dict[int, Row] = {}
    for cut in (1, 5, None):
        life(root, "cut", cut, rows, schedule)
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert rows == undisturbed
