"""The host block: everything of a version that is not tensor bytes, encoded once per snapshot.

It holds the manifest of the images, the template of DeepSpeed's checkpoint files (both change only
with the layout and are encoded once) and the captured host state (new every step).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from reft.errors import LayoutError, ReftError
from reft.state.catalogue import Manifest
from reft.state.codec import decode, encode

if TYPE_CHECKING:
    from reft.snapshot.layout import LiveImages

logger = logging.getLogger(__name__)


class HostBlob:
    """Encodes host blocks, keeping what does not change between steps."""

    def __init__(self) -> None:
        self._signature: object = None
        self._fixed: dict[str, bytes] = {}

    def encode(self, engine: Any, images: LiveImages, state: dict[str, Any]) -> bytes:
        """Encode one version's host block.

        Args:
            engine: the live engine, asked for its checkpoint template when the layout changed.
            images: live images of the version.
            state: what ``capture_host_state`` returned.
        """
        if self._signature != images.signature or not self._fixed:
            manifest = Manifest(images.replicated.specs, images.owned.specs)
            self._fixed = {"manifest": manifest.encode(), "template": _template(engine, images, state)}
            self._signature = images.signature
        return encode({**self._fixed, "state": encode(state)})


def _template(engine: Any, images: LiveImages, state: dict[str, Any]) -> bytes:
    from reft.state.deepspeed_format import capture_template

    try:
        return capture_template(engine, (images.replicated, images.owned), state)
    except ReftError as error:
        logger.warning(
            "checkpoints cannot be written from memory, snapshots and recovery are not affected: %s", error
        )
        return b""


class DecodedBlob:
    """A host block read back.

    Raises:
        LayoutError: it is not one of reft's host blocks.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        content = decode(data)
        if not isinstance(content, dict) or not {"manifest", "template", "state"} <= set(content):
            raise LayoutError("the host block of the snapshot has an unknown form; was it written by reft?")
        self.manifest = Manifest.decode(content["manifest"])
        self.template: bytes = content["template"]
        self.state: dict[str, Any] = decode(content["state"])
