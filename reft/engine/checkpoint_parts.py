"""The tensors of a DeepSpeed checkpoint, rank by rank, whatever layout reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.recover.relayout import Held

_HOST_FILE = re.compile(r"reft_host-pp(\d+)\.dp(\d+)\.tp(\d+)\.msgpack")


def degrees_of(checkpoint: Path) -> Degrees | None:
    """Of the job that wrote it, by reft's files; None where they are not there for every rank."""
    found = {
        tuple(map(int, match.groups()))
        for path in checkpoint.glob("reft_host-*.msgpack")
        if (match := _HOST_FILE.fullmatch(path.name))
    }
    if not found:
        return None
    degrees = Degrees(*(1 + max(at[axis] for at in found) for axis in range(3)))
    every = set(product(range(degrees.pp), range(degrees.dp), range(degrees.tp)))
    return degrees if found == every else None


class CheckpointParts:
    """Reads the tensors that a plan names. Keeps the files of one rank at a time.

    Args:
        checkpoint: the tag directory.
        degrees: of the job that wrote it.
        held: what its ranks hold, by (pp, tp).
        tied: layers of the model that a tied module's weights may lie under, by its key.
    """

    def __init__(
        self,
        checkpoint: Path,
        degrees: Degrees,
        held: Mapping[tuple[int, int], Held],
        tied: Mapping[str, list[int]],
    ) -> None:
        self._checkpoint = checkpoint
        self._degrees = degrees
        self._held = held
        self._tied = tied
        self._at: Coordinate | None = None
        self._files: dict[str, Any] = {}

    def tensor(self, at: Coordinate, name: str) -> torch.Tensor:
        """A tensor of a rank, flat.

        Raises:
            LayoutError: the files do not have it where DeepSpeed puts it.
        """
        if at != self._at:
            self._at, self._files = at, {}
        kind, _, rest = name.partition(".")
        found = self._weight(at, rest) if kind == "model" else self._of_optimizer(at, kind, rest)
        return found.detach().reshape(-1)

    def _load(self, name: str) -> Any:
        """The only file of that pattern; None where there is none."""
        if name not in self._files:
            found = sorted(self._checkpoint.glob(name))
            # Weights, and objects of DeepSpeed's own, as its load_checkpoint reads them.
            loaded = (
                torch.load(found[0], map_location="cpu", weights_only=False, mmap=True) if found else None
            )
            self._files[name] = loaded
        return self._files[name]

    def _model_parallel(self, at: Coordinate) -> int:
        return at.pp * self._degrees.tp + at.tp

    def _model_file(self, at: Coordinate) -> Any:
        return self._load(f"mp_rank_{self._model_parallel(at):02d}_model_states.pt") or {}

    def _weight(self, at: Coordinate, name: str) -> torch.Tensor:
        module = self._model_file(at).get("module") or {}
        if name in module:
            return self._is_tensor(module[name], at, name)
        head, _, inside = name.partition(".")
        layers = [int(head)] if head.isdigit() else []
        if head == "tied_modules":
            key, _, inside = inside.partition(".")
            layers = self._tied_layers(at.pp, key)
        for layer in layers:
            for file in (
                f"layer_{layer:02d}-model_{at.tp:02d}-model_states.pt",
                f"layer_{layer:02d}-model_states.pt",
            ):
                content = self._load(file) or {}
                if inside in content:
                    return self._is_tensor(content[inside], at, name)
        raise self._lacks(at, name)

    def _tied_layers(self, pp: int, key: str) -> list[int]:
        """Layers that a tied module lies under, the stage's own first: what of it is not tied differs.

        Stages have layers one after the other, but where each begins is told only by its other layers' names.
        """
        layers = sorted(self._tied.get(key, []))
        numbers: dict[int, set[int]] = {stage: set() for stage in range(self._degrees.pp)}
        holders = set()
        for (stage, _), held in self._held.items():
            heads = [part.name.split(".") for part in held.parameters]
            numbers[stage] |= {int(head[0]) for head in heads if head[0].isdigit()}
            if ["tied_modules", key] in (head[:2] for head in heads):
                holders.add(stage)
        own = numbers[pp]
        before = len([stage for stage in holders if stage < pp])
        after = len([stage for stage in holders if stage > pp])

        def other(layer: int) -> tuple[bool, bool]:
            reached = pp == 0 or any(n < layer for n in own)
            left = pp < self._degrees.pp - 1 and not any(n > layer for n in own)
            position = layers.index(layer)
            possible = (
                before <= position < len(layers) - after
                and all(n < layer for stage in range(pp) for n in numbers[stage])
                and all(n > layer for stage in range(pp + 1, self._degrees.pp) for n in numbers[stage])
            )
            return not (reached and not left), not possible

        return sorted(layers, key=other)

    def _of_optimizer(self, at: Coordinate, kind: str, place: str) -> torch.Tensor:
        group, position = map(int, place.split("."))
        held = self._held[at.pp, at.tp]
        if held.parted:
            file = self._load(f"*zero_pp_rank_{at.dp}_mp_rank_{self._model_parallel(at):02d}_optim_states.pt")
            wrapper = (file or {}).get("optimizer_state_dict") or {}
            self._check_names(at, wrapper, held)
            if kind == "master":
                return self._is_tensor(wrapper["single_partition_of_fp32_groups"][group], at, place)
            state, number = wrapper["base_optimizer_state"]["state"], group
        else:
            state = (self._model_file(at).get("optimizer") or {}).get("state") or {}
            number = sum(len(names) for names in held.groups[:group]) + position
        return self._is_tensor(state.get(number, {}).get(kind), at, f"{kind}.{place}")

    def _check_names(self, at: Coordinate, wrapper: Mapping[str, Any], held: Held) -> None:
        """That the file is the one of these ranks: an order of ranks that reft does not know has others."""
        names = {name for group in wrapper.get("param_slice_mappings") or () for name in group}
        known = {name for group in held.groups for name in group}
        if not wrapper or not names <= known:
            raise self._lacks(at, "the partitions of its stage")

    def _is_tensor(self, value: Any, at: Coordinate, name: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self._lacks(at, name)
        return value

    def _lacks(self, at: Coordinate, what: str) -> LayoutError:
        return LayoutError(
            f"{self._checkpoint} does not have {what} of {at} ({self._degrees}) where DeepSpeed's pipelines "
            f"put it; load it in the layout that wrote it"
        )
