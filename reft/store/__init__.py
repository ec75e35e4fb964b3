"""Versions in host memory: arenas, the commit rules, job directories, inspection."""
