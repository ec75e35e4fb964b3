"""Decisions on protection: its scheme, and how often versions are taken."""
