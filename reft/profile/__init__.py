"""The bubble profiler: where a pipeline's devices wait, and what of a snapshot fits there."""
