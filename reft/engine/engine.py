"""What a session sees of the program that trains: the seam between reft and DeepSpeed or Megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from reft.grid import Coordinate, Degrees
from reft.recover.reshape import Piece, Resize
from reft.state.blob import DecodedBlob
from reft.state.catalogue import Adapter, SectionImage
from reft.state.fingerprint import Fact


class DataState(Protocol):
    """Follows the data that the training reads."""

    def state(self) -> dict[str, Any]:
        """Encodable position after the step that just ended."""

    def restore(self, state: dict[str, Any], rng: dict[str, Any] | None) -> None:
        """Go to a captured position; ``rng``: the random states of that step."""

    def leave_to_program(self) -> None:
        """The program makes its loaders at the position that it finds in its client state."""

    def leave_to_script(self) -> None:
        """The script goes to where the version was, random states included: nothing is changed or checked."""

    def close(self) -> None:
        """Follow nothing any more."""


class Resizing(Protocol):
    """Takes up versions that were written at another data-parallel degree.

    Attributes:
        why_not: why this job would not be the same at another degree; "" where it would.
        data_is_bound: why its program's data would not be; "" where they would.
    """

    why_not: str
    data_is_bound: str

    def prepare(
        self, blob: DecodedBlob, resize: Resize, dp: int
    ) -> tuple[tuple[SectionImage, SectionImage], tuple[Piece, ...]]:
        """Give the live state the shape that it has in this job, and make the host state one of this job's.

        Args:
            blob: the host block of the member :meth:`Resize.host_from`; its state is changed.
            resize: from which degree to which.
            dp: this rank's place among its data-parallel peers.

        Returns:
            Images whose bytes are to be written, and from where those of the owned one come.

        Raises:
            LayoutError: the running job has another model or optimizer, or the state cannot be cut.
        """


class TrainingEngine(Protocol):
    """One rank's part of a training.

    Whoever implements it also calls the session: ``before_optimizer_step`` and its fence around every
    optimizer step, ``after_step`` behind it; and restores through
    :class:`~reft.engine.memory_rung.MemoryRung`.

    Attributes:
        name: its class, for people.
        device: where it computes.
        micro_batches: of one step.
    """

    name: str
    device: torch.device
    micro_batches: int

    @property
    def adapter(self) -> Adapter:
        """Its model and optimizer as images and host values."""

    @property
    def data(self) -> DataState:
        """Where it is in its data."""

    @property
    def resizing(self) -> Resizing | None:
        """Takes up versions of another data-parallel degree; None where that cannot be done."""

    @property
    def global_steps(self) -> int:
        """Optimizer steps made so far, those left out on overflow too."""

    def place(self) -> tuple[Coordinate, Degrees]:
        """This rank's coordinate and the degrees of the job.

        Raises:
            LayoutError: the ranks are split in a way that reft does not know.
        """

    def settings(self) -> dict[str, Fact]:
        """What would change the numbers, for the fingerprint; rank 0's counts."""

    def shapes(self) -> str:
        """What this rank's part of the model consists of, for people, with a digest of it."""

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """The host state at a step boundary (see :mod:`reft.state.host` for its keys)."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a decoded host state; the images have been written."""

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        """By which a checkpoint can be written from memory (:mod:`reft.state.deepspeed_format`); empty: none.

        Raises:
            ReftError: it cannot be described.
        """
