"""The state of one engine: what a version is taken from, and what is restored to it (P8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from reft.config import Variant
from reft.engine.engine import TrainingEngine
from reft.engine.recomputing import Recomputing
from reft.errors import ReftError
from reft.label import Label
from reft.snapshot.committing.protocol import Cause
from reft.snapshot.layout import LiveImages
from reft.snapshot.request import SnapshotRequest
from reft.state.blob import HostBlob

logger = logging.getLogger(__name__)

ClientState = Callable[[], Mapping[str, Any]]


class EngineState:
    """Captures the state after a step. Used by the training thread.

    Args:
        engine: what trains.
        recomputing: the gradients that peers' partitions are recomputed from.
        client_state: returns what the user wants restored together with the weights.
        strict: a version of which no checkpoint could be written is not taken.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        recomputing: Recomputing,
        client_state: ClientState | None,
        *,
        strict: bool,
    ) -> None:
        self._engine = engine
        self.adapter = engine.adapter
        self.recomputing = recomputing
        self.client_state = client_state
        self.restored_client: dict[str, Any] | None = None
        """Client state of the version that was restored, until the script trains on."""
        self.data = engine.data
        self._images: LiveImages | None = None
        self._blob = HostBlob(strict=strict)
        self._failures: set[type[Exception]] = set()

    def capture(self, label: Label, *, must: bool, variant: Variant) -> SnapshotRequest:
        """What the snapshot worker needs of the version; a cause where it cannot be had. Never raises.

        The first version of a layout is taken whatever it takes: memory is reserved at the start (P9), not at
        the expense of the versions that follow.
        """
        try:
            known = self._images
            images = self._current_images()
            return SnapshotRequest(
                label,
                images,
                encode=self._prepare_host_block(images),
                step=self.recomputing.take(label.step),
                must=must or images is not known,
                variant=variant,
            )
        except Exception as error:
            # Whatever it is, training goes on (P6). This rank still has to say no in the vote, or
            # its peers would wait.
            level = logging.WARNING if isinstance(error, ReftError) else logging.ERROR
            if type(error) not in self._failures:
                self._failures.add(type(error))
                logger.log(level, "the state of step %d cannot be captured", label.step, exc_info=error)
            return SnapshotRequest(label, self._images, cause=Cause("the state could not be captured"))

    def _prepare_host_block(self, images: LiveImages) -> Callable[[], bytes | bytearray]:
        state = self._engine.capture(self._client())
        return self._blob.prepare(
            self._engine.template, (images.replicated, images.owned), images.signature, state
        )

    def _client(self) -> Mapping[str, Any] | None:
        if self.restored_client is not None:
            return self.restored_client
        return self.client_state() if self.client_state else None

    def _current_images(self) -> LiveImages:
        signature = self.adapter.signature()
        if self.recomputing.follow():
            self._images = None
        if self._images is None or self._images.signature != signature:
            replicated, owned = self.adapter.images()
            gradients, nbytes = self.recomputing.images, self.recomputing.partition_bytes
            self._images = LiveImages(replicated, owned, signature, gradients, nbytes)
        return self._images

    def replaced(self) -> None:
        """Something was loaded: the images may be other tensors."""
        self._images = None

    def close(self) -> None:
        """Leave nothing in the optimizer and in the loaders. No version is being copied any more."""
        self.recomputing.close()
        self.data.close()
