"""Going to another number of nodes on request: ``reft scale``, or SIGUSR1 to a launcher.

An order lies in the job's memory on any node that trains. Its launcher judges it, and asks for it
in what all nodes share (:class:`reft.job.rendezvous.membership.GrantedScale`). More nodes: spares
find places free, and join as any node does. Fewer: the launcher of the first node tells as many to
leave as the job survives the loss of, since their memory goes with them; when the others have
committed a version without them, it tells the next. As many, without a node that is named: one that
waits takes its place in the next round. In all cases the trainers are told to stop, commit the step
that they are in, and start anew.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError

from reft.config import AUTO
from reft.control.keyvalue import StoreError
from reft.errors import AuthenticationError, ReftError
from reft.grid import Degrees
from reft.job.options import LaunchOptions
from reft.job.rendezvous.handler import StoreRendezvous
from reft.job.rendezvous.membership import (
    Agreement,
    LeaveNotified,
    Role,
    ScaleCancelled,
    ScaleRequested,
)
from reft.job.signals import StopSignals
from reft.memory.protection_record import read_record
from reft.memory.scale_request import (
    REQUEST_FILE,
    ScaleAnswer,
    ScaleRequest,
    Size,
    read_answer,
    read_request,
    read_size,
    write_answer,
    write_request,
)
from reft.node.job_status import JobStatus
from reft.node.report import ReportBoard
from reft.protect.codes import Scheme
from reft.relayout.sizes import Sizes, find_job_sizes

logger = logging.getLogger(__name__)

TOLERANCE_SECS = 60.0
"""An order waits so long, in each start of the job, until the job survives the losses that it
means: for the first version, for a node that is replaced, or until the launchers have told each
other again what a store has lost."""
_WHAT_TO_DO = (
    "`reft status` says which nodes are gone and what is not protected. Start `reft launch` again "
    "for a "
    "node that is gone, then repeat the order; if no node is gone, the placement or its protection "
    "survives too little (`reft plan` shows what would be enough)"
)


class Scaler:
    """One launcher's part. Looks while the trainers run."""

    def __init__(
        self,
        handler: StoreRendezvous,
        options: LaunchOptions,
        path: Path,
        board: JobStatus,
        signals: StopSignals,
    ) -> None:
        self._handler = handler
        self._options = options
        self._path = path
        self._board = board
        self._seen = self._stat()  # an order of an earlier run has been dealt with
        self._order: ScaleRequest | None = None
        self._signals = signals
        self._waits: tuple[Any, int] | None = None
        self._waits_since = 0.0
        self._noted: ReportBoard | None = None

    def poll(self, agreement: Agreement, group_rank: int) -> None:
        """Take up a new order, and go on with an old one. Best effort: it looks again."""
        try:
            self._take_order(agreement)
            if group_rank == 0:
                self._note_sizes(agreement)
                self._name_leavers(agreement)
            self._tell_when_done(agreement)
        except (RendezvousError, StoreError, AuthenticationError, OSError) as error:
            logger.debug("scaling: %s", error)

    def left(self) -> None:
        if self._order is not None:
            self._answer(self._order.nodes, done=True)

    def _situation(self, agreement: Agreement) -> ScaleSituation:
        config, record = self._options.config, read_record(self._path)
        state = self._handler.state
        sizes, members = state.sizes, () if state.agreement is None else state.agreement.members
        known = (
            sizes is not None and sizes.members == members and state.participants == set(members)
        )
        named = (
            record is not None and not record.configured.startswith(AUTO) and record.parsed.parities
        )
        return ScaleSituation(
            least=config.min_nodes,
            most=config.max_nodes,
            nodes=agreement.nodes,
            spares=len(state.those(Role.SPARE)),
            workers=config.nproc_per_node,
            tolerance=self._board.tolerance_left(agreement.incarnation),
            degrees=self._board.degrees,
            parities=record.parsed if record is not None and named else None,
            size=read_size(self._path),
            sizes=sizes if known else None,
        )

    def _note_sizes(self, agreement: Agreement) -> None:
        """Have all nodes know with how many the job can train, by its newest version."""
        if self._board.board is self._noted and self._handler.state.sizes is not None:
            return
        self._noted, holders, now = (
            self._board.board,
            self._board.holders,
            self._situation(agreement),
        )
        if now.tolerance is None or now.degrees is None:
            return
        fitting = [n for n in range(now.least, now.most + 1) if not now.why_not(n)]
        self._handler.note_sizes(
            find_job_sizes(fitting, agreement.nodes, holders, now.degrees, self._board.scheme)
        )

    def _take_order(self, agreement: Agreement) -> None:
        if self._signals.asked_to_leave:
            write_request(self._path, len(agreement.nodes) - 1, (self._options.node,))
            self._signals.asked_to_leave = False
        seen = self._stat()
        if seen == self._seen:
            return
        order = read_request(self._path)
        if order is None or self._handler.is_closed():  # which looks at who waits now
            self._seen = seen
            return
        running, now = len(agreement.nodes), self._situation(agreement)
        missing = shortfall(order, now)
        why = refusal(order, now)
        # Before the first version, a node that waits may not have said so yet.
        hopeful = now.tolerance is None or not why
        if missing and hopeful:
            if self._waits != (seen, agreement.incarnation):
                self._waits, self._waits_since = (seen, agreement.incarnation), time.monotonic()
            if time.monotonic() - self._waits_since < TOLERANCE_SECS:
                self._say_that_it_waits(order, running, missing)
                return
        why = why or (missing and f"{missing}. {_WHAT_TO_DO}")
        if not why:
            self._handler.submit(ScaleRequested(order.number, order.nodes, order.without, running))
            granted = self._handler.state.scaling
            if granted is None or granted.number < order.number:
                return  # the round is over: another look, in the next one
            if granted.number > order.number:
                why = (
                    "another node gave a later order: repeat this one, and synchronise the clocks "
                    "of the "
                    "nodes"
                )
        self._seen, self._order = seen, order
        self._board.warn()
        if why:
            logger.warning("the job does not go to %d nodes: %s", order.nodes, why)
            self._answer(running, refused=why)
            return
        if replaces(order, agreement.nodes):
            logger.warning("the job continues without %s, as requested", ", ".join(order.without))
        else:
            logger.warning(
                "the job changes from %d to %d nodes, as requested", running, order.nodes
            )
        self._answer(running)

    def _say_that_it_waits(self, order: ScaleRequest, running: int, missing: str) -> None:
        """Once, unless something else is missing."""
        said = (
            f"the order to go to {order.nodes} nodes waits, up to {TOLERANCE_SECS:.0f} s: {missing}"
        )
        self._board.warn(said)
        told = read_answer(self._path)
        if told is None or (told.number, told.waits) != (order.number, said):
            write_answer(self._path, ScaleAnswer(order.number, order.nodes, running, waits=said))
            logger.warning("%s", said)

    def _name_leavers(self, agreement: Agreement) -> None:
        """Tell the next nodes to leave: of more than were asked for, or, once, those to be
        replaced."""
        nodes, scaling = agreement.nodes, self._handler.state.scaling
        if scaling is None or self._handler.state.leaving:
            return
        if not scaling.replaces:
            fewer = scaling.nodes < len(nodes)
            ranks = (
                leave_next(scaling.nodes, scaling.without, self._situation(agreement))
                if fewer
                else ()
            )
        else:
            ranks = tuple(i for i, node in enumerate(nodes) if node in scaling.without)
            survived = self._board.tolerance_left(agreement.incarnation)
            if scaling.round != -1 or survived is None or survived < len(ranks):
                return
        if not ranks:  # not yet
            return
        self._handler.submit(LeaveNotified(ranks, len(nodes)))
        if self._handler.state.leaving:  # else the round is over
            logger.warning("asked to leave: %s", ", ".join(nodes[rank] for rank in ranks))

    def _tell_when_done(self, agreement: Agreement) -> None:
        order, running = self._order, len(agreement.nodes)
        if order is None or self._handler.state.leaving:
            return
        if running != order.nodes:
            self._end_half_way(order, agreement)
            return
        if self._board.tolerance_left(agreement.incarnation) is None:
            return
        staying = sorted(set(order.without) & set(agreement.nodes))
        if not staying:
            self._answer(running, done=True)
            self._order = None
            return
        state = self._handler.state
        # Whether nodes were told to leave in a round before this one.
        if state.scaling is not None and state.scaling.round not in (-1, state.round):
            self._answer(running, refused=f"no node took the place of {', '.join(staying)}")

    def _end_half_way(self, order: ScaleRequest, agreement: Agreement) -> None:
        """Where the job can go no further on its way: the number of nodes that it has holds."""
        running = len(agreement.nodes)
        why = running > order.nodes and count_leaving(order, self._situation(agreement))
        if not why:
            return
        self._handler.submit(ScaleCancelled(order.number, running))
        logger.warning("the job stays at %d nodes: %s", running, why)
        self._answer(running, refused=f"the job stays at {running} nodes: {why}")

    def _answer(self, running: int, *, refused: str = "", done: bool = False) -> None:
        assert self._order is not None
        write_answer(
            self._path,
            ScaleAnswer(self._order.number, self._order.nodes, running, refused=refused, done=done),
        )
        if refused:
            self._order = None

    def _stat(self) -> Any:
        try:
            info = (self._path / REQUEST_FILE).stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_ino


@dataclass(frozen=True)
class ScaleSituation:
    least: int  # least, most: nodes, of ``--nnodes``
    most: int
    nodes: tuple[str, ...]  # ids of those that train
    spares: int  # nodes that wait
    workers: int  # trainers of each node
    tolerance: int | None  # node losses that the job survives now; None: nothing is committed yet
    degrees: Degrees | None = None  # of the newest version; None: not known
    # the protection that was asked for by name and keeps parities; None: another
    parities: Scheme | None = None
    size: Size | None = None  # what else decides about the degree; None: not known
    # who holds what of the newest version, by the ranks of these nodes; None: not known
    sizes: Sizes | None = None

    def why_not(self, nodes: int, *, asked: bool = False) -> str:
        """Why the job cannot train on so many nodes; "" where it can, as far as is known.
        ``asked``: for so many, although the job could keep those it has."""
        if self.degrees is None:
            return ""
        trainers, one = nodes * self.workers, self.degrees.pp * self.degrees.tp
        if trainers % one:
            return (
                f"{nodes} nodes have {trainers} trainers, which do not make whole replicas of "
                f"{self.degrees.pp} stages x {self.degrees.tp} slices"
            )
        replicas, size = trainers // one, self.size
        if (
            size is not None
            and replicas != self.degrees.dp
            and size.why_not
            and (asked or size.fixed)
        ):
            return f"the job keeps its data-parallel degree of {self.degrees.dp}: {size.why_not}"
        if size is not None and size.batch % (size.micro * replicas):
            return (
                f"{replicas} replicas cannot share the {size.batch} samples of a step in "
                "micro-batches of "
                f"{size.micro}"
            )
        try:
            if self.parities is not None:
                self.parities.check_room(replicas)
        except ReftError as error:
            return str(error)
        return ""

    def way(self, wanted: int) -> tuple[int, ...]:
        """Numbers of nodes to which it can go on its way to fewer, ``wanted`` first."""
        return tuple(
            n for n in range(wanted, len(self.nodes)) if n == wanted or not self.why_not(n)
        )


def refusal(order: ScaleRequest, now: ScaleSituation) -> str:
    """Why an order cannot be followed, however long it waits; "" where it can. Pure."""
    wanted, running, named = order.nodes, len(now.nodes), set(order.without)
    unknown, leave, waiting = (
        sorted(named - set(now.nodes)),
        max(0, running - wanted),
        now.spares or "none",
    )
    why = ""
    if not now.least <= wanted <= now.most:
        why = (
            f"{wanted} nodes were asked for, but the job was started with --nnodes "
            f"{now.least}:{now.most}; "
            f"give a number from {now.least} to {now.most}"
        )
    elif wanted > running + now.spares:
        why = (
            f"{wanted} nodes were asked for, {running} train and {waiting} wait: start `reft "
            "launch` on "
            f"{wanted - running - now.spares} more and repeat the order"
        )
    elif unknown:
        why = f"no node {', '.join(unknown)} trains; training nodes are {', '.join(now.nodes)}"
    elif wanted == running and len(named) > now.spares:
        why = (
            f"{len(named)} of {running} nodes were named to be replaced, and {waiting} wait: "
            "start `reft "
            f"launch` on {len(named) - now.spares} more and repeat the order"
        )
    elif wanted != running and len(named) > leave:
        why = (
            f"{len(named)} nodes were named to leave, but {leave} leave from {running} to "
            f"{wanted} nodes"
        )
    elif why := now.why_not(wanted, asked=True):
        why = f"{why}. {_other_numbers(now)}"
    return why or count_leaving(order, now)


def shortfall(order: ScaleRequest, now: ScaleSituation) -> str:
    """Which losses, that the order means, the job does not survive at this moment; "": it does.
    Pure."""
    if now.tolerance is None:
        return "nothing is committed in this start of the job yet"
    named = len(set(order.without)) if replaces(order, now.nodes) else 0
    fewer = order.nodes < len(now.nodes)
    if now.tolerance >= named and not (fewer and not leave_next(order.nodes, order.without, now)):
        return ""
    leave = "a node that leaves takes its part of the state with it"
    if named > 1:
        leave = f"{named} nodes were named to be replaced at once"
    elif fewer and (at_once := len(now.nodes) - max(now.way(order.nodes))) > 1:
        leave = f"{at_once} nodes would leave at once, since no number between fits"
    return f"{leave}, and now the job survives the loss of {max(0, now.tolerance) or 'none'}"


def leave_next(
    wanted: int, first: tuple[str, ...], now: ScaleSituation, survived: int | None = None
) -> tuple[int, ...]:
    """Group ranks of the nodes that leave next, on the way to fewer: as many as the job survives
    the loss of (``survived``: losses, whichever they are; None: as now), down to a number that
    fits; () where there is none. Pure."""
    survived = (now.tolerance or 0) if survived is None else survived
    running, way = len(now.nodes), now.way(wanted)
    if survived < 0:
        return ()
    for number in way:
        if running - number <= survived:
            return leavers(now.nodes, running - number, first)
    whole = None if now.sizes is None else now.sizes.tolerance()
    if now.sizes is None or whole is None or survived < whole:
        return ()  # another node is lost, perhaps
    named = [rank for rank, node in enumerate(now.nodes) if node in first]
    found = (now.sizes.leaving(running - number, named[: running - number]) for number in way)
    return next((ranks for ranks in found if ranks), ())


def count_leaving(order: ScaleRequest, now: ScaleSituation) -> str:
    """Where the nodes that leave at once are more than the job ever survives the loss of."""
    running = len(now.nodes)
    whole = None if now.sizes is None else now.sizes.tolerance()
    if order.nodes >= running or now.tolerance is None or whole is None:
        return ""
    survived = max(whole, now.tolerance)
    if leave_next(order.nodes, order.without, now, survived):
        return ""
    at_once = running - max(now.way(order.nodes))
    protect = ""
    if now.degrees is not None and at_once < now.degrees.dp:
        protect = f"`reft protect arc:{at_once}` makes it survive that; then repeat the order. "
    others = order.without and leave_next(order.nodes, (), now, survived)
    if others:
        leave = " and ".join(now.nodes[rank] for rank in others)
        return (
            f"{', '.join(order.without)} would leave at once and together hold state that the "
            "others need: "
            f"without --without, {leave} would leave"
        )
    return (
        f"{order.nodes} nodes were asked for and {running} train: {at_once} would leave at once, "
        "with their "
        f"parts of the state, and the job survives the loss of {survived or 'none'}. {protect}"
        f"{_other_numbers(now)}"
    )


def _other_numbers(now: ScaleSituation) -> str:
    numbers = range(now.least, now.most + 1)
    others = [n for n in numbers if n != len(now.nodes) and not now.why_not(n, asked=True)]
    if not others:
        return f"No other number of --nnodes {now.least}:{now.most} fits the layout and the batch"
    said = " or ".join(f"`reft scale {n}`" for n in others)
    return f"What fits the layout and the batch: {len(now.nodes)} nodes, as now; {said}"


def replaces(order: ScaleRequest, nodes: tuple[str, ...]) -> bool:
    """Whether others are to take the places of the nodes that it names."""
    return bool(order.without) and order.nodes == len(nodes)


def leavers(nodes: tuple[str, ...], number: int, first: tuple[str, ...]) -> tuple[int, ...]:
    """Ranks of so many nodes that leave: those that were named, then the last. Pure."""
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank] not in first, -rank))
    return tuple(order[:number])
