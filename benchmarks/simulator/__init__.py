"""Discrete-event simulation of pipelines and of snapshots taken in their idle time."""
