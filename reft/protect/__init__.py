"""Protection schemes: redundant bytes, their placement, and the losses that they survive."""
