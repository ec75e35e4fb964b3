"""A DeepSpeed engine takes up a version that was written at another data-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from reft.engine.data import LEFT, move_data
from reft.recover.reshape import OwnedTensor, Piece, Resize, cut, padding
from reft.state.adapters import StateAdapter
from reft.state.blob import DecodedBlob
from reft.state.catalogue import Manifest, SectionImage, TensorSpec, end_to_end
from reft.state.rng import capture_rng


class Resizing:
    """A :class:`~reft.engine.engine.Resizing`.

    Attributes:
        data_is_bound: why the program's data are others at another degree; "" where they are not.
    """

    def __init__(self, adapter: StateAdapter, micro_batches: int, config: Mapping[str, Any]) -> None:
        self._adapter = adapter
        self._micro_batches = micro_batches
        self.why_not = _why_not(config)
        self.data_is_bound = ""

    def bind(self, why: str) -> None:
        """The program's data belong to its degree."""
        self.data_is_bound, self.why_not = why, self.why_not or why

    def prepare(
        self, blob: DecodedBlob, resize: Resize, dp: int
    ) -> tuple[tuple[SectionImage, SectionImage], tuple[Piece, ...]]:
        """See there."""
        old = blob.manifest
        lengths = self._adapter.partitioned()
        live = {spec.name: spec for spec in self._adapter.images()[1].specs}
        stored = {spec.name: spec for spec in old.owned}
        parts = {spec.name for spec in old.owned if spec.shape == stored[_master_of(spec)].shape}
        owned = tuple(_resized(s, live.get(_master_of(s))) if s.name in parts else s for s in old.owned)
        images = self._adapter.prepare(Manifest(old.replicated, owned), blob.state["adapter"])
        starts, _ = end_to_end(spec.nbytes for spec in old.owned)
        tensors = [
            OwnedTensor(
                *(spec.name, spec.torch_dtype.itemsize, old_start, prod(spec.shape)),
                *(new_start, prod(now.shape)),
                lengths[_group_of(spec)] if spec.name in parts else None,
            )
            for spec, old_start, now, new_start in zip(
                old.owned, starts, owned, images[1].offsets, strict=True
            )
        ]
        pieces = cut(tensors, resize, dp)
        for start, nbytes in padding(tensors, dp):
            images[1].write_from(start, torch.zeros(nbytes, dtype=torch.uint8))
        self.convert(blob.state, resize, is_new=resize.is_new(dp))
        return images, pieces

    def convert(self, state: dict[str, Any], resize: Resize, *, is_new: bool) -> None:
        """Make a host state one of this job's: what in it is not equal on all replicas, or follows from their
        number. ``is_new``: there was no such rank."""
        # DeepSpeed steps where this is a multiple of the micro-batches of a step.
        state["engine"]["micro_steps"] = state["engine"]["global_steps"] * self._micro_batches
        if is_new:
            state["rng"] = capture_rng()
        data = move_data(state.get("data") or {}, resize)
        if self.data_is_bound:
            data[LEFT] = f"{self.data_is_bound}, and the job goes from {resize}"
        state["data"] = data


def _resized(spec: TensorSpec, master: TensorSpec | None) -> TensorSpec:
    """A part of a parameter group, as large as this job's ``master`` of the group."""
    return spec if master is None else replace(spec, shape=master.shape, stride=master.stride)


def _master_of(spec: TensorSpec) -> str:
    """``optimizer.0.0.exp_avg`` belongs to ``master.0.0``."""
    _, group, position, *_ = spec.name.split(".")
    return f"master.{group}.{position}"


def _group_of(spec: TensorSpec) -> int:
    return int(spec.name.split(".")[1])


def _why_not(config: Mapping[str, Any]) -> str:
    """Why a step at another degree would be another one."""
    if (config.get("zero_optimization") or {}).get("round_robin_gradients"):
        return "zero_optimization.round_robin_gradients deals the parameters out by the degree"
    batch, micro, accumulation = (
        config.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if isinstance(batch, int) and isinstance(micro, int) and accumulation is None:
        return ""
    return (
        'the samples of a step would be others: give "train_batch_size" and "train_micro_batch_size_per_gpu" '
        'in DeepSpeed\'s JSON, and leave "gradient_accumulation_steps" out'
    )
