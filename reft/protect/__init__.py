"""Protection schemes: which bytes are kept redundantly, where, and what that survives."""
