"""What the training thread hands to the snapshot worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from reft.config import Variant, VerifyConfig
from reft.faults import FaultPlan
from reft.naming import Label
from reft.protect.host_adam import AdamRecipe
from reft.snapshot.committing.version import Cause, Stage, Version
from reft.snapshot.complaints import Complaints
from reft.snapshot.plan import LiveImages
from reft.snapshot.recompute import OptimizerStep
from reft.snapshot.stats import SnapshotStats


@dataclass
class SnapshotRequest:
    """One version to take, handed over by the training thread, and what has become of it so far."""

    label: Label  # name of the version
    # live tensors; unchanged until ``copied`` is set. None where the state was never captured.
    images: LiveImages | None
    host_blob: bytes | bytearray = b""  # encoded host state; or
    encode: Callable[[], bytes | bytearray] | None = None  # makes it, on the worker thread
    step: OptimizerStep | None = None  # how the optimizer got here, if peers' partitions are recomputed
    must: bool = False  # wait for a free slot and never cancel (restore, last snapshot before an exit)
    # nothing to take after this step; the ranks only vote, so that a request to stop gets around
    idle: bool = False
    variant: Variant = Variant.HOST  # when the bytes are copied; all variants are the same to recovery
    cause: Cause | None = None  # why it cannot be taken, though the ranks vote on it; None if it can
    # set when it does not need the live tensors any more
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)  # set when it is known what became of it
    _version: Version | None = None

    @property
    def paced(self) -> bool:
        """Whether the copy keeps to the windows; one that must be taken does not."""
        return self.variant is Variant.HAS and not (self.must or self.idle)

    @property
    def version(self) -> Version:
        """What is known of it: before it is handed over, what is asked for."""
        return self._version or Version(self.label, self.must, self.idle, self.paced, self.cause)

    def follow(self, version: Version, *, done: bool = False) -> None:
        """Note what has become of it."""
        self._version = version
        if version.cause is not None:
            self.encode = None  # nobody needs the state that it holds
        if done or not version.holds_training:
            self.copied.set()
        if done:
            self.done.set()

    @property
    def started(self) -> bool:
        """Whether its copy has begun."""
        return self.version.stage is not Stage.QUEUED

    @property
    def given_up(self) -> Cause | None:
        """Why it is not committed; None if it is, or may be yet."""
        return self.version.cause

    @property
    def committed(self) -> bool:
        """Whether all ranks have it."""
        return self.version.stage is Stage.COMMITTED


@dataclass
class Watchers:
    """Who watches the versions of one rank."""

    stats: SnapshotStats
    faults: FaultPlan  # disturbs them, where a test asks for it
    # called on the worker thread after each global commit
    on_commit: Callable[[Label], None] = lambda label: None
    # called with (step, cause) for each version given up
    on_skip: Callable[[int, str], None] = lambda step, cause: None
    complaints: Complaints = field(default_factory=Complaints)  # of what nobody foresaw
    # the same of versions that go to storage; 0: as the block says
    wanted_persist_interval: Callable[[], int] = lambda: 0
    # asked in every vote how often versions should be taken, given how often one fits into the idle time
    wanted_interval: Callable[[int], int] = lambda windows: windows


@dataclass(frozen=True)
class WorkerOptions:
    """Fixed settings of a worker."""

    block_bytes: int  # most bytes of a block
    host_bytes: int  # reserved for the host state of a version; more once it has grown
    # how partitions that ring peers alone have are recomputed; None: they are always sent
    recompute: AdamRecipe | None = None
    verify: VerifyConfig = field(default_factory=VerifyConfig)
