"""Restores a version from the memory of the nodes. Planning and local reading need no torch."""
