"""A stand-in for the training loop of NVIDIA's Megatron-LM, written from its interface."""

from .arguments import get_args
from .training import pretrain

__all__ = ["get_args", "pretrain"]
