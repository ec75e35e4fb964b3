from __future__ import annotations

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker as get_cuda_rng_tracker
