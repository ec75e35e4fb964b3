"""All that a rank holds, as a digest."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from reft.state.adapters import adapter_for


def images_of(engine: Any) -> str:
    """Of the model, the masters and the moments on this rank, by name: DeepSpeed makes the moments of a universal
    checkpoint in the order of a set."""
    total = hashlib.sha256()
    for image in adapter_for(engine).images():
        for spec, offset in sorted(zip(image.specs, image.offsets, strict=True), key=str):
            memory = torch.zeros(spec.nbytes, dtype=torch.uint8)
            image.read_into(offset, memory)
            total.update(f"{spec}".encode() + memory.numpy().tobytes())
    return total.hexdigest()
