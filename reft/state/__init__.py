"""The state of an engine: images of its tensors, host values, adapters per optimizer class."""
