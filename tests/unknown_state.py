"""Parts of an engine whose state reft does not know, and refuses."""

from __future__ import annotations

from typing import Any

import torch


class Secretive(torch.optim.SGD):
    """Keeps state that only its own state_dict knows."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "secret": 1}


class Forgetful:
    """A scheduler without a state_dict."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def get_lr(self) -> list[float]:
        return [0.1]
