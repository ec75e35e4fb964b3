"""What the training thread hands to the snapshot worker, and what the ranks agree on in their votes besides
the version itself: how often, and when to stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgpack

from reft.config import Variant, VerifyConfig
from reft.control.control import Ballot, WorkerControl
from reft.errors import TransferError
from reft.faults import FaultPlan
from reft.naming import Label
from reft.protect.host_adam import AdamRecipe
from reft.snapshot.committing.version import Cause, Stage, Version
from reft.snapshot.plan import LiveImages
from reft.snapshot.recompute import OptimizerStep
from reft.snapshot.stats import Complaints, SnapshotStats, say

logger = logging.getLogger(__name__)


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


# -- what the ranks agree on in their votes besides the version itself: how often, and when to stop


@dataclass(frozen=True)
class Halt:
    """What is trained is not to be gone on with. ``restarts``: the newest version may be."""

    why: str
    restarts: bool


def named_step(proposal: int, *, step: int, newest_step: int, late: bool) -> int:
    """The step to stop after that a rank names in the vote on the version of ``step``: one that no rank has
    passed when it hears of it. ``proposal``: the step after which it would stop; 0: it would not.
    ``step``: whose version is voted on. ``newest_step``: the last one whose version was handed over here.
    ``late``: votes may lag behind training, as the ranks agreed in the last one."""
    if proposal and (late or step < newest_step):
        return max(proposal, newest_step + 2)
    return proposal


def may_lag(holds_up: bool, *, step: int, newest_step: int, late: bool) -> bool:
    """Whether a rank says in the vote on the version of ``step`` that the next votes may lag behind training:
    before the next one it has more to do than seal the version, or it is behind already."""
    return holds_up or (late and step < newest_step)


class Votes:
    """Casts the ballots of one rank and remembers what came of them.

    A version of which some rank still drains a staged part, or behind which memory is reserved for another
    protection, holds the next votes up. Training does not wait for those (:attr:`late`), so a request to stop
    that is voted on then has to name a step that no rank has passed when it hears of it: the one after the
    next.

    Args:
        control: carries the ballots.
        advised_interval: how often this rank could take versions.
        wanted_persist_interval: how often they should go to storage; 0: as the block says.
        complaints: told where a request cannot be found out: it is advice, and the last agreed number stays.
            The peers hear of all complaints with the next vote (P6).
    """

    def __init__(
        self,
        control: WorkerControl,
        advised_interval: Callable[[], int],
        wanted_persist_interval: Callable[[], int],
        complaints: Complaints,
    ) -> None:
        self._control = control
        self._advised_interval = advised_interval
        self._wanted_persist_interval = wanted_persist_interval
        self._complaints = complaints
        self.persist_steps = 0
        """How often versions go to storage, as the ranks agreed in the last vote: the one that commits a
        version says whether it does."""
        self._interval = (0, 1, 1)
        self._given_up: tuple[int, ...] = ()
        self.late = False  # whether votes may lag behind training, as the ranks agreed in the last one
        self.newest_step = 0  # the last step whose version was handed over
        self._incarnation = -1
        self.voted_step = -1  # the last step that was voted on
        self.stop_proposal = 0
        """Step after which this rank would stop; set by the training thread, 0 means go on."""
        self.stop_step: int | None = None
        """Step after which all ranks stop: the first that a vote named, the same everywhere."""
        self.halt: Halt | None = None  # found by all ranks in the same vote

    def interval_steps(self, step: int) -> int:
        """How often versions are taken around ``step``, as the ranks agreed; 1 unless they had to."""
        since, now, before = self._interval
        return now if step >= since else before

    def given_up_step(self, step: int) -> int:
        """The newest step whose version all ranks gave up, as far as that counts at ``step``: from the step
        after the next on, as every vote; -1 if there is none."""
        return max((at for at in self._given_up if at + 2 <= step), default=-1)

    def gave_up(self, step: int) -> None:
        """A vote said no to a version that was to be taken."""
        self._given_up = (*self._given_up[-3:], step)  # replaced as a whole: the training thread reads it

    def handed_over(self, version: Label) -> None:
        """Training hands a version over. Where it goes back, no step is left that keeps to an older rate."""
        if version.incarnation != self._incarnation or version.step < self.newest_step:
            self._interval = (0, self._interval[1], self._interval[1])
            self._given_up = ()
        self._incarnation, self.newest_step = version.incarnation, version.step

    def cast(self, version: Label, mine: Ballot) -> Ballot:
        """Vote on a version. Collective. ``mine``: what this rank says of it; ``late``: before the next vote,
        it has more to do than seal the version. The rest is filled in here. Raises TransferError: a peer
        is gone, or votes on another version."""
        step, interval_steps = version.step, self._wanted(self._advised_interval, self._interval[1])
        persist_steps = self._wanted(self._wanted_persist_interval, self.persist_steps)
        unheard = self._complaints.unheard()
        ballot = replace(
            mine,
            stop_after_step=named_step(
                self.stop_proposal, step=step, newest_step=self.newest_step, late=self.late
            ),
            interval_steps=interval_steps,
            late=may_lag(mine.late, step=step, newest_step=self.newest_step, late=self.late),
            persist_steps=persist_steps,
            complains=bool(unheard),
        )
        verdict = self._control.vote(ballot, version)
        if verdict.stop_after_step and self.stop_step is None:
            self.stop_step = verdict.stop_after_step
        if verdict.interval_steps != self._interval[1]:
            logger.info("a version every %d steps, from step %d on", verdict.interval_steps, step + 2)
            self._interval = (step + 2, verdict.interval_steps, self._interval[1])
        self.persist_steps = verdict.persist_steps
        self.late = verdict.late
        self.voted_step = step
        if verdict.complains:
            self._pass_on(unheard)
        return verdict

    def _pass_on(self, unheard: list[str]) -> None:
        """Tell the peers what has failed here, and say what has failed there. Collective."""
        try:
            told = self._control.gather_bytes(msgpack.packb(unheard))
        except TransferError as error:
            # The vote was taken. Who is gone is missing from the next one too, which is given up for that.
            self._complaints.tell("failures of other ranks cannot be received", error)
            return
        self._complaints.heard(unheard)
        causes = {rank: msgpack.unpackb(body) for rank, body in enumerate(told) if rank != self._control.rank}
        say({rank: said for rank, said in causes.items() if said})

    def _wanted(self, wanted: Callable[[], int], agreed: int) -> int:
        try:
            return wanted()
        except Exception as error:
            self._complaints.tell(f"a rate cannot be computed, {agreed} stays", error)
            return agreed

    def resync(self, stop_step: int | None) -> None:
        """The ranks have come together again and do not know what each has heard: take what they agree on,
        and every step's version until they have voted."""
        self._interval = (0, 1, 1)
        self.late = True
        self.stop_step = stop_step
