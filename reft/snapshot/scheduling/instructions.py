"""What the names of a schedule's instructions say. Pure.

Nothing else is known of a schedule: its instructions are named as DeepSpeed names them. Where transfers are
queued (DualPipeV), the instruction that carries them out is the one in which a device waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from reft.snapshot.scheduling.windows import WindowKind

COMMUNICATING = ("Send", "Reduce")
"""Beginnings of the names of instructions that move data between ranks."""
_WAITING = ("Recv", "Send", "Reduce")
_TRANSFERS = ("Recv", "Send")
_RUNS_QUEUE = "CommitP2P"


def trains(names: Sequence[str]) -> bool:
    """Whether a schedule makes an optimizer step; a step without any instructions does."""
    return not names or "OptimizerStep" in names


def queues_transfers(names: Sequence[str]) -> bool:
    """Whether transfers are queued, and carried out by an instruction of their own."""
    return any(name.startswith(_RUNS_QUEUE) for name in names)


def waits(names: Sequence[str], queues: bool) -> tuple[bool, bool]:
    """Whether a device may wait in the last of ``names``.

    Args:
        names: of all instructions up to that one.
        queues: whether this schedule is known to queue its transfers.

    Returns:
        Whether it may wait; and whether that is for something it receives.
    """
    name = names[-1]
    if name.startswith(_RUNS_QUEUE):
        queued = _queued(names, len(names) - 1)
        return bool(queued), any(transfer.startswith("Recv") for transfer in queued)
    if queues and name.startswith(_TRANSFERS):
        return False, False
    return name.startswith(_WAITING), name.startswith("Recv")


def window_kind(names: Sequence[str], position: int) -> WindowKind:
    """Why a stage waits at a position, from what it does before and after.

    Args:
        names: of all instructions of a step.
        position: ``len(names)`` is what follows them.
    """
    if position >= len(names):
        return WindowKind.DRAIN
    before, after = names[:position], names[position:]
    if "ForwardPass" not in before:
        return WindowKind.FILL
    if "BackwardPass" not in before:
        waited_for = _queued(names, position) or (names[position],)
        return WindowKind.MID if "RecvGrad" in waited_for else WindowKind.OTHER
    if "BackwardPass" not in after:
        return WindowKind.DRAIN
    last_forward = len(before) - list(reversed(before)).index("ForwardPass")
    behind_last_forward = "ForwardPass" not in after and "BackwardPass" in before[last_forward:]
    return WindowKind.COOL_DOWN if behind_last_forward else WindowKind.OTHER


def _queued(names: Sequence[str], position: int) -> tuple[str, ...]:
    """What the instruction at ``position`` carries out: the transfers since the last one of its kind."""
    found: list[str] = []
    if names[position].startswith(_RUNS_QUEUE):
        for at in range(position - 1, -1, -1):
            if names[at].startswith(_RUNS_QUEUE):
                break
            if names[at].startswith(_TRANSFERS):
                found.append(names[at])
    return tuple(found)
