"""What reads and writes the tensors of one rank's state, whatever optimizer they belong to."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from reft.state.catalogue import Manifest, SectionImage


class Adapter(Protocol):
    """The model and optimizer of one rank, as images and host values."""

    @property
    def steps_exactly(self) -> bool:
        """Whether a host repeats a device's step of the optimizer to the bit."""

    def images(self) -> tuple[SectionImage, SectionImage]:
        """``(replicated, owned)`` views of the live tensors; build again when :meth:`signature`
        changes."""

    def expected_bytes(self) -> tuple[int, int]:
        """``(replicated, owned)`` bytes once the optimizer has state, which it makes in its first step."""

    def signature(self) -> Hashable:
        """Changes if and only if :meth:`images` would differ: a tensor appeared, moved or grew."""

    def prepare(self, manifest: Manifest, host_state: dict[str, Any]) -> tuple[SectionImage, SectionImage]:
        """Give the optimizer the state entries that the snapshot has, so that the images match.

        Returns:
            Images whose bytes are to be written.

        Raises:
            LayoutError: the running job has other tensors or another optimizer.
        """
