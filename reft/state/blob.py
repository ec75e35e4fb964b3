"""The host block: everything of a version that is not tensor bytes, encoded once per snapshot.

It holds the manifest of the images, the template of DeepSpeed's checkpoint files (both change only
with the layout and are encoded once) and the captured host state (new every step).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from reft.errors import LayoutError, ReftError
from reft.state import late
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

    def encode(self, engine: Any, images: LiveImages, state: dict[str, Any]) -> bytes | late.LateBlob:
        """Encode one version's host block.

        Args:
            engine: the live engine, asked for its checkpoint template when the layout changed.
            images: live images of the version.
            state: what ``capture_host_state`` returned.

        Returns:
            The block; where the module has buffers on a device it still has to be settled.
        """
        if self._signature != images.signature or not self._fixed:
            manifest = Manifest(images.replicated.specs, images.owned.specs)
            self._fixed = {"manifest": manifest.encode(), "template": _template(engine, images, state)}
            self._signature = images.signature
        at_once, on_device = late.split_late(state["buffers"], late.is_late)
        if not on_device:
            return encode({**self._fixed, "state": encode(state)})
        transfer = late.LateTensors(on_device)
        block = {
            **self._fixed,
            "state": encode({**state, "buffers": at_once}),
            late.SPECS: transfer.specs,
            late.BYTES: bytes(transfer.nbytes),  # the last one: its bytes are the block's end
        }
        return transfer.append_to(encode(block))


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
        specs = content.get(late.SPECS)
        if specs:
            self.state["buffers"].update(late.landed(specs, content[late.BYTES]))
