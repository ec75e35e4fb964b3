"""``reft demo``: trains on several nodes of this machine, kills some, and compares the losses with
those of an undisturbed run."""
