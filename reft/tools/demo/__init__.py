"""``reft demo``: trains over several nodes of this machine, of which some die, and compares the
result with an undisturbed run."""
