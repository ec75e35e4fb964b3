"""Explains DeepSpeed's refusals of a batch size, and what to change."""

from __future__ import annotations

from typing import Any

from reft.errors import ConfigError, SizeError

_OF_THE_BATCH = ("Check batch related parameters", "Gradient accumulation steps: 0")
"""Beginnings of DeepSpeed's assertion messages about batch sizes."""


def find_refusal(error: AssertionError, config: Any) -> ConfigError | None:
    """Make the error for a batch size that DeepSpeed refuses.

    Args:
        error: DeepSpeed's assertion.
        config: DeepSpeed's configuration.

    Returns:
        SizeError if the batch fits another number of nodes, ConfigError if it fits none; None if
        ``error`` is not about the batch size.
    """
    if not isinstance(config, dict) or not str(error).startswith(_OF_THE_BATCH):
        return None
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps", 1)
    if not all(isinstance(size, int) and size > 0 for size in (batch, micro, steps)):
        return None
    whole, rest = divmod(batch, micro * steps)
    # If gradient accumulation steps are configured as well, only one degree is possible.
    fixed = "gradient_accumulation_steps" in config
    degrees = (
        [] if rest else [whole] if fixed else [d for d in range(1, whole + 1) if whole % d == 0]
    )
    to_do = (
        f"Start as many nodes as make one of these degrees: {', '.join(map(str, degrees))}"
        if degrees
        else f'No degree is possible: make "train_batch_size" a multiple of {micro * steps}'
    )
    also = ', or leave "gradient_accumulation_steps" out' if fixed else ""
    return (SizeError if degrees else ConfigError)(
        f'"train_batch_size" {batch} cannot be split into micro-batches of {micro} samples at the '
        f"data-parallel degree of this start (DeepSpeed: {error}). {to_do}{also}"
    )
