"""The agent of one node: starts the node's trainers, watches them, and restarts them.

A round is one start of the trainers on all nodes, and the training until they end. This agent
differs from ``torchrun``'s in these points:

- Trainers that end because a peer vanished use up none of ``--max-restarts``
  (:mod:`reft.job.script`). Restarts are counted for the whole job
  (:mod:`reft.job.rendezvous.membership`).
- Every round gets its own store for the trainers (:mod:`reft.job.trainer_store`). TorchElastic
  keeps using the store that the first node served in the first round. If that node is lost, the
  survivors still try to connect to it; if it lives but is no longer the first node, a replacement
  of another node waits in vain for the store's address.
- A node that dies while a round forms costs another round, not the job.
- If the rendezvous store is lost, healthy trainers continue; only the next round waits for it.
- The trainers of a failed round are killed quickly: the state to restore is already in the arenas,
  shared-memory files that outlive the trainers.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from reft.control.keyvalue import StoreError
from reft.errors import ConfigError, FencedError, ReftError
from reft.job.hang_verdict import HangDetector
from reft.job.options import LaunchOptions
from reft.job.rendezvous.backend import JobEndedError, RendezvousBackend
from reft.job.rendezvous.handler import StoreRendezvous, replaced_error
from reft.job.rendezvous.membership import Agreement, NodeFinished
from reft.job.script import ExitCause, TrainerFailure, WorkerExit, judge, name_ended_early
from reft.job.signals import StopSignals
from reft.job.trainer_store import TrainerStore, deal_ranks
from reft.job.trainers import Trainers

logger = logging.getLogger(__name__)

_FORM_ATTEMPTS = 10
_PROGRESS_SECS = 600.0  # Trainers that ran this long have made progress, even without a commit
_EXIT_BARRIER_SECS = 300.0
_FIRST_SIGNAL_CODE = 128
"""Smallest exit code that means death by a signal. After a signal, for example from the kernel when
memory was short, a restart may succeed."""
_NOTIFY_SECS = 1.0


class DuplicateNodeError(ConfigError):
    """Raised if several launchers claim to be the same node."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"node id {node!r} is used by several launchers of this job; every node needs its own: "
            f"give --node-id, or a --memory-dir of its own to each launcher on one host"
        )


class AgentCallbacks(Protocol):
    """Callbacks by which the agent informs its launcher and queries it."""

    def round_formed(self, agreement: Agreement) -> None:
        """Called when the nodes have agreed on a round; this node's trainers start next."""
        ...

    def trainers_started(self, pids: list[int]) -> None:
        """Called when the trainers of this round have been started."""
        ...

    def trainers_healthy(self, group_rank: int) -> None:
        """Called after every poll that found all trainers running and no node waiting to join."""
        ...

    def failure_seen(self) -> None:
        """Called when a trainer of this node has failed, before the agent ends the others."""
        ...

    def round_over(self) -> None:
        """Called when the round is over on this node, before the node joins the next one."""
        ...

    def state_changed(self, state: str, **facts: Any) -> None:
        """Called when the state that ``reft status`` shows for this node has changed."""
        ...

    def newest_step(self) -> int:
        """Return the step of the newest committed version; -1 if there is none."""
        ...

    def newest_incarnation(self) -> int:
        """Return the number of the newest start of the job that this node knows; 0 if none."""
        ...

    def fenced(self) -> str:
        """Return why shared storage refuses this node's writes; empty if it accepts them.

        Storage refuses them when a newer start of the job, without this node, has taken the storage
        over.
        """
        ...


class Agent:
    """Starts, watches and restarts the trainers of one node.

    Args:
        options: options of the launcher.
        backend: connects this node to the rendezvous store.
        rendezvous: this node's side of the rendezvous.
        secret: the user's secret, which authenticates connections.
        launcher: receives the agent's callbacks.
        signals: the signals that stop the launcher.
        hangs: detects trainers that hang.
        exits_dir: directory in which trainers record why they end.
        grace_secs: returns the seconds that trainers get to commit and exit after a stop signal.

    Attributes:
        agreement: what the nodes agreed on for the current round; None before the first round.
        failure: why this node's trainers failed in this round; None if they did not.
        all_ended_well: whether the trainers of all nodes exited without an error.
    """

    def __init__(
        self,
        options: LaunchOptions,
        *,
        backend: RendezvousBackend,
        rendezvous: StoreRendezvous,
        secret: bytes,
        launcher: AgentCallbacks,
        signals: StopSignals,
        hangs: HangDetector,
        exits_dir: Path,
        grace_secs: Callable[[], float],
    ) -> None:
        self._options, self._config = options, options.config
        self._backend, self._rendezvous = backend, rendezvous
        self._secret = secret
        self._launcher = launcher
        self._signals = signals
        self._hangs = hangs
        self._grace_secs = grace_secs
        self._started_at = 0.0
        self._trainers = Trainers(options, exits_dir, signals)
        self._trainer_store: TrainerStore | None = None
        self._store_lost = False
        self._starts_without_progress = 0
        self._start_error = ""  # Last failure of trainers while no version had been committed
        self._early_end = ""  # The rank that finished before the others in the last round
        # Local rank that failed by itself when trainers of this node last failed; None if none did
        self._failed_rank: int | None = None
        self.agreement: Agreement | None = None
        self._group_rank = 0
        self.failure: TrainerFailure | None = None
        self.all_ended_well = False

    @property
    def leads(self) -> bool:
        """Whether this node has group rank 0 in the current round."""
        return self.agreement is not None and self._group_rank == 0

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> dict[int, ProcessFailure] | None:
        """Train until the job ends on this node.

        Returns:
            The trainers that had failed when the job ended, by global rank; empty if all ended
            well; None if this node was a spare and was not needed.

        Raises:
            FencedError: another node has replaced this one, or is about to, because one of its
                trainers fails at every start; its trainers have ended.
            SignalException: this launcher, or the launcher of a peer, received a stop signal.
        """
        try:
            return self._run()
        except RendezvousGracefulExitError:
            return None
        except FencedError:
            self._trainers.end(signal.SIGKILL, 0.0)
            raise
        except SignalException as stop:
            grace_secs = self._options.stop_secs
            if self._signals.received is not None:
                if self.agreement is not None:
                    self._notify_peers(int(stop.sigval))
                # After a stop signal, trainers get time to commit their current step.
                grace_secs = self._grace_secs()
            self._trainers.end(stop.sigval, grace_secs)
            raise
        finally:
            self._trainers.end(signal.SIGTERM, self._options.stop_secs)
            self._trainers.release()

    def _run(self) -> dict[int, ProcessFailure]:
        self._start_round()
        while True:
            time.sleep(self._config.monitor_interval)
            self._end_if_replaced()
            failures = self._poll()
            if failures is None:
                if not self._nodes_waiting():
                    self._launcher.trainers_healthy(self._group_rank)
                    continue
                # Some trainers of this node may have finished their script while others run.
                self._note_ended_early()
                scaled_down = self._rendezvous.is_scaled_down
                size = "fewer nodes" if scaled_down else "a node that joins"
                logger.warning("the trainers restart with %s", size)
                if self._rendezvous.is_whole:
                    # Healthy trainers commit the step that they are in, so no step is lost.
                    self._trainers.end(signal.SIGTERM, self._grace_secs())
                self._launcher.round_over()
            elif not failures:
                self._launcher.state_changed("ended, waiting for other nodes")
                self._exit_barrier()
                if self.all_ended_well or not self._nodes_waiting():
                    return {}
                logger.warning("a peer lost its trainers before it had ended; joining it again")
                self._launcher.round_over()
                self._note_ended_early()
            else:
                self._launcher.round_over()
                if not self._may_restart():
                    self._trainers.end(signal.SIGTERM, self._options.stop_secs)
                    self._end_if_replaced(read_store=True)
                    return failures
            self._start_round()

    def _notify_peers(self, number: int) -> None:
        """Notify the other nodes that this launcher was stopped.

        Call this before stopping the local trainers: when they stop, the peers' trainers fail, and
        the other nodes must know why. The store is written by a thread, so that a store that hangs
        delays the exit by a second at most.

        Args:
            number: number of the stop signal.
        """

        def notify() -> None:
            with suppress(RuntimeError, RendezvousError):
                self._rendezvous.submit(NodeFinished(self._rendezvous.node, number))

        thread = threading.Thread(target=notify, daemon=True)
        thread.start()
        thread.join(_NOTIFY_SECS)

    def _end_if_replaced(self, *, read_store: bool = False) -> None:
        """Raise FencedError if the job continues without this node.

        Args:
            read_store: whether to read the newest incarnation (number of starts of the job) from
                the store; by default the reply to the last heartbeat is used.

        Raises:
            FencedError: the job continues without this node.
        """
        if self._rendezvous.is_leaving:
            return  # Not replaced: this node stays until the others have committed without it
        own, newest = self._rendezvous.incarnation, self._rendezvous.newest_incarnation
        if read_store:
            with suppress(StoreError):
                newest = self._rendezvous.incarnations.read()
        if newest > own > 0:
            raise replaced_error(own, newest, by_another=self._rendezvous.is_full)
        if reason := self._launcher.fenced():
            raise FencedError(reason)

    # -- whether to restart ------------------------------------------------------------------------

    def _may_restart(self) -> bool:
        """Classify the failure of this round's trainers; return whether to restart them."""
        self._end_if_peers_were_stopped()
        failure = self._classify(
            self.failure
            or TrainerFailure(ExitCause.OWN, 0, 1, "the trainers can no longer be watched")
        )
        self.failure = failure
        reason = failure.reason
        if not failure.ended_early:
            reason = f"rank {self._global_rank(failure.local_rank)}, {reason}"
        info = replace(self._rendezvous.info, cause=failure.cause, failure=reason)
        self._rendezvous.info = info
        if failure.cause is ExitCause.REFUSED:
            logger.error("%s: the job ends; a restart would be refused again", failure.reason)
            return False
        if self._ends_early_again(failure):
            logger.error("%s: the job ends", _ended_early_twice(failure))
            return False
        if self._same_trainer_failed_again(failure) and self._rendezvous.can_continue_without(1):
            self._rendezvous.leave()
            raise FencedError(_describe_broken(failure))
        if self._fails_at_start_again(failure):
            logger.error(
                "%s: the same error twice, and no version was committed: the job ends",
                failure.reason,
            )
            return False
        renews = self._options.restarts_renew
        used = 0 if renews and self._has_new_version() else info.restarts_used
        allowed = self._config.max_restarts
        since = " since the last new version" if renews else ""
        if failure.cause is ExitCause.OWN and used >= allowed:
            logger.error(
                "%s; restarts used%s: %d of %d (--max-restarts): the job ends",
                failure.reason,
                since,
                used,
                allowed,
            )
            return False
        price = {
            ExitCause.OWN: f"uses restart {used + 1} of {allowed}{since}",
            ExitCause.UNCLEAR: "the other nodes decide whether this uses a restart",
            ExitCause.SIZE: "restarting with another number of nodes; this uses no restart",
        }.get(failure.cause, "restarting; this uses no restart, since a peer vanished")
        logger.warning("trainers ended: %s; %s", failure.reason, price)
        return True

    def _classify(self, failure: TrainerFailure) -> TrainerFailure:
        """Correct the cause of a failure by the number of nodes and of free restarts used."""
        alone = self.agreement is not None and len(self.agreement.members) == 1
        if failure.cause in (ExitCause.UNCLEAR, ExitCause.STOPPED) and alone:
            failure = replace(failure, cause=ExitCause.OWN)
        if failure.cause in (ExitCause.PEER, ExitCause.STOPPED) and not self._has_free_restart():
            after = f"after {self._options.free_restarts} free restarts without progress"
            failure = replace(failure, cause=ExitCause.OWN, reason=f"{failure.reason} ({after})")
        if failure.cause is ExitCause.SIZE:
            # If the store does not answer now, the refusal is recorded in the next round, in which
            # trainers refuse this number of nodes again.
            with suppress(RendezvousError, StoreError):
                if not self._rendezvous.refuse_size():
                    failure = replace(failure, cause=ExitCause.REFUSED)
        return failure

    def _note_ended_early(self) -> None:
        """Report that trainers of this node ended well while their peers need another round.

        The report goes into this node's request for the next round. The reports of all nodes decide
        whether the early end caused the failure.

        Raises:
            JobEndedError: ranks ended early at the same step in the last round, too.
        """
        # If a node was lost, that loss is the reason for another round, not an early end.
        ended = self._ended_well() if self._rendezvous.is_whole else {}
        failure = name_ended_early(TrainerFailure(ExitCause.PEER, 0, 1, ""), ended)
        if not failure.ended_early:
            return
        if self._ends_early_again(failure):
            raise JobEndedError(_ended_early_twice(failure))
        self._rendezvous.info = replace(
            self._rendezvous.info, cause=ExitCause.ENDED, failure=failure.reason
        )

    def _ends_early_again(self, failure: TrainerFailure) -> bool:
        """Whether a rank ended early at the same step as in the last round, without a new version.

        If so, the next round would end in the same way.
        """
        before = self._early_end
        self._early_end = failure.reason if failure.ended_early else ""
        is_same = failure.ended_early and failure.reason == before
        return is_same and self._options.restarts_renew and not self._has_new_version()

    def _same_trainer_failed_again(self, failure: TrainerFailure) -> bool:
        """Whether a trainer of this node has failed by itself twice in a row, without a new version
        in between, while the trainers of no other node did the first time.

        Its device may be broken. If the script were at fault, other nodes would fail, too, or the
        node that takes this one's place will.
        """
        before = self._failed_rank
        self._failed_rank = failure.local_rank if failure.cause is ExitCause.OWN else None
        is_same = before is not None and before == self._failed_rank
        failed = () if self.agreement is None else self.agreement.failures
        only_here = len(failed) == 1 and failed[0].startswith(f"{self._options.node}, ")
        return is_same and only_here and not self._has_new_version()

    def _fails_at_start_again(self, failure: TrainerFailure) -> bool:
        """Whether the script failed twice with the same error and no version was ever committed."""
        if not self._options.restarts_renew or self._launcher.newest_step() >= 0:
            return False
        if failure.cause is not ExitCause.OWN or failure.exit_code >= _FIRST_SIGNAL_CODE:
            return False
        is_same = failure.reason == self._start_error
        self._start_error = failure.reason
        return is_same

    def _has_new_version(self) -> bool:
        return self._launcher.newest_step() > self._rendezvous.info.known_step

    def _has_free_restart(self) -> bool:
        """Count a restart that follows the loss of a peer; return whether it is still free.

        A restart is free if it does not count against ``--max-restarts``. The number of consecutive
        free restarts without progress is limited.
        """
        ran_secs = time.monotonic() - self._started_at
        if self._has_new_version() or ran_secs > _PROGRESS_SECS:
            self._starts_without_progress = 1
        else:
            self._starts_without_progress += 1
        return self._starts_without_progress <= self._options.free_restarts

    def _nodes_waiting(self) -> bool:
        """Whether other nodes wait for this round to end; False if the store does not answer."""
        try:
            waiting = self._rendezvous.num_nodes_waiting() > 0
        except RendezvousConnectionError as error:
            if not self._store_lost:
                logger.warning(
                    "the rendezvous store no longer answers. Training continues; without the store "
                    "no node can be replaced, and a restart waits until it answers (%s)",
                    error,
                )
            self._store_lost = True
            return False
        self._note_store_is_back()
        return waiting

    def _note_store_is_back(self) -> None:
        if self._store_lost:
            logger.warning("the rendezvous store answers again")
        self._store_lost = False

    # -- forming a round ---------------------------------------------------------------------------

    def _start_round(self) -> None:
        """End the trainers of the last round, join the next one, and start its trainers."""
        self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        self._trainers.release()
        self._launcher.state_changed("waiting for nodes")
        self.agreement = agreement = self._join()
        if agreement.restarts_used > self._config.max_restarts:
            reason = self.failure.reason if self.failure else "on another node"
            raise JobEndedError(
                f"restarts used: {agreement.restarts_used}, allowed: {self._config.max_restarts} "
                f"(--max-restarts); the last failure: {reason}"
            )
        self._launcher.round_formed(agreement)
        self.failure = None
        self._started_at = time.monotonic()
        assert self._trainer_store is not None
        pids = self._trainers.start(agreement, self._group_rank, self._trainer_store.port)
        self._hangs.clear()
        # To start the trainers, TorchElastic replaced the signal handlers: restore the launcher's.
        self._signals.install()
        self._launcher.trainers_started(pids)
        self._launcher.state_changed("running", round=agreement.round)

    def _join(self) -> Agreement:
        """Join a round; if a node is lost while the round forms, try again, ten times at most."""
        for attempt in range(1, _FORM_ATTEMPTS + 1):
            if self._store_lost:
                self._backend.reconnect()
                self._note_store_is_back()
            try:
                return self._join_once()
            except (
                RendezvousClosedError,
                RendezvousGracefulExitError,
                RendezvousTimeoutError,
                FencedError,
            ):
                raise
            except DuplicateNodeError as error:
                if self._rendezvous.is_refused or attempt == _FORM_ATTEMPTS:
                    raise
                logger.warning("a node was refused: %s", error)
            except (RendezvousError, RuntimeError, TimeoutError) as error:
                if isinstance(error, ReftError) or attempt == _FORM_ATTEMPTS:
                    raise
                self._store_lost = isinstance(error, (RendezvousConnectionError, StoreError))
                logger.warning(
                    "a node was lost while the round formed (%s); it is formed again",
                    _first_line(error),
                )
        raise AssertionError("the last attempt returns or raises")

    def _join_once(self) -> Agreement:
        """Try once to join a round with this node's current state, and open the trainers' store.

        Raises:
            DuplicateNodeError: the round refused a node because several launchers use its id.
        """
        rendezvous = self._rendezvous
        incarnation = max(
            rendezvous.info.incarnation,
            self._launcher.newest_incarnation(),
            rendezvous.incarnations.read(),
        )
        rendezvous.info = replace(
            rendezvous.info, newest_step=self._launcher.newest_step(), incarnation=incarnation
        )
        agreement = rendezvous.next_rendezvous()
        if agreement.refused:
            index = agreement.members.index(agreement.refused[0])
            raise DuplicateNodeError(agreement.nodes[index])
        self._group_rank = agreement.members.index(rendezvous.node)
        self._close_trainer_store()
        self._trainer_store = TrainerStore.open(
            rendezvous.table,
            self._secret,
            self._group_rank,
            len(agreement.members),
            self._config.local_addr,
            incarnation=agreement.incarnation,
        )
        rendezvous.incarnations.raise_to(agreement.incarnation)
        return agreement

    # -- trainers ----------------------------------------------------------------------------------

    def _poll(self) -> dict[int, ProcessFailure] | None:
        """Poll the trainers. If one has failed or hangs, find the cause and end the others.

        Returns:
            The failed trainers by global rank, empty if all ended well; None while they run.
        """
        exits = self._trainers.failures()
        if exits:
            self._launcher.failure_seen()
            exits = self._trainers.settled_failures(exits)
            self.failure = self._judge(exits)
            self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        elif self.agreement is not None and self._signals.received is None:
            self._end_if_hanging(self.agreement)
        failures = self._trainers.ended()
        if failures and not exits and self.failure is None:
            # A trainer failed between the calls of failures() and ended(). TorchElastic has then
            # ended the other trainers with SIGTERM: ignore those that died of it.
            exits = self._trainers.failures()
            own_ends = {r: e for r, e in exits.items() if e.exit_code != -signal.SIGTERM}
            exits = own_ends or exits
            self.failure = self._judge(exits) if exits else None
        if not failures:
            return failures
        # Trainers that this agent itself ended do not count as failed.
        own = {local_rank: f for local_rank, f in failures.items() if local_rank in exits}
        return {self._global_rank(rank): failure for rank, failure in (own or failures).items()}

    def _end_if_hanging(self, agreement: Agreement) -> None:
        """Kill the trainers if the job hangs, and record the failure."""
        failure = self._hangs.judge(
            self._hangs.poll(self._trainers.running()),
            self._rendezvous.table,
            self._group_rank,
            len(agreement.members),
            silent=self._rendezvous.has_lost_silent_node,
        )
        if failure is not None:
            self._launcher.failure_seen()
            self.failure = name_ended_early(failure, self._ended_well())
            self._trainers.end(signal.SIGKILL, self._options.stop_secs)

    def _judge(self, exits: dict[int, WorkerExit]) -> TrainerFailure:
        failure = judge(exits)
        if self._trainers.script_has_ended(failure.local_rank):
            # This trainer failed after its own script had finished, so it did not fail because a
            # peer finished early.
            return failure
        return name_ended_early(failure, self._ended_well())

    def _ended_well(self) -> dict[int, str]:
        """Describe this node's trainers that ended well (exit code, step), by global rank."""
        ends = self._trainers.ended_well()
        return {self._global_rank(local_rank): end for local_rank, end in ends.items()}

    def _global_rank(self, local_rank: int) -> int:
        assert self.agreement is not None
        ranks = deal_ranks(self.agreement.workers, self.agreement.rank_stride)
        return ranks[self._group_rank][local_rank]

    # -- the end -----------------------------------------------------------------------------------

    def _end_if_peers_were_stopped(self) -> None:
        """End this node if other launchers were stopped by a signal and too few nodes are left.

        Raises:
            SignalException: the job cannot continue without the stopped nodes.
        """
        if self._options.awaits_replacement:
            return
        with suppress(RuntimeError, RendezvousError):
            self._rendezvous.is_closed()  # Called because it reads the store, for `stopped` below
        stopped = self._rendezvous.stopped
        if stopped and not self._rendezvous.can_continue_without(len(stopped)):
            node, number = next(iter(stopped.items()))
            received = signal.Signals(number)
            raise SignalException(
                f"node {node} was stopped by {received.name}, and no other node replaces it",
                sigval=received,
            )

    def _exit_barrier(self) -> None:
        """Wait until the trainers of all nodes ended well, a node needs another round, or 300 s."""
        deadline = time.monotonic() + _EXIT_BARRIER_SECS
        try:
            while not self._rendezvous.all_ended_well:
                if time.monotonic() > deadline or self._nodes_waiting():
                    return
                # Report in every iteration: if the store was restarted, it has lost the earlier
                # report.
                self._rendezvous.submit(NodeFinished(self._rendezvous.node))
                self._end_if_peers_were_stopped()
                time.sleep(max(0.1, self._config.monitor_interval))
            self.all_ended_well = True
        except (RuntimeError, RendezvousError) as error:
            logger.warning("cannot ask whether all nodes ended well: %s", _first_line(error))

    def _close_trainer_store(self) -> None:
        if self._trainer_store is not None:
            self._trainer_store.close()
            self._trainer_store = None

    def close(self) -> None:
        """Close the trainers' store and remove their exit notes."""
        self._close_trainer_store()
        self._trainers.close()


def _describe_broken(failure: TrainerFailure) -> str:
    return (
        f"{failure.reason}, twice in a row, while no other node failed by itself and no version "
        "was committed in between: a device of this node may be broken. This launcher ends, with "
        "its trainers and its daemon, and the job continues without this node. `reft launch` here "
        "makes it a spare"
    )


def _ended_early_twice(failure: TrainerFailure) -> str:
    return (
        f"{failure.reason}, twice and without a new version in between. Give all ranks the same "
        "number of steps: a DataLoader with drop_last=True and a DistributedSampler, or "
        "reft.data.loader"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
