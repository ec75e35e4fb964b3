"""The interface between a session and the training program, DeepSpeed or Megatron-core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, Protocol

import torch

from reft.data.position import DataPosition
from reft.engine.fingerprint import Fact
from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.relayout.layouts import LayoutChange
from reft.state.catalogue import Adapter, SectionImage


class TrainingEngine(Protocol):
    """The training engine of one rank: DeepSpeed's or Megatron-core's.

    The engine's hooks call the session: ``begin_step`` when a step begins,
    ``before_optimizer_step`` and ``after_optimizer_step`` around every optimizer step,
    ``after_step`` after a step. They restore state through
    :class:`~reft.engine.load_memory.MemoryRestorer`.

    Attributes:
        name: name of the engine, for messages.
        device: device on which this rank trains.
        micro_batches: micro-batches of one step.
    """

    name: str
    device: torch.device
    micro_batches: int

    @property
    def adapter(self) -> Adapter: ...

    @property
    def data(self) -> DataPosition | None:
        """The position in the data; None if the program tracks the position itself."""

    @property
    def resizing(self) -> LayoutChange | None:
        """Object that restores versions of other layouts; None if the engine cannot load them."""

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps made so far, including those skipped on overflow."""

    def place(self) -> tuple[Coordinate, Degrees]:
        """Return the coordinate of this rank, and the degrees of the job.

        Raises:
            LayoutError: the ranks are divided in a way that reft does not support.
        """

    def settings(self) -> dict[str, Fact]:
        """Return settings that change the numerical results, as facts for the fingerprint. The
        fingerprint takes the settings of rank 0."""

    def shapes(self) -> str:
        """Return a description of this rank's part of the model, with a digest of names and
        shapes."""

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Capture the host state when a step begins; :mod:`reft.state.blob` lists its keys."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the host state. Called after the images have been written to the tensors."""

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        """Make the template with which a checkpoint in the program's format is later written
        from memory (:mod:`reft.storage.deepspeed_format`).

        Returns:
            The template; empty if reft cannot write checkpoints of this program.

        Raises:
            ReftError: the checkpoint cannot be described.
        """


ClientState = Callable[[], Mapping[str, Any]]

# Called with the degrees with which the loaded state was written, and with those of this start
OnResize = Callable[[Degrees, Degrees], object]


def find_coordinate(engine: Any) -> tuple[Coordinate, Degrees]:
    """Read the coordinate of this rank and the degrees from a DeepSpeed engine.

    Raises:
        LayoutError: the engine divides ranks also by experts or sequences.
    """
    import torch.distributed as dist

    grid = getattr(engine, "grid", None)
    if grid is not None:
        at = Coordinate(
            grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()
        )
        degrees = Degrees(
            grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()
        )
    else:
        mpu = getattr(engine, "mpu", None)
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
        tp_rank, tp_size = 0, 1
        if mpu is not None:
            dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            tp_rank, tp_size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
        at, degrees = Coordinate(0, dp_rank, tp_rank), Degrees(1, dp_size, tp_size)
    if degrees.world_size != dist.get_world_size():
        raise LayoutError(
            f"the engine reports {degrees}, which is {degrees.world_size} ranks, but the job has "
            f"{dist.get_world_size()}. reft needs a plain pp x dp x tp grid without expert or "
            f"sequence parallel ranks"
        )
    return at, degrees


def flat_facts(name: str, value: Any) -> Iterator[tuple[str, Fact]]:
    """Yield the numbers, strings and booleans in ``value``, by dotted name. Other objects are left
    out.
    """
    if isinstance(value, Mapping):
        for key in value:
            yield from flat_facts(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat_facts(f"{name}.{index}", item)
    elif value is None or isinstance(value, str | int | float | bool):
        yield name, value
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield name, value.item()


def read_shapes(kind: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Describe a rank's part of a model, with a digest of all names and shapes."""
    digest = hashlib.blake2b(digest_size=6)
    tensors = numbers = 0
    for name, parameter in parameters:
        # A parameter that ZeRO-3 has partitioned is empty; its full shape is in ``ds_shape``.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tensors, numbers = tensors + 1, numbers + prod(shape)
        digest.update(f"{name} {shape} {parameter.dtype} {parameter.requires_grad}\n".encode())
    return (
        f"{kind}, {tensors} parameters of {numbers} numbers, names and shapes {digest.hexdigest()}"
    )
