"""Reads a version that was written in another layout (other parallel degrees) from the files of a
DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.relayout.element_map import (
    MASTER,
    WEIGHT,
    ElementMove,
    RankContents,
    RankLayout,
)
from reft.relayout.layouts import LiveTensors, check_numbers
from reft.storage.load import read_host_state


class CheckpointSource:
    """Locates and reads the elements of a version in DeepSpeed's checkpoint files, which are opened
    one after another.

    Args:
        checkpoint: directory of the files.
        degrees: parallel degrees of the job that wrote them.
    """

    def __init__(self, checkpoint: Path, degrees: Degrees) -> None:
        self._checkpoint = checkpoint
        self.degrees = degrees
        self._located: tuple[CheckpointParts, Sequence[ElementMove], LiveTensors]

    def __str__(self) -> str:
        return str(self._checkpoint)

    def host_state(self, at: Coordinate) -> dict[str, Any]:
        state = read_host_state(self._checkpoint, at)
        if state is None:
            raise LayoutError(
                f"{self._checkpoint} has no host state of {at}; expected one of every rank"
            )
        return state

    def locate(
        self, moves: Sequence[ElementMove], live: LiveTensors, old: RankLayout, module: Any
    ) -> None:
        parts = CheckpointParts(self._checkpoint, self.degrees, old.held, _tied_layers(module))
        self._located = parts, sorted(moves, key=lambda m: (m.source, m.tensor)), live

    def write(self) -> None:
        """Copy the located elements into the live tensors."""
        parts, moves, live = self._located
        for move in moves:
            stored, target = parts.tensor(move.source, move.tensor), live[move.target]
            check_numbers(move, stored.dtype, stored.numel(), target)
            target[move.at : move.at + move.numel].copy_(
                stored[move.start : move.start + move.numel]
            )


def _tied_layers(module: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, spec in enumerate(getattr(module, "_layer_specs", ())):
        key = getattr(spec, "key", None)
        if isinstance(key, str):
            found.setdefault(key, []).append(number)
    return found


class CheckpointParts:
    """Reads tensors by their names in the plan of a restore. Keeps the files of one rank open at a
    time.

    Args:
        checkpoint: directory of the files.
        degrees: parallel degrees of the job that wrote them.
        held: contents of the job's ranks, by (pp, tp).
        tied: for the key of each tied module, the layers whose files may hold its weights.
    """

    def __init__(
        self,
        checkpoint: Path,
        degrees: Degrees,
        held: Mapping[tuple[int, int], RankContents],
        tied: Mapping[str, list[int]],
    ) -> None:
        self._checkpoint = checkpoint
        self._degrees = degrees
        self._held = held
        self._tied = tied
        self._at: Coordinate | None = None
        self._files: dict[str, Any] = {}

    def tensor(self, at: Coordinate, name: str) -> torch.Tensor:
        if at != self._at:
            self._at, self._files = at, {}
        kind, _, rest = name.partition(".")
        found = self._model_tensor(at, rest) if kind == WEIGHT else self._optimizer_tensor(at, name)
        return found.detach().reshape(-1)

    def _load(self, name: str) -> Any:
        """Return the content of the only file that matches a pattern; None if no file matches."""
        if name not in self._files:
            found = sorted(self._checkpoint.glob(name))
            # weights_only=False, as in DeepSpeed's load_checkpoint: the files hold objects of
            # DeepSpeed's classes.
            loaded = (
                torch.load(found[0], map_location="cpu", weights_only=False, mmap=True)
                if found
                else None
            )
            self._files[name] = loaded
        return self._files[name]

    def _model_parallel(self, at: Coordinate) -> int:
        return at.pp * self._degrees.tp + at.tp

    def _model_file(self, at: Coordinate) -> Any:
        return self._load(f"mp_rank_{self._model_parallel(at):02d}_model_states.pt") or {}

    def _model_tensor(self, at: Coordinate, name: str) -> torch.Tensor:
        module = self._model_file(at).get("module") or {}
        if name in module:
            return self._require_tensor(module[name], at, name)
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
                    return self._require_tensor(content[inside], at, name)
        raise self._missing(at, name)

    def _tied_layers(self, pp: int, key: str) -> list[int]:
        """Return the layers under which a tied module may be stored, beginning with those of the
        stage ``pp``.

        The order matters, because parameters of the module that are not tied differ between stages.
        Stages have consecutive layers; the range of a stage follows only from the names of its
        layers that are not tied.
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

        def rank_layer(layer: int) -> tuple[bool, bool]:
            reached = pp == 0 or any(n < layer for n in own)
            left = pp < self._degrees.pp - 1 and not any(n > layer for n in own)
            position = layers.index(layer)
            possible = (
                before <= position < len(layers) - after
                and all(n < layer for stage in range(pp) for n in numbers[stage])
                and all(
                    n > layer for stage in range(pp + 1, self._degrees.pp) for n in numbers[stage]
                )
            )
            return not (reached and not left), not possible

        return sorted(layers, key=rank_layer)

    def _optimizer_tensor(self, at: Coordinate, name: str) -> torch.Tensor:
        _, number, place, *key = name.split(".", 3)  # reft.relayout.element_map.tensor_name
        group, position, kind = int(number), int(place), "".join(key) or MASTER
        held = self._held[at.pp, at.tp]
        if held.parted:
            file = self._load(
                f"*zero_pp_rank_{at.dp}_mp_rank_{self._model_parallel(at):02d}_optim_states.pt"
            )
            wrapper = (file or {}).get("optimizer_state_dict") or {}
            self._check_names(at, wrapper, held)
            if kind == MASTER:
                return self._require_tensor(
                    wrapper["single_partition_of_fp32_groups"][group], at, name
                )
            state, index = wrapper["base_optimizer_state"]["state"], group
        else:
            state = (self._model_file(at).get("optimizer") or {}).get("state") or {}
            index = sum(len(names) for names in held.groups[:group]) + position
        return self._require_tensor(state.get(index, {}).get(kind), at, name)

    def _check_names(self, at: Coordinate, wrapper: Mapping[str, Any], held: RankContents) -> None:
        """Refuse a file that belongs to other ranks, which this class reads if the job numbers its
        ranks in an unknown order."""
        names = {name for group in wrapper.get("param_slice_mappings") or () for name in group}
        known = {name for group in held.groups for name in group}
        if not wrapper or not names <= known:
            raise self._missing(at, "the partitions of its stage")

    def _require_tensor(self, value: Any, at: Coordinate, name: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self._missing(at, name)
        return value

    def _missing(self, at: Coordinate, what: str) -> LayoutError:
        return LayoutError(
            f"{self._checkpoint} does not have {what} of {at} ({self._degrees}) where DeepSpeed's "
            "pipelines put it; load it in the layout that wrote it"
        )
