"""Hugging Face's Trainer, which evaluates behind every second step and saves behind every third, for rehearsals."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import reft.hf

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000000,
    "reft": {"enabled": True, "allow_unprotected": True},
}


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pieces = torch.arange(index, index + 16) % 61
        return {"input_ids": pieces, "labels": pieces}


def main() -> None:
    options = TrainingArguments(
        output_dir="checkpoints",
        deepspeed=CONFIG,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    set_seed(options.seed)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    trainer = Trainer(
        LlamaForCausalLM(shape), options, train_dataset=Numbers(), eval_dataset=Numbers()
    )
    reft.hf.resumable(trainer).train()


if __name__ == "__main__":
    main()
