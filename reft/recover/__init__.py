"""Recovery from memory: inventory, plan, transfer. Planning and local reading need no torch."""
