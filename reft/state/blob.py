"""The host block: everything of a version that is not tensor bytes, encoded once per snapshot.

It holds the manifest of the images, the template of the engine's checkpoint files (both change only
with the layout and are encoded once) and the captured host state (new every step).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from reft.errors import LayoutError, ReftError, UnsupportedStateError
from reft.state import late
from reft.state.catalogue import Manifest, SectionImage
from reft.state.codec import decode, encode

logger = logging.getLogger(__name__)

Template = Callable[[tuple[SectionImage, SectionImage], dict[str, Any]], bytes]

_COPIED_OF_ADAPTER = ("layout", "state")
"""Parts of the adapter's state that share nothing with live objects. With the random states and the
buffers they are most of a block's bytes."""


class HostBlob:
    """Encodes host blocks, keeping what does not change between steps.

    Args:
        strict: a version of which no checkpoint could be written is an error.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._signature: object = None
        self._fixed: dict[str, bytes] = {}

    def prepare(
        self,
        template: Template,
        images: tuple[SectionImage, SectionImage],
        signature: Hashable,
        state: dict[str, Any],
    ) -> Callable[[], bytes | late.LateBlob]:
        """Encode what may alias live objects now, and the rest, most of it, when the result is called:
        on any thread, at any time.

        Args:
            template: describes the engine's checkpoint; asked when the layout changed.
            images: the replicated and the owned section of the version.
            signature: changes when the images would have other tensors.
            state: what ``capture_host_state`` returned.

        Returns:
            Makes the block; where the module has buffers on a device it still has to be settled.

        Raises:
            UnsupportedStateError: no checkpoint could be written, and that is an error.
        """
        if self._signature != signature or not self._fixed:
            manifest = Manifest(*(image.specs for image in images))
            self._fixed = {"manifest": manifest.encode(), "template": self._encoded(template, images, state)}
            self._signature = signature
        fixed, adapter = self._fixed, state["adapter"]
        at_once, on_device = late.split_late(state["buffers"], late.is_late)
        copied = {"rng": state["rng"], "buffers": at_once}
        copied["adapter"] = {key: adapter[key] for key in _COPIED_OF_ADAPTER}
        live = {key: value for key, value in state.items() if key not in copied}
        live["adapter"] = {key: value for key, value in adapter.items() if key not in _COPIED_OF_ADAPTER}
        encoded = encode(live)
        transfer = late.LateTensors(on_device) if on_device else None

        def finish() -> bytes | late.LateBlob:
            block: dict[str, Any] = {**fixed, "state": encoded, "copied": encode(copied)}
            if transfer is None:
                return encode(block)
            # The last one: its bytes are the block's end.
            block |= {late.SPECS: transfer.specs, late.BYTES: bytes(transfer.nbytes)}
            return transfer.append_to(encode(block))

        return finish

    def _encoded(
        self, template: Template, images: tuple[SectionImage, SectionImage], state: dict[str, Any]
    ) -> bytes:
        try:
            return template(images, state)
        except ReftError as error:
            said = f"checkpoints cannot be written from memory, and this is not resumed from it: {error}"
            if self._strict:
                raise UnsupportedStateError(said) from error
            logger.warning("%s", said)
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
        if "copied" in content:
            copied = decode(content["copied"])
            self.state["adapter"] |= copied.pop("adapter")
            self.state |= copied
        specs = content.get(late.SPECS)
        if specs:
            self.state["buffers"].update(late.landed(specs, content[late.BYTES]))
