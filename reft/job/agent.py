"""The agent of one node: starts its trainers, watches them, and starts them again.

What differs from ``torchrun``'s agent:

- Trainers that end because a peer vanished use up none of ``--max-restarts``
  (:mod:`reft.job.script`); restarts are counted for the whole job
  (:mod:`reft.job.rendezvous.membership`).
- Every round gets a store of its own for the trainers (:mod:`reft.job.trainer_store`). TorchElastic
  keeps the first one: a replacement waits for its address in vain when the old first node lives,
  and the survivors call the dead when not.
- A node that dies while a round forms costs another round, not the job.
- A lost rendezvous store stops no healthy trainers; the next round waits for it.
- A failed group is ended quickly: what counts is in memory already.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.api import macros

from reft.control.keyvalue import StoreError
from reft.env import ENV_EXIT_DIR
from reft.errors import ConfigError, FencedError, ReftError
from reft.job.node_memory import EXITS_PREFIX
from reft.job.options import LaunchOptions
from reft.job.rendezvous.client import JobEndedError, ServedStore
from reft.job.rendezvous.handler import StoreRendezvous, replaced
from reft.job.rendezvous.membership import Agreement, NodeFinished
from reft.job.script import ExitCause, ExitNote, TrainerFailure, WorkerExit, judge, name_ended_early
from reft.job.trainer_store import TrainerStore, deal_ranks, trainer_environ

if TYPE_CHECKING:
    from reft.job.launch import Launcher

logger = logging.getLogger(__name__)

_FORM_ATTEMPTS = 10
# Trainers that ran so long have made progress, also where nothing is committed
_PROGRESS_SECS = 600.0
_EXIT_BARRIER_SECS = 300.0
_KILLED = 128
"""From here on an exit code tells of a signal: another start may do better, as where memory was
short."""
_TELL_SECS = 1.0
_ONE_AFTER_THE_OTHER_SECS = 1.0
"""Trainers of a node fail one after the other; the first to be seen need not be the first to
fail."""
_OWN_CAUSES = (ExitCause.REFUSED, ExitCause.OWN)
_CLOSE_SECS = 30
_MOST_NAMED = 10


class DuplicateNodeError(ConfigError):
    """Several launchers claim to be the same node."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"node id {node!r} is used by several launchers of this job; every node needs its "
            "own: give "
            f"--node-id, or a --memory-dir of its own to each launcher on one host"
        )


class Agent:
    """Starts, watches and restarts the trainers of one node; ``grace_secs`` is their time to commit
    and end when the launcher was told to stop."""

    def __init__(
        self,
        options: LaunchOptions,
        *,
        place: ServedStore,
        handler: StoreRendezvous,
        secret: bytes,
        launcher: Launcher,
        exits_dir: Path,
        grace_secs: Callable[[], float],
    ) -> None:
        self._options, self._config = options, options.config
        self._place, self._handler = place, handler
        self._secret = secret
        self._launcher = launcher
        self._grace_secs = grace_secs
        self._started_at = 0.0
        self._trainers = Trainers(options, exits_dir)
        self._trainer_store: TrainerStore | None = None
        self._store_lost = False
        self._without_progress = 0
        self._start_error = ""  # what ended the trainers last, before there was any version
        # which rank ended well before the others in the last round, if one did
        self._early_end = ""
        self.agreement: Agreement | None = None
        self._group_rank = 0
        self.failure: TrainerFailure | None = None
        self.all_ended_well = False
        self.told_to_stop = False

    @property
    def leads(self) -> bool:
        """Whether this is the first node of the job."""
        return self.agreement is not None and self._group_rank == 0

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> dict[int, ProcessFailure] | None:
        """Train until the job ends here; the trainers that have failed then, by global rank, and
        none where all have ended well; None: this node was a spare that was not needed. Raises
        FencedError: it was replaced, and has ended its trainers; SignalException: it was told to
        stop, or its peers were."""
        try:
            return self._run()
        except RendezvousGracefulExitError:
            return None
        except FencedError:
            self._trainers.end(signal.SIGKILL, 0.0)
            raise
        except SignalException as stop:
            if self.told_to_stop and self.agreement is not None:
                # Before its trainers, and with them those of its peers, end; a store that hangs
                # costs a second.
                def tell_peers(number: int = int(stop.sigval)) -> None:
                    with suppress(RuntimeError, RendezvousError):
                        self._handler.tell(NodeFinished(self._handler.node, number))

                telling = threading.Thread(target=tell_peers, daemon=True)
                telling.start()
                telling.join(_TELL_SECS)
            # Told to stop, trainers have the grace to commit what they have.
            secs = self._grace_secs() if self.told_to_stop else self._options.stop_secs
            self._trainers.end(stop.sigval, secs)
            raise
        finally:
            self._trainers.end(signal.SIGTERM, self._options.stop_secs)
            self._trainers.forget()

    def _run(self) -> dict[int, ProcessFailure]:
        self._start_round()
        while True:
            time.sleep(self._config.monitor_interval)
            self._end_if_replaced()
            failures = self._poll()
            if failures is None:
                if not self._nodes_waiting():
                    self._launcher.trainers_run(self._group_rank)
                    continue
                # The script of a trainer may have ended well, and the trainer itself not yet.
                self._note_ended_early()
                size = "fewer nodes" if self._handler.is_scaled_down else "a node that joins"
                logger.warning("the trainers restart with %s", size)
                if self._handler.is_whole:
                    # Trainers that nothing is wrong with commit the step that they are in: none is
                    # lost.
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
                    self._end_if_replaced(ask=True)
                    return failures
            self._start_round()

    def _end_if_replaced(self, *, ask: bool = False) -> None:
        """Raises FencedError where the job goes on without this node, by the last heartbeat, or the
        store."""
        if self._handler.is_leaving:
            return  # it is a spare until the others need it no more
        mine, newest = self._handler.incarnation, self._handler.newest_incarnation
        if ask:
            with suppress(StoreError):
                newest = self._handler.incarnations.read()
        if newest > mine > 0:
            raise replaced(mine, newest, by_another=self._handler.is_full)
        if why := self._launcher.fenced():
            raise FencedError(why)

    def _may_restart(self) -> bool:
        """Judge the failure of this round's trainers; whether another round is worth it."""
        self._end_if_peers_were_stopped()
        failure = self.failure or TrainerFailure(
            ExitCause.OWN, 0, 1, "the trainers can no longer be watched"
        )
        alone = self.agreement is not None and len(self.agreement.members) == 1
        if failure.cause in (ExitCause.UNCLEAR, ExitCause.STOPPED) and alone:
            failure = replace(failure, cause=ExitCause.OWN)
        if failure.cause in (ExitCause.PEER, ExitCause.STOPPED) and not self._is_free():
            failure = replace(
                failure,
                cause=ExitCause.OWN,
                reason=f"{failure.reason} (after {self._options.free_restarts} free restarts "
                "without "
                "progress)",
            )
        if failure.cause is ExitCause.SIZE:
            with suppress(RendezvousError, StoreError):  # else it is refused once more
                if not self._handler.refuse_size():
                    failure = replace(failure, cause=ExitCause.REFUSED)
        self.failure = failure
        told = failure.reason
        if not failure.ended_early:
            told = f"rank {self._rank(failure.local_rank)}, {told}"
        info = self._handler.info = replace(self._handler.info, cause=failure.cause, failure=told)
        if failure.cause is ExitCause.REFUSED:
            logger.error("%s: the job ends; a restart would be refused again", failure.reason)
            return False
        if self._ends_early_again(failure):
            logger.error("%s: the job ends", _twice(failure))
            return False
        starts = self._options.restarts_renew and self._launcher.newest_step() < 0
        if starts and failure.cause is ExitCause.OWN and failure.exit_code < _KILLED:
            if failure.reason == self._start_error:
                logger.error(
                    "%s: the same error twice, and no version was committed: the job ends",
                    failure.reason,
                )
                return False
            self._start_error = failure.reason
        used = 0 if self._options.restarts_renew and self._has_new_version() else info.restarts_used
        allowed = self._config.max_restarts
        since = " since the last new version" if self._options.restarts_renew else ""
        if failure.cause is ExitCause.OWN and used >= allowed:
            logger.error(
                "%s; restarts used%s: %d of %d (--max-restarts): the job ends",
                *(failure.reason, since, used, allowed),
            )
            return False
        price = {
            ExitCause.OWN: f"uses restart {used + 1} of {allowed}{since}",
            ExitCause.UNCLEAR: "the other nodes decide whether this uses a restart",
            ExitCause.SIZE: "another number of nodes may fit: uses no restart",
        }.get(failure.cause, "a peer vanished: uses no restart")
        logger.warning("trainers ended: %s; %s", failure.reason, price)
        return True

    def _note_ended_early(self) -> None:
        """Report this node's trainers that have ended well while their peers need another round;
        what the peers report decides whether that is the fault. Raises JobEndedError: the same as
        in the round before.
        """
        # Where a node is lost, its peers need another round for that reason.
        ended = self._ended_well() if self._handler.is_whole else {}
        failure = name_ended_early(TrainerFailure(ExitCause.PEER, 0, 1, ""), ended)
        if not failure.ended_early:
            return
        if self._ends_early_again(failure):
            raise JobEndedError(_twice(failure))
        self._handler.info = replace(
            self._handler.info, cause=ExitCause.ENDED, failure=failure.reason
        )

    def _ends_early_again(self, failure: TrainerFailure) -> bool:
        """Whether a rank has ended well before the others at the same step as in the round before,
        and no version was committed in between: the next round would end in the same way."""
        before = self._early_end
        self._early_end = failure.reason if failure.ended_early else ""
        same = failure.ended_early and failure.reason == before
        return same and self._options.restarts_renew and not self._has_new_version()

    def _has_new_version(self) -> bool:
        return self._launcher.newest_step() > self._handler.info.known_step

    def _is_free(self) -> bool:
        progressed = self._has_new_version() or time.monotonic() - self._started_at > _PROGRESS_SECS
        self._without_progress = 1 if progressed else self._without_progress + 1
        return self._without_progress <= self._options.free_restarts

    def _nodes_waiting(self) -> bool:
        try:
            waiting = self._handler.num_nodes_waiting() > 0
        except RendezvousConnectionError as error:
            if not self._store_lost:
                logger.warning(
                    "the rendezvous store no longer answers. Training goes on; without the store "
                    "no node "
                    "can be replaced, and a restart waits until it answers (%s)",
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
        """End what is left of the last round, join the next, and start its trainers."""
        self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        self._trainers.forget()
        self._launcher.state_changed("waiting for nodes")
        for attempt in range(1, _FORM_ATTEMPTS + 1):
            if self._store_lost:
                self._place.reconnect()
                self._note_store_is_back()
            try:
                agreement = self._join()
                break
            except (
                RendezvousClosedError,
                RendezvousGracefulExitError,
                RendezvousTimeoutError,
                FencedError,
            ):
                raise
            except DuplicateNodeError as error:
                if self._handler.is_refused or attempt == _FORM_ATTEMPTS:
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
        self.agreement = agreement
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
        self._launcher.workers_started(pids)
        self._launcher.state_changed("running", round=agreement.round)

    def _join(self) -> Agreement:
        """Bring what this node knows of the job into a round, and say where its trainers meet."""
        handler, launcher = self._handler, self._launcher
        known = handler.info.incarnation, launcher.newest_incarnation(), handler.incarnations.read()
        handler.info = replace(
            handler.info, newest_step=launcher.newest_step(), incarnation=max(known)
        )
        agreement = handler.next_rendezvous()
        if agreement.refused:
            raise DuplicateNodeError(agreement.nodes[agreement.members.index(agreement.refused[0])])
        self._group_rank = agreement.members.index(handler.node)
        self._close_trainer_store()
        self._trainer_store = TrainerStore.open(
            handler.table,
            self._secret,
            self._group_rank,
            len(agreement.members),
            self._config.local_addr,
            incarnation=agreement.incarnation,
        )
        handler.incarnations.raise_to(agreement.incarnation)
        return agreement

    # -- trainers ----------------------------------------------------------------------------------

    def _poll(self) -> dict[int, ProcessFailure] | None:
        """What has become of the trainers, as :meth:`run` tells it; None: they run. Where one has
        failed, or hangs, the others are ended, and the failure is judged."""
        exits, hangs = self._trainers.failures(), self._launcher.hangs
        if exits:
            self._launcher.failure_seen()
            exits = self._trainers.once_clear(exits)
            self.failure = self._judge(exits)
            self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        elif self.agreement is not None and not self.told_to_stop:
            mine, silent = hangs.look(self._trainers.running()), self._handler.is_left_by_silent
            size = len(self.agreement.members)
            hang = hangs.judge(mine, self._handler.table, self._group_rank, size, silent=silent)
            if hang is not None:
                self._launcher.failure_seen()
                self.failure = name_ended_early(hang, self._ended_well())
                self._trainers.end(signal.SIGKILL, self._options.stop_secs)
        failures = self._trainers.ended()
        if failures and not exits and self.failure is None:
            # It failed between the two looks; those that TorchElastic ended show its signal.
            seen = self._trainers.failures()
            exits = {r: e for r, e in seen.items() if e.exit_code != -signal.SIGTERM} or seen
            self.failure = self._judge(exits) if exits else None
        if not failures:
            return failures
        # Those that the agent ended itself did not fail.
        kept = {
            local_rank: f for local_rank, f in failures.items() if local_rank in exits
        } or failures
        return {self._rank(local_rank): failure for local_rank, failure in kept.items()}

    def _judge(self, exits: dict[int, WorkerExit]) -> TrainerFailure:
        failure = judge(exits)
        if self._trainers.script_has_ended(failure.local_rank):
            return failure  # it no longer needed the others
        return name_ended_early(failure, self._ended_well())

    def _ended_well(self) -> dict[int, str]:
        """This node's trainers that have ended well, by global rank."""
        return {
            self._rank(local_rank): said for local_rank, said in self._trainers.ended_well().items()
        }

    def _rank(self, local_rank: int) -> int:
        assert self.agreement is not None
        return deal_ranks(self.agreement.workers, self.agreement.turn)[self._group_rank][local_rank]

    # -- the end -----------------------------------------------------------------------------------

    def _end_if_peers_were_stopped(self) -> None:
        """Raises SignalException where other launchers were told to stop, without which it cannot
        go on."""
        with suppress(RuntimeError, RendezvousError):
            self._handler.is_closed()  # looks at the store
        stopped = self._handler.stopped
        if stopped and not self._handler.goes_on_without(len(stopped)):
            node, number = next(iter(stopped.items()))
            sent = signal.Signals(number)
            raise SignalException(
                f"node {node} was stopped by {sent.name}, and no other node replaces it",
                sigval=sent,
            )

    def _exit_barrier(self) -> None:
        """Wait until all trainers have ended well, or a node wants another round."""
        deadline = time.monotonic() + _EXIT_BARRIER_SECS
        try:
            while not self._handler.all_ended_well:
                if time.monotonic() > deadline or self._nodes_waiting():
                    return
                # once more where the store has lost it
                self._handler.tell(NodeFinished(self._handler.node))
                self._end_if_peers_were_stopped()
                time.sleep(max(0.1, self._config.monitor_interval))
            self.all_ended_well = True
        except (RuntimeError, RendezvousError) as error:
            logger.warning("cannot ask whether all nodes ended well: %s", _first_line(error))

    def _close_trainer_store(self) -> None:
        if self._trainer_store is not None:
            self._trainer_store.close()
            self._trainer_store = None

    def wait_no_more(self) -> None:
        self._trainers.hurry = True

    def close(self) -> None:
        self._close_trainer_store()
        self._trainers.close()


def _twice(failure: TrainerFailure) -> str:
    return (
        f"{failure.reason}, twice and without a new version in between. Give all ranks the same "
        "number of "
        "steps: a DataLoader with drop_last=True and a DistributedSampler, or reft.data.loader"
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Trainers:
    """The trainers of a node, in one round at a time; in ``exits_dir`` they may leave why they
    ended."""

    def __init__(self, options: LaunchOptions, exits_dir: Path) -> None:
        self._options = options
        self._root = Path(tempfile.mkdtemp(prefix=EXITS_PREFIX, dir=exits_dir))
        self._notes = self._root
        self._context: Any = None
        self._ended_groups: set[int] = set()
        self.hurry = False  # They are waited for no more

    def start(self, agreement: Agreement, group_rank: int, port: int) -> list[int]:
        """Start those of a round as torchrun does, whose options count; ``port``: of their store
        here."""
        self._note_exits_of(agreement.round)
        config: Any = self._options.config
        ranks = deal_ranks(agreement.workers, agreement.turn)[group_rank]
        node, local_size, world_size = (
            (group_rank, len(agreement.members)),
            len(ranks),
            sum(agreement.workers),
        )
        # The number of restarts is the same on all nodes: older versions of torch make it part of
        # the keys under which trainers find each other.
        restarts = agreement.round - 1, config.max_restarts
        shared = {
            "ROLE_NAME": config.role,
            "TORCHELASTIC_RUN_ID": config.run_id,
            ENV_EXIT_DIR: str(self._notes),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        envs = {
            i: shared | trainer_environ((rank, world_size), (i, local_size), node, port, restarts)
            for i, rank in enumerate(ranks)
        }
        if getattr(config, "virtual_local_rank", False):
            for i, env in envs.items():
                devices = os.environ.get(
                    "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local_size)))
                )
                env.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=devices.split(",")[i].strip())
        prefix = config.log_line_prefix_template
        names = [
            {"role_name": config.role, "rank": rank, "local_rank": i}
            for i, rank in enumerate(ranks)
        ]
        accepted = inspect.signature(start_processes).parameters
        wanted = ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
        self._context = start_processes(
            name=config.role,
            entrypoint=self._options.entrypoint,
            args={i: tuple(macros.substitute(list(self._options.arguments), str(i))) for i in envs},
            envs=envs,
            logs_specs=config.logs_specs,
            log_line_prefixes=(
                {n["local_rank"]: Template(prefix).safe_substitute(n) for n in names}
                if prefix
                else None
            ),
            **{n: getattr(config, n) for n in wanted if n in accepted and hasattr(config, n)},
        )
        return [int(pid) for pid in self._context.pids().values()]

    def _note_exits_of(self, number: int) -> None:
        if self._notes != self._root:
            shutil.rmtree(self._notes, ignore_errors=True)
        self._notes = self._root / str(number)
        try:
            # The directory of all rounds is gone where somebody has removed the job's memory.
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._notes.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("trainers cannot record why they end: %s", error)
        self._ended_groups.clear()

    def ended(self) -> dict[int, ProcessFailure] | None:
        """Those that have failed, by local rank, and none where all have ended well; None: they
        run."""
        result = self._context.wait(0)
        failures: dict[int, ProcessFailure] = {} if result is None else result.failures
        return None if result is None else failures

    def forget(self) -> None:
        if self._context is not None:
            self._context.close(signal.SIGKILL, _CLOSE_SECS)

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._context, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def running(self) -> list[int]:
        return [process.pid for process in self._processes().values() if process.poll() is None]

    def failures(self) -> dict[int, WorkerExit]:
        """Those that have failed, or say that they do, by local rank."""
        found = {}
        for local_rank, process in self._processes().items():
            code = process.poll()
            # After its script has ended well, a trainer may still fail.
            note = None if self.script_has_ended(local_rank) else self._note_of(local_rank)
            if code not in (None, 0) or (note is not None and code is None):
                found[local_rank] = WorkerExit(code, note)
        return found

    def ended_well(self) -> dict[int, str]:
        """Those that have ended well, or whose script has, by local rank: with which code, at which
        step."""
        found = {}
        for local_rank, process in self._processes().items():
            code, note = process.poll(), self._note_of(local_rank)
            if code in (None, 0) and note is not None and note.cause is ExitCause.ENDED:
                found[local_rank] = note.error
            elif code == 0:
                found[local_rank] = "exit code 0"
        return found

    def script_has_ended(self, local_rank: int) -> bool:
        note = self._note_of(local_rank)
        return note is not None and note.cause is ExitCause.ENDED

    def _note_of(self, local_rank: int) -> ExitNote | None:
        return ExitNote.read(self._notes, local_rank)

    def once_clear(self, failures: dict[int, WorkerExit]) -> dict[int, WorkerExit]:
        """The same a moment later, once it is clear whose fault it was: all have failed, or one by
        its own cause."""
        deadline = time.monotonic() + _ONE_AFTER_THE_OTHER_SECS
        while failures and time.monotonic() < deadline:
            ended = [f for f in failures.values() if f.exit_code is not None]
            if len(ended) + len(self.ended_well()) == len(self._processes()) or any(
                f.cause in _OWN_CAUSES for f in ended
            ):
                break
            time.sleep(0.02)
            failures = self.failures()
        return failures

    def end(self, number: int, timeout_secs: float) -> None:
        """Signal them, wait, and kill what is left of their process groups, once.

        A trainer that handles the signal is signalled alone: it finishes its step, for which it
        needs its DataLoader's workers. Any other, as a shell that runs the trainer, is signalled
        with its group."""
        processes = [p for p in self._processes().values() if p.pid not in self._ended_groups]
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    (os.kill if _handles(process.pid, number) else os.killpg)(process.pid, number)
        deadline = time.monotonic() + timeout_secs
        while any(p.poll() is None for p in processes):
            if time.monotonic() > deadline or self.hurry:
                break
            time.sleep(0.05)
        for process in processes:
            # Also where the trainer has ended: its own children may not have.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Its number may be another group's from now on.
            self._ended_groups.add(process.pid)
        if any(process.poll() != 0 for process in processes):
            self._end_descendants()

    def _end_descendants(self) -> None:
        """Kill what failed trainers have started in sessions of their own: it may hold ports and
        devices that the next trainers need. The environment tells whose it is, also after its
        parent has ended."""
        marker, found = f"{ENV_EXIT_DIR}={self._notes}\0".encode(), []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            pid = int(entry.parent.name)
            with suppress(OSError):  # of another user, or ended meanwhile
                if marker in entry.read_bytes() and os.getpgid(pid) not in self._ended_groups:
                    name = entry.with_name("comm").read_text().strip()
                    os.kill(pid, signal.SIGKILL)
                    found.append(f"{pid} {name}")
        if found:
            logger.warning(
                "ended %d %s that failed trainers had left in sessions of their own (%s)",
                *(
                    len(found),
                    "process" if len(found) == 1 else "processes",
                    ", ".join(found[:_MOST_NAMED]),
                ),
            )

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _handles(pid: int, number: int) -> bool:
    try:
        fields = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, ValueError, KeyError):
        return False
