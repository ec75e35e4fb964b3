"""The state of an engine: images (the bytes) of its tensors, values on the host, and one adapter
for each optimizer class."""
