"""``reft demo``: train over several nodes on this machine, let some die, compare with a quiet
run."""
