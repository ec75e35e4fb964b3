"""Megatron's programs under reft's care: what each holds beside what DeepSpeed or PyTorch know of.

An integration as :mod:`reft.integrations` describes them. Folders named by commits hold patches for the programs.
"""

ON_IMPORT = {
    "megatron.training.arguments": "megatron_patches.core.program:install",
    "megatron.training.training": "megatron_patches.core.program:install",
}
PROGRAMS = {"megatron.checkpointing": "megatron_patches.deepspeed:running_program"}
NAMES = {"attach_megatron": "megatron_patches.core.attach"}
