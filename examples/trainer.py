"""Hugging Face's Trainer with DeepSpeed. Needs transformers and accelerate.

reft adds the lines marked "# reft" and the "reft" block in trainer.json.

    reft launch --nnodes 2 --rdzv-endpoint HOST:29400 --rdzv-id trainer \\
        examples/trainer.py --deepspeed_config examples/trainer.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import reft.hf  # reft

LENGTH = 32


class Text(Dataset[dict[str, torch.Tensor]]):
    """256 pieces of this file, of LENGTH bytes each."""

    def __init__(self) -> None:
        self.pieces = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, LENGTH, 8)[:256]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Losses(TrainerCallback):
    """Prints the loss of every step with all its digits."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--lora", action="store_true", help="train adapters only; needs peft")
    parser.add_argument("--deepspeed_config", default=Path(__file__).with_name("trainer.json"))
    args = parser.parse_args()

    options = TrainingArguments(
        output_dir=args.save_dir,
        deepspeed=str(args.deepspeed_config),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(options.seed)
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    model: Any = LlamaForCausalLM(shape)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
        )
    trainer = Trainer(model, options, train_dataset=Text(), callbacks=[Losses()])
    trainer = reft.hf.resumable(trainer)  # reft
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
