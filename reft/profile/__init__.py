"""The bubble profiler: measures where a pipeline's devices wait, and how much of a snapshot can
be copied during these waits."""
