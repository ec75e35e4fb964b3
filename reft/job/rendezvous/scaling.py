"""Changes the number of nodes on request: ``reft scale``, or SIGUSR1 to a launcher.

A request is a file in the job's memory directory on any node that trains. The launcher of that node
checks the request, and enters it into the state that all nodes share
(:class:`reft.job.rendezvous.membership.GrantedScale`).

- More nodes: the limit is raised, and spares take the new places like any node that joins.
- Fewer nodes: nodes leave in steps. A leaving node takes its part of the state with it, so the
  launcher of the first node asks only as many nodes to leave as the job can lose at once. When the
  remaining nodes have committed a version without them, it asks the next ones.
- The same number, with nodes to be replaced: in the next round, waiting nodes take the places of
  the nodes that leave.

In all cases the trainers receive a stop signal, commit their current step, and start again.
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
    GrantedScale,
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
"""Longest time that a request waits, in each start of the job, until the job can lose the nodes
that leave.

The request may have to wait for the first version, for the replacement of a lost node, or, if the
store was restarted, for new status reports of the launchers.
"""
_WHAT_TO_DO = (
    "`reft status` says which nodes are gone and what is not protected. Start `reft launch` again "
    "for a node that is gone, then repeat the request; if no node is gone, the placement or its "
    "protection survives too little (`reft plan` shows what would be enough)"
)


class Scaler:
    """One launcher's part in changes of the number of nodes; polled while the trainers run.

    Args:
        rendezvous: this node's side of the rendezvous.
        options: options of the launcher.
        path: the job's memory directory on this node.
        board: the status reports of all nodes.
        signals: signals of the launcher; SIGUSR1 requests that this node leaves.
    """

    def __init__(
        self,
        rendezvous: StoreRendezvous,
        options: LaunchOptions,
        path: Path,
        board: JobStatus,
        signals: StopSignals,
    ) -> None:
        self._rendezvous = rendezvous
        self._options = options
        self._path = path
        self._board = board
        self._signals = signals
        # A request file that already exists at the start counts as handled by an earlier launcher.
        self._handled = self._stat()
        self._request: ScaleRequest | None = None  # The request that is being carried out
        # File of the request that waits, and the start of the job in which it began to wait
        self._waiting: tuple[Any, int] | None = None
        self._waiting_since = 0.0
        self._noted: ReportBoard | None = None

    def poll(self, agreement: Agreement, group_rank: int) -> None:
        """Accept a new request, and continue an accepted one; errors are retried at the next poll.

        Args:
            agreement: what the nodes agreed on for the running round.
            group_rank: group rank of this node.
        """
        try:
            self._take_request(agreement)
            if group_rank == 0:
                self._note_sizes(agreement)
                self._notify_leaving(agreement)
            self._answer_when_done(agreement)
        except (RendezvousError, StoreError, AuthenticationError, OSError) as error:
            logger.debug("scaling: %s", error)

    def left(self) -> None:
        """Record, when this node has left the job, that the request was carried out."""
        if self._request is not None:
            self._answer(self._request.nodes, done=True)

    def _situation(self, agreement: Agreement) -> ScaleSituation:
        config, record = self._options.config, read_record(self._path)
        state = self._rendezvous.state
        members = () if state.agreement is None else state.agreement.members
        sizes = state.sizes
        if sizes is not None and sizes.members != members:
            sizes = None
        if state.participants != set(members):
            sizes = None
        parities = None
        if record is not None and not record.configured.startswith(AUTO):
            parities = record.parsed if record.parsed.parities else None
        return ScaleSituation(
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            nodes=agreement.nodes,
            spares=len(state.with_role(Role.SPARE)),
            workers=config.nproc_per_node,
            tolerance=self._board.tolerance_left(agreement.incarnation),
            degrees=self._board.degrees,
            parities=parities,
            size=read_size(self._path),
            sizes=sizes,
        )

    def _note_sizes(self, agreement: Agreement) -> None:
        """Record in the shared state the node counts at which the job can train.

        The numbers follow from the newest version. They are computed again when the status reports
        of the nodes have changed.
        """
        if self._board.board is self._noted and self._rendezvous.state.sizes is not None:
            return
        self._noted = self._board.board
        holders, situation = self._board.holders, self._situation(agreement)
        if situation.tolerance is None or situation.degrees is None:
            return
        numbers = range(situation.min_nodes, situation.max_nodes + 1)
        fitting = [number for number in numbers if not situation.reason_against(number)]
        self._rendezvous.note_sizes(
            find_job_sizes(fitting, agreement.nodes, holders, situation.degrees, self._board.scheme)
        )

    # -- the request -------------------------------------------------------------------------------

    def _take_request(self, agreement: Agreement) -> None:
        """Accept, refuse or postpone a new request."""
        if self._signals.asked_to_leave:
            write_request(self._path, len(agreement.nodes) - 1, (self._options.node,))
            self._signals.asked_to_leave = False
        request_file = self._stat()
        if request_file == self._handled:
            return
        request = read_request(self._path)
        # is_closed() is called because it reads the store, which updates the number of spares.
        if request is None or self._rendezvous.is_closed():
            self._handled = request_file
            return
        situation = self._situation(agreement)
        missing = shortfall(request, situation)
        reason = refusal(request, situation)
        # Before the first version a refusal is not final: spares may not have joined yet.
        may_change = situation.tolerance is None or not reason
        if missing and may_change and self._may_wait((request_file, agreement.incarnation)):
            self._report_waiting(request, len(agreement.nodes), missing)
            return
        if not reason and missing:
            reason = f"{missing}. {_WHAT_TO_DO}"
        if not reason:
            granted = self._submit(request, agreement)
            if granted is None or granted.number < request.number:
                return  # The round has ended meanwhile: try again in the next one
            if granted.number > request.number:
                reason = (
                    "another node made a later request: repeat this one, and synchronise the "
                    "clocks of the nodes"
                )
        self._handled, self._request = request_file, request
        self._answer_first(request, agreement, reason)

    def _may_wait(self, request: tuple[Any, int]) -> bool:
        """Whether a request that the job would not survive now may wait longer.

        Args:
            request: identity of the request file, and number of this start of the job.
        """
        now = time.monotonic()
        if self._waiting != request:
            self._waiting, self._waiting_since = request, now
        return now - self._waiting_since < TOLERANCE_SECS

    def _submit(self, request: ScaleRequest, agreement: Agreement) -> GrantedScale | None:
        """Enter a request into the shared state; return the newest request that is then in it."""
        running = len(agreement.nodes)
        self._rendezvous.submit(
            ScaleRequested(request.number, request.nodes, request.without, running)
        )
        return self._rendezvous.state.scaling

    def _answer_first(self, request: ScaleRequest, agreement: Agreement, reason: str) -> None:
        """Write the first answer to a request: accepted, or refused if there is a ``reason``."""
        running = len(agreement.nodes)
        self._board.warn()  # Clears the status warning that the request waits
        if reason:
            logger.warning("the job does not go to %d nodes: %s", request.nodes, reason)
            self._answer(running, refused=reason)
            return
        if replaces(request, agreement.nodes):
            names = ", ".join(request.without)
            logger.warning("the job continues without %s, as requested", names)
        else:
            logger.warning(
                "the job changes from %d to %d nodes, as requested", running, request.nodes
            )
        self._answer(running)

    def _report_waiting(self, request: ScaleRequest, running: int, missing: str) -> None:
        """Report that the request waits, once for each reason (``missing``)."""
        text = (
            f"the request for {request.nodes} nodes waits, up to {TOLERANCE_SECS:.0f} s: {missing}"
        )
        self._board.warn(text)
        answer = read_answer(self._path)
        if answer is None or (answer.number, answer.waits) != (request.number, text):
            write_answer(
                self._path, ScaleAnswer(request.number, request.nodes, running, waits=text)
            )
            logger.warning("%s", text)

    # -- carrying it out ---------------------------------------------------------------------------

    def _notify_leaving(self, agreement: Agreement) -> None:
        """Ask the next nodes to leave if the job survives their loss; called on the first node."""
        nodes, scaling = agreement.nodes, self._rendezvous.state.scaling
        if scaling is None or self._rendezvous.state.leaving:
            return
        if scaling.replaces:
            ranks = tuple(rank for rank, node in enumerate(nodes) if node in scaling.without)
            tolerance = self._board.tolerance_left(agreement.incarnation)
            is_notified = scaling.round != -1
            if is_notified or tolerance is None or tolerance < len(ranks):
                return
        elif scaling.nodes < len(nodes):
            ranks = leave_next(scaling.nodes, scaling.without, self._situation(agreement))
        else:
            return
        if not ranks:
            return
        self._rendezvous.submit(LeaveNotified(ranks, len(nodes)))
        if self._rendezvous.state.leaving:  # Otherwise the round has ended meanwhile
            logger.warning("asked to leave: %s", ", ".join(nodes[rank] for rank in ranks))

    def _answer_when_done(self, agreement: Agreement) -> None:
        request, running = self._request, len(agreement.nodes)
        if request is None or self._rendezvous.state.leaving:
            return
        if running != request.nodes:
            self._cancel_if_stuck(request, agreement)
            return
        if self._board.tolerance_left(agreement.incarnation) is None:
            return  # No version is committed in this start of the job yet
        staying = sorted(set(request.without) & set(agreement.nodes))
        if not staying:
            self._answer(running, done=True)
            self._request = None
            return
        state = self._rendezvous.state
        was_notified = state.scaling is not None and state.scaling.round not in (-1, state.round)
        if was_notified:
            self._answer(running, refused=f"no node took the place of {', '.join(staying)}")

    def _cancel_if_stuck(self, request: ScaleRequest, agreement: Agreement) -> None:
        """Cancel a request for fewer nodes if no more nodes can ever leave."""
        running = len(agreement.nodes)
        if running <= request.nodes:
            return
        reason = reason_too_many_leave(request, self._situation(agreement))
        if not reason:
            return
        self._rendezvous.submit(ScaleCancelled(request.number, running))
        logger.warning("the job stays at %d nodes: %s", running, reason)
        self._answer(running, refused=f"the job stays at {running} nodes: {reason}")

    def _answer(self, running: int, *, refused: str = "", done: bool = False) -> None:
        assert self._request is not None
        request = self._request
        answer = ScaleAnswer(request.number, request.nodes, running, refused=refused, done=done)
        write_answer(self._path, answer)
        if refused:
            self._request = None

    def _stat(self) -> Any:
        """Return modification time and inode, which identify a request file; None without one."""
        try:
            info = (self._path / REQUEST_FILE).stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_ino


# -- decisions; pure -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleSituation:
    """The facts about the running job by which a request is judged."""

    min_nodes: int  # Smallest number of nodes, from ``--nnodes``
    max_nodes: int  # Largest number of nodes, from ``--nnodes``
    nodes: tuple[str, ...]  # Ids of the nodes that train
    spares: int  # Number of waiting nodes
    workers: int  # Trainers of each node
    tolerance: int | None  # Node losses that the job survives now; None: nothing is committed yet
    degrees: Degrees | None = None  # Parallel degrees of the newest version; None: unknown
    parities: Scheme | None = None  # The requested protection scheme; None if it has no parities
    size: Size | None = None  # Limits of the data-parallel degree; None: unknown
    # Node counts at which the job can train, and the nodes that hold the newest version; None:
    # unknown
    sizes: Sizes | None = None

    def reason_against(self, nodes: int, *, asked: bool = False) -> str:
        """Return why the job cannot train on a number of nodes; empty if no reason is known.

        Args:
            nodes: number of nodes.
            asked: True if a user requests this number. The number is then also refused if the job
                could train on it, but with different results than now.
        """
        if self.degrees is None:
            return ""
        trainers, replica = nodes * self.workers, self.degrees.pp * self.degrees.tp
        if trainers % replica:
            return (
                f"{nodes} nodes have {trainers} trainers, which do not make whole replicas of "
                f"{self.degrees.pp} stages x {self.degrees.tp} slices"
            )
        replicas, size = trainers // replica, self.size
        is_other = replicas != self.degrees.dp
        if size is not None and is_other and size.why_not and (asked or size.fixed):
            return f"the job keeps its data-parallel degree of {self.degrees.dp}: {size.why_not}"
        if size is not None and size.batch % (size.micro * replicas):
            return (
                f"{replicas} replicas cannot share the {size.batch} samples of a step in "
                f"micro-batches of {size.micro}"
            )
        try:
            if self.parities is not None:
                self.parities.check_room(replicas)
        except ReftError as error:
            return str(error)
        return ""

    def path_to(self, nodes: int) -> tuple[int, ...]:
        """Return, rising, the node counts below the present one on which the job can train.

        Args:
            nodes: smallest node count to return.
        """
        return tuple(
            number
            for number in range(nodes, len(self.nodes))
            if number == nodes or not self.reason_against(number)
        )


def refusal(request: ScaleRequest, situation: ScaleSituation) -> str:
    """Return why a request can never be carried out; empty if it can."""
    if reason := _refusal_by_numbers(request, situation):
        return reason
    if reason := situation.reason_against(request.nodes, asked=True):
        return f"{reason}. {_describe_fitting(situation)}"
    return reason_too_many_leave(request, situation)


def _refusal_by_numbers(request: ScaleRequest, situation: ScaleSituation) -> str:
    """Return why the requested number or the named nodes do not fit the nodes that exist."""
    requested, running, named = request.nodes, len(situation.nodes), set(request.without)
    unknown = sorted(named - set(situation.nodes))
    leaving = max(0, running - requested)
    waiting = situation.spares or "none"
    if not situation.min_nodes <= requested <= situation.max_nodes:
        allowed = f"{situation.min_nodes}:{situation.max_nodes}"
        return (
            f"{requested} nodes were asked for, but the job was started with --nnodes {allowed}; "
            f"give a number from {situation.min_nodes} to {situation.max_nodes}"
        )
    if requested > running + situation.spares:
        missing = requested - running - situation.spares
        return (
            f"{requested} nodes were asked for, {running} train and {waiting} wait: start `reft "
            f"launch` on {missing} more and repeat the request"
        )
    if unknown:
        return (
            f"no node {', '.join(unknown)} trains; training nodes are {', '.join(situation.nodes)}"
        )
    if requested == running and len(named) > situation.spares:
        missing = len(named) - situation.spares
        return (
            f"{len(named)} of {running} nodes were named to be replaced, and {waiting} wait: start "
            f"`reft launch` on {missing} more and repeat the request"
        )
    if requested != running and len(named) > leaving:
        return (
            f"{len(named)} nodes were named to leave, but {leaving} leave from {running} to "
            f"{requested} nodes"
        )
    return ""


def shortfall(request: ScaleRequest, situation: ScaleSituation) -> str:
    """Describe why the job would not survive the request now; empty if it would.

    A node that leaves counts as a lost node, because its memory goes with it.
    """
    if situation.tolerance is None:
        return "nothing is committed in this start of the job yet"
    replaced = len(set(request.without)) if replaces(request, situation.nodes) else 0
    is_fewer = request.nodes < len(situation.nodes)
    can_leave = not is_fewer or bool(leave_next(request.nodes, request.without, situation))
    if situation.tolerance >= replaced and can_leave:
        return ""
    losses = "a node that leaves takes its part of the state with it"
    if replaced > 1:
        losses = f"{replaced} nodes were named to be replaced at once"
    elif is_fewer:
        at_once = len(situation.nodes) - max(situation.path_to(request.nodes))
        if at_once > 1:
            losses = f"{at_once} nodes would leave at once, since no number between fits"
    survived = max(0, situation.tolerance) or "none"
    return f"{losses}, and now the job survives the loss of {survived}"


def leave_next(
    requested: int,
    first: tuple[str, ...],
    situation: ScaleSituation,
    tolerance: int | None = None,
) -> tuple[int, ...]:
    """Find the nodes that leave next on the way to fewer nodes.

    As many nodes leave as the job can lose at once, provided that it can train on the others.

    Args:
        requested: number of nodes after the last step.
        first: ids of nodes that leave before any other.
        situation: the facts about the job.
        tolerance: number of nodes that the job can lose, whichever they are; None: the number in
            ``situation``.

    Returns:
        The group ranks of the leaving nodes; empty if no nodes may leave.
    """
    survived = (situation.tolerance or 0) if tolerance is None else tolerance
    running, path = len(situation.nodes), situation.path_to(requested)
    if survived < 0:
        return ()
    for number in path:
        if running - number <= survived:
            return leavers(situation.nodes, running - number, first)
    # The job does not survive the loss of arbitrary nodes of that number, but may survive the loss
    # of certain nodes.
    sizes = situation.sizes
    full_tolerance = None if sizes is None else sizes.tolerance()
    if sizes is None or full_tolerance is None or survived < full_tolerance:
        # The tolerance is lower than `sizes` implies, so `sizes` may still contain a lost node.
        return ()
    named = [rank for rank, node in enumerate(situation.nodes) if node in first]
    for number in path:
        leaving = running - number
        if ranks := sizes.leaving(leaving, named[:leaving]):
            return ranks
    return ()


def reason_too_many_leave(request: ScaleRequest, situation: ScaleSituation) -> str:
    """Return why no nodes can leave, even once all protection is in place; empty if some can."""
    running = len(situation.nodes)
    full_tolerance = None if situation.sizes is None else situation.sizes.tolerance()
    if request.nodes >= running or situation.tolerance is None or full_tolerance is None:
        return ""
    survived = max(full_tolerance, situation.tolerance)
    if leave_next(request.nodes, request.without, situation, survived):
        return ""
    if request.without and (others := leave_next(request.nodes, (), situation, survived)):
        names = " and ".join(situation.nodes[rank] for rank in others)
        return (
            f"{', '.join(request.without)} would leave at once and together hold state that the "
            f"others need: without --without, {names} would leave"
        )
    at_once = running - max(situation.path_to(request.nodes))
    protect = ""
    if situation.degrees is not None and at_once < situation.degrees.dp:
        protect = f"`reft protect arc:{at_once}` makes it survive that; then repeat the request. "
    return (
        f"{request.nodes} nodes were asked for and {running} train: {at_once} would leave at once, "
        f"with their parts of the state, and the job survives the loss of {survived or 'none'}. "
        f"{protect}{_describe_fitting(situation)}"
    )


def _describe_fitting(situation: ScaleSituation) -> str:
    """Describe to the user which numbers of nodes can be requested."""
    numbers = range(situation.min_nodes, situation.max_nodes + 1)
    others = [
        number
        for number in numbers
        if number != len(situation.nodes) and not situation.reason_against(number, asked=True)
    ]
    if not others:
        allowed = f"{situation.min_nodes}:{situation.max_nodes}"
        return f"No other number of --nnodes {allowed} fits the layout and the batch"
    commands = " or ".join(f"`reft scale {number}`" for number in others)
    return f"What fits the layout and the batch: {len(situation.nodes)} nodes, as now; {commands}"


def replaces(request: ScaleRequest, nodes: tuple[str, ...]) -> bool:
    """Whether the request keeps the number of nodes and names nodes to be replaced."""
    return bool(request.without) and request.nodes == len(nodes)


def leavers(nodes: tuple[str, ...], number: int, first: tuple[str, ...]) -> tuple[int, ...]:
    """Return the group ranks of ``number`` leaving nodes: first those in ``first``.

    Further nodes are taken from the highest group rank downwards.
    """
    ranks = sorted(range(len(nodes)), key=lambda rank: (nodes[rank] not in first, -rank))
    return tuple(ranks[:number])
