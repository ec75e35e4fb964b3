"""Megatron-core: :func:`reft.attach_megatron`."""
