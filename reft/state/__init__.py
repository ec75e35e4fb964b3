"""The state of an engine: images (the bytes of its tensors as one sequence), values on the host,
and one adapter for each optimizer class."""
