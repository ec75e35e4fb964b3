"""A stand-in for the training loop of Megatron-DeepSpeed: the modules, functions and arguments that reft's hook
knows it by, with a model and data of a few lines. It counts, saves, loads and prints as the program does."""

from __future__ import annotations

from megatron.global_vars import get_args as get_args
