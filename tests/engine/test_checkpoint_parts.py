"""Tensors of a DeepSpeed pipeline's checkpoint are read from the files of the stage that had them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reft.engine.load.disk import CheckpointParts
from reft.grid import Coordinate, Degrees
from reft.recover.relayout import WHOLE, Held, Parameter


@pytest.mark.parametrize(
    "stages",
    [
        [["0t", "1", "2"], ["3", "4t"]],
        [["0t"], ["1", "2", "3t"]],
        [["0t", "1", "2"], ["3t"]],
        [["0t"], ["1"], ["2t"]],
        [["0t", "1"], ["2", "3t"], ["4", "5t"]],
        [["0t", "1"], ["2t", "3"], ["4", "5t"]],
        [["0t", "1", "2", "3t"], ["4", "5t"]],
        [["0t", "1", "2"], ["3t", "4", "5t"]],
        [["0", "1t"], ["2t", "3"]],
    ],
    ids=lambda stages: "-".join(".".join(layers) for layers in stages),
)
def test_p3_what_is_not_tied_of_a_tied_module_is_the_own_stages(
    tmp_path: Path, stages: list[list[str]]
) -> None:
    """As PipelineModule writes them: a file per layer, a tied module's (t) under each of its layers."""
    held = {}
    for pp, layers in enumerate(stages):
        names = []
        for layer in layers:
            number, tied = int(layer.rstrip("t")), layer.endswith("t")
            names += ["tied_modules.embed.bias"] if tied else [f"{number}.weight"]
            content = {"bias" if tied else "weight": torch.full((2,), float(pp), dtype=torch.bfloat16)}
            torch.save(content, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
        parameters = tuple(Parameter(name, (2,), WHOLE) for name in dict.fromkeys(names))
        held[pp, 0] = Held(parameters, (), (), flat=True)
    tied = [int(layer[:-1]) for layers in stages for layer in layers if layer.endswith("t")]
    parts = CheckpointParts(tmp_path, Degrees(len(stages), 1, 1), held, {"embed": tied})
    for (pp, _), had in held.items():
        for part in had.parameters:
            assert parts.tensor(Coordinate(pp, 0, 0), f"model.{part.name}").tolist() == [pp] * 2, (pp, part)
