"""DeepSpeed on CPU: no builds at start-up.

DeepSpeed's CPU backend compiles a shared-memory operator (used for inference all-reduces only) whenever
``init_distributed`` runs. A process that is killed meanwhile leaves a lock behind, and every later
process waits for it for ever (trap 20): after a failure the job would never come back.
"""

from __future__ import annotations

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def avoid_build_at_start() -> None:
    """Tell DeepSpeed that the shared-memory operator cannot be built. No effect on an accelerator."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
