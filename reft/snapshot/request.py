"""What the training thread hands to the snapshot worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from reft.config import Variant
from reft.protect.codes import Scheme
from reft.snapshot.layout import LiveImages
from reft.snapshot.recompute import OptimizerStep
from reft.store.label import Label


@dataclass
class SnapshotRequest:
    """One version to take, handed over by the training thread.

    Attributes:
        label: name of the version.
        images: live tensors; unchanged until ``copied`` is set or the request is cancelled. None
            where the state could not be captured: the version is voted down.
        host_blob: encoded host state; or
        encode: makes it, on the worker thread.
        must: wait for a free slot and never cancel (restore, last snapshot before an exit).
        step: how the optimizer got here, if peers' partitions are recomputed.
        idle: nothing to take after this step; the ranks only vote, so that a wish to stop gets around.
        variant: when the bytes are copied; all variants are the same to recovery.
        cancelled: nothing is to be copied any more.
        overrun: training has gone on before the copy had ended.
    """

    label: Label
    images: LiveImages | None
    host_blob: bytes | bytearray = b""
    encode: Callable[[], bytes | bytearray] | None = None
    step: OptimizerStep | None = None
    must: bool = False
    idle: bool = False
    variant: Variant = Variant.HOST
    started: bool = False
    cancelled: bool = False
    overrun: bool = False
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False

    @property
    def paced(self) -> bool:
        """Whether the copy keeps to the windows; one that must be taken does not."""
        return self.variant is Variant.HAS and not (self.must or self.idle)


@dataclass(frozen=True)
class WorkerOptions:
    """Fixed settings of a worker."""

    scheme: Scheme
    block_bytes: int
    host_bytes: int
    chunk_bytes: int = 256 * 2**10
