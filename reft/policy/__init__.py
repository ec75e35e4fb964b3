"""Decisions: how state is protected, and what a job will cost and survive before it is started.
Pure."""
