"""Megatron's programs under reft's care: what each holds beside what DeepSpeed or PyTorch know of.

An integration as :mod:`reft.integrations` describes them. A folder named by a commit holds patches
for it.
"""

ON_IMPORT = {
    "megatron.training.arguments": "megatron_patches.core.program:install",
    "megatron.training.training": "megatron_patches.core.program:install",
}
PROGRAMS = {"megatron.checkpointing": "megatron_patches.deepspeed:running_program"}
NAMES = {"attach_megatron": "megatron_patches.core.attach"}
