"""Does a schedule compute the right thing? What a simulation takes for granted is checked here."""

from __future__ import annotations

from collections import defaultdict

from reft.errors import ConfigError

from .instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    Compute,
    ForwardPass,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    Transfer,
)
from .schedules import Schedule

Channel = tuple[str, int, int, int]
"""What, from which stage, to which stage, between which places of the model: kept in order."""


class ScheduleError(ConfigError):
    """The instructions of a schedule do not fit together."""


def channel_of(schedule: Schedule, stage_id: int, transfer: Transfer) -> Channel:
    """The ordered channel that a send or receive uses; both ends find the same."""
    peer = schedule.peer(stage_id, transfer)
    place = schedule.places[stage_id][transfer.chunk]
    match transfer:
        case SendActivation():
            return ("activation", stage_id, peer, place + 1)
        case RecvActivation():
            return ("activation", peer, stage_id, place)
        case SendGrad():
            return ("gradient", stage_id, peer, place - 1)
        case _:
            return ("gradient", peer, stage_id, place)


def is_send(transfer: Transfer) -> bool:
    return isinstance(transfer, (SendActivation, SendGrad))


def check_schedule(schedule: Schedule) -> None:
    """Check that every computation has its inputs and every receive gets what it expects.

    Raises:
        ScheduleError: says which stage, which instruction, and what is missing.
    """
    for stage_id in range(schedule.stages):
        _check_inputs(schedule, stage_id)
    _check_channels(schedule)


def _check_inputs(schedule: Schedule, stage_id: int) -> None:
    """One pass over a stage: what is known after which instruction."""
    known: set[tuple[str, int, int]] = set()
    places, last = schedule.places[stage_id], schedule.chunks - 1
    for position, instruction in enumerate(schedule.streams[stage_id]):
        if not isinstance(instruction, (Compute, Transfer)):
            continue
        j, place = instruction.micro_batch, places[instruction.chunk]
        needs, gives = _NEEDS_AND_GIVES[type(instruction)]
        for what, offset in needs:
            at_the_edge = (what, place) in (("activation", 0), ("gradient", last))
            if not at_the_edge and (what, j, place + offset) not in known:
                raise ScheduleError(
                    f"schedule {schedule.name}: stage {stage_id} runs {instruction} (instruction "
                    f"{position}) before it has the {what} of micro-batch {j}"
                )
        known |= {(what, j, place + offset) for what, offset in gives}


# An activation is known by the place that consumes it, and so is a gradient.
_NEEDS_AND_GIVES: dict[type, tuple[list[tuple[str, int]], list[tuple[str, int]]]] = {
    RecvActivation: ([], [("activation", 0)]),
    ForwardPass: ([("activation", 0)], [("forward", 0), ("activation", 1)]),
    SendActivation: ([("forward", 0)], []),
    RecvGrad: ([], [("gradient", 0)]),
    BackwardPass: ([("forward", 0), ("gradient", 0)], [("backward", 0), ("gradient", -1)]),
    BackwardInput: ([("forward", 0), ("gradient", 0)], [("backward", 0), ("gradient", -1)]),
    BackwardWeight: ([("backward", 0)], []),
    SendGrad: ([("backward", 0)], []),
}


def _check_channels(schedule: Schedule) -> None:
    sent: dict[Channel, list[int]] = defaultdict(list)
    received: dict[Channel, list[int]] = defaultdict(list)
    for stage_id, stream in enumerate(schedule.streams):
        for instruction in stream:
            if isinstance(instruction, Transfer):
                side = sent if is_send(instruction) else received
                side[channel_of(schedule, stage_id, instruction)].append(instruction.micro_batch)
    for channel in sent.keys() & received.keys():
        pairs = zip(sent[channel], received[channel], strict=False)
        for n, (there, here) in enumerate(pairs):
            if there != here:
                what, source, target, _ = channel
                raise ScheduleError(
                    f"schedule {schedule.name}: the {n + 1}. {what} that stage {source} sends to "
                    f"stage {target} is of micro-batch {there}, but stage {target} expects "
                    f"micro-batch {here}"
                )
