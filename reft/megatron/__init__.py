"""Megatron's programs under reft's care: what each holds beside what DeepSpeed or PyTorch know of."""
