"""Writes a version as checkpoint files in DeepSpeed's own format."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from reft.errors import PersistError
from reft.grid import Coordinate, Section
from reft.state.blob import DecodedBlob
from reft.storage.deepspeed_format import (
    TRACKER_NAME,
    Template,
    find_tracker,
    write_checkpoint,
    write_recovery_scripts,
)
from reft.storage.persist import Files, VersionSource
from reft.storage.persisted import FileRecord
from reft.storage.publish import LEADER, BlockInFile, WorkDir


class Images:
    """The serialized state (one image per section) of the rank at one grid coordinate, assembled
    from its blocks."""

    def __init__(self, blocks: Iterable[BlockInFile]) -> None:
        self._blocks: dict[Section, list[BlockInFile]] = {s: [] for s in Section}
        for block in sorted(blocks, key=lambda b: b.entry.start_bytes):
            self._blocks[block.entry.key.section].append(block)
        self._starts = {
            s: [b.entry.start_bytes for b in blocks] for s, blocks in self._blocks.items()
        }
        self._sound: set[int] = set()

    def image_bytes(self, section: Section) -> int:
        return next((b.entry.image_bytes for b in self._blocks[section]), 0)

    def read(self, section: Section, start: int, nbytes: int) -> memoryview:
        """Return bytes ``[start, start + nbytes)`` of an image, after verifying the checksums of
        the blocks that hold them.

        Returns:
            A view of the blocks' memory if the range is contiguous there, otherwise a copy.

        Raises:
            PersistError: the image has no such range, or a block differs from its checksum.
        """
        if start < 0 or nbytes < 1 or start + nbytes > self.image_bytes(section):
            raise PersistError(
                f"bytes [{start}, {start + nbytes}) were asked of the {section} image of "
                f"{self.image_bytes(section)} bytes; the checkpoint template belongs to another "
                "layout"
            )
        # Buffer, first byte and end offset of each contiguous range.
        pieces: list[tuple[memoryview, int, int]] = []
        position, stop = start, start + nbytes
        for block in self._blocks[section][bisect_right(self._starts[section], start) - 1 :]:
            if position >= stop:
                break
            if id(block) not in self._sound:
                block.check(block.data)
                self._sound.add(id(block))
            begin = block.entry.arena_offset + position - block.entry.start_bytes
            length = min(block.entry.start_bytes + block.entry.nbytes, stop) - position
            if pieces and pieces[-1][0] is block.buffer and pieces[-1][2] == begin:
                pieces[-1] = (block.buffer, pieces[-1][1], begin + length)
            else:
                pieces.append((block.buffer, begin, begin + length))
            position += length
        views = [buffer[begin:end] for buffer, begin, end in pieces]
        return views[0] if len(views) == 1 else memoryview(bytearray().join(views))


def write_deepspeed_files(
    source: VersionSource, work: WorkDir, at: Coordinate, on_block: Callable[[int], None]
) -> Files:
    """Write the files that the rank at a coordinate would have written with ``save_checkpoint`` at
    the version's step. A function of the type :data:`reft.storage.persist.Export`."""
    images = Images(source.blocks[at])
    blob = DecodedBlob(images.read(Section.HOST, 0, images.image_bytes(Section.HOST)))
    template = Template.decode(blob.template)
    if template.recovery_scripts:
        write_recovery_scripts(work.scripts)
    tracker = find_tracker(blob.state)
    if at == LEADER and tracker is not None:
        work.pointers.mkdir(exist_ok=True)
        (work.pointers / TRACKER_NAME).write_bytes(tracker)
    files = write_checkpoint(template, images.read, blob.state, work.root, at)
    on_block(sum(block.entry.nbytes for block in source.blocks[at]))
    return {name: FileRecord(*record) for name, record in files.items()}
