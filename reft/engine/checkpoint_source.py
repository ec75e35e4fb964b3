"""A checkpoint of another layout, as its files have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reft.control.control import ControlGroup
from reft.engine.checkpoint_parts import CheckpointParts
from reft.engine.disk import read_host_state
from reft.engine.relayout import Live, on_all
from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.recover.relayout import Layout, Move


class CheckpointSource:
    """A :class:`~reft.engine.relayout.Source`.

    Args:
        checkpoint: the tag directory, checked.
        degrees: of the job that wrote it.
        control: to agree by.
    """

    def __init__(self, checkpoint: Path, degrees: Degrees, control: ControlGroup) -> None:
        self._checkpoint = checkpoint
        self.degrees = degrees
        self._control = control
        self._located: tuple[CheckpointParts, Sequence[Move], Live]

    def __str__(self) -> str:
        return str(self._checkpoint)

    def host_state(self, at: Coordinate) -> dict[str, Any]:
        """See there."""
        state = read_host_state(self._checkpoint, at)
        if state is None:
            raise LayoutError(f"{self._checkpoint} has no host state of {at}; expected one of every rank")
        return state

    def locate(self, old: Layout, moves: Sequence[Move], live: Live, module: Any) -> None:
        """See there. The files are opened one after the other, while they are read."""
        parts = CheckpointParts(self._checkpoint, self.degrees, old.held, _tied_layers(module))
        self._located = parts, sorted(moves, key=lambda m: (m.source, m.tensor)), live

    def carry_out(self) -> None:
        """See there.

        Raises:
            LayoutError: the files lack something.
        """
        on_all(self._control, self._write)

    def _write(self) -> None:
        parts, moves, live = self._located
        for move in moves:
            stored, target = parts.tensor(move.source, move.tensor), live[move.target]
            if stored.dtype != target.dtype or move.start + move.numel > stored.numel():
                raise LayoutError(
                    f"{move.tensor} of {move.source} has {stored.numel()} numbers of {stored.dtype}; "
                    f"expected {target.dtype}, and {move.start + move.numel} of them: start with the "
                    f"precision and the model that wrote it"
                )
            target[move.at : move.at + move.numel].copy_(stored[move.start : move.start + move.numel])


def _tied_layers(module: Any) -> dict[str, list[int]]:
    """Layers of a pipeline that share a module, by its key."""
    found: dict[str, list[int]] = {}
    for number, spec in enumerate(getattr(module, "_layer_specs", ())):
        key = getattr(spec, "key", None)
        if isinstance(key, str):
            found.setdefault(key, []).append(number)
    return found
