"""``reft demo``: train over several nodes on this machine, let some die, compare with a quiet run."""

from reft.tools.demo.command import main

__all__ = ["main"]
