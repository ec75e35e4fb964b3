"""What a device does during an instruction of a pipeline schedule, by the instruction's name.

Schedules may bring instructions of their own (zero-bubble splits the backward pass, DualPipeV queues its
transfers), so names are read by their first word.
"""

from __future__ import annotations

from enum import StrEnum


class Activity(StrEnum):
    """What a piece of a device's time was spent on.

    FENCE is waiting for a snapshot to end before the optimizer step; CAPTURE is what lies between the
    optimizer step and the next instruction, where the host begins a snapshot.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOAD = "load"
    TRANSFER = "transfer"
    REDUCE = "reduce"
    WAIT = "wait"
    FENCE = "fence"
    CAPTURE = "capture"
    OTHER = "other"


_BY_PREFIX = (
    ("Forward", Activity.FORWARD),
    ("Backward", Activity.BACKWARD),
    ("Weight", Activity.BACKWARD),
    ("OptimizerStep", Activity.OPTIMIZER),
    ("Load", Activity.LOAD),
    ("Reduce", Activity.REDUCE),
    ("Aggregate", Activity.REDUCE),
    ("Send", Activity.TRANSFER),
    ("Recv", Activity.TRANSFER),
    ("CommitP2P", Activity.TRANSFER),
)


def activity_of(name: str) -> Activity:
    """Activity of an instruction, its waiting not counted.

    Args:
        name: class name of the instruction, for example ``"RecvActivation"``.
    """
    return next((activity for prefix, activity in _BY_PREFIX if name.startswith(prefix)), Activity.OTHER)


def is_receive(name: str) -> bool:
    return name.startswith("Recv")


def is_send(name: str) -> bool:
    return name.startswith("Send")


def is_commit(name: str) -> bool:
    """Whether the instruction carries out transfers that others have queued."""
    return name.startswith("CommitP2P")
