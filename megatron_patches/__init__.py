"""Integrations of Megatron's programs, for the state that DeepSpeed and PyTorch do not know.

:mod:`reft.integrations` describes integrations. A folder named after a commit holds patches for
that commit of the program.
"""

ON_IMPORT = {
    "megatron.training.arguments": "megatron_patches.core.program:install",
    "megatron.training.training": "megatron_patches.core.program:install",
}
PROGRAMS = {"megatron.checkpointing": "megatron_patches.deepspeed:running_program"}
NAMES = {
    "attach_megatron": "megatron_patches.core.attach",
    "keep_state": "megatron_patches.core.program",
}
