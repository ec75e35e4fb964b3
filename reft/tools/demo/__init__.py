"""``reft demo``: trains on several nodes of this machine, kills some of them, and compares losses.

The losses are compared with those of an undisturbed run.
"""
