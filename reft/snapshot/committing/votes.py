"""What the ranks agree on in their votes besides the version itself: how often, and when to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack

from reft.control.control import Ballot, WorkerControl
from reft.errors import TransferError
from reft.naming import Label
from reft.snapshot.complaints import Complaints, say

logger = logging.getLogger(__name__)


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
