"""Trains with Hugging Face's Trainer, which loads its best model, that of step 2, at the end.

The first process is stopped before it loads the best model; its memory holds the last step.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import reft
import reft.hf

BEST = 2


class Tried(Trainer):
    stopped: Path

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": abs(self.state.global_step - BEST)}

    def _load_best_model(self) -> None:
        if not self.stopped.exists():
            self.stopped.touch()
            reft.attach(self.model_wrapped).close(60)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._load_best_model()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--save-dir", type=Path, required=True)
    args = parser.parse_args()
    options = TrainingArguments(
        output_dir=str(args.save_dir),
        deepspeed=args.deepspeed_config,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(options.seed)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 8))]
    trainer = Tried(LlamaForCausalLM(shape), options, train_dataset=data, eval_dataset=data[:2])
    trainer.stopped = args.save_dir / "stopped"
    reft.hf.resumable(trainer)
    trainer.train()
    trainer.save_model(str(args.save_dir))


if __name__ == "__main__":
    main()
