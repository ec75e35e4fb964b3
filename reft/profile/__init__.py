"""The bubble profiler: where a pipeline's devices wait, and which part of a snapshot fits there."""
