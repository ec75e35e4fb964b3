"""``reft launch``: torchrun's options, one daemon per node, and any node may die.

The training script runs through :mod:`reft.job.script`, so that it needs no change.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousTimeoutError,
)

from reft.config import parse_block
from reft.engine.on_import import warn_abandoned_builds
from reft.env import ENV_CONFIG, ENV_DRY_RUN, ENV_INCARNATION, ENV_NODES, ENV_ROUND, ENV_STORE
from reft.errors import AuthenticationError, ConfigError, FencedError, ReftError
from reft.job.agent import Agent
from reft.job.daemon_supervisor import DaemonSupervisor
from reft.job.hosts import show_devices
from reft.job.node_memory import NodeMemory
from reft.job.options import LaunchOptions, find_warnings, parse_options
from reft.job.rendezvous.client import JobEndedError, find_store
from reft.job.rendezvous.handler import LeftError, StoreRendezvous
from reft.job.rendezvous.membership import Agreement
from reft.job.rendezvous.scaling import Scaler
from reft.job.script import (
    EX_FENCED,
    EX_PEER_FAILED,
    STOP_SIGNALS,
    ExitCause,
    TrainerFailure,
    not_ignored,
)
from reft.job.warm import ForkServer
from reft.log import EventLog, set_place, to_stderr
from reft.memory.job_secret import user_secret
from reft.memory.jobdir import CONFIG_FILE, read_json
from reft.naming import kernel_id
from reft.node.commit_watch import CommitWatch
from reft.node.hangs import (
    STOPPED,
    WAITING,
    ActivityTracker,
    TrainerActivity,
    name_culprit,
    step_limit_secs,
)
from reft.node.history import ENDED, STARTED, note
from reft.node.job_status import JobStatus
from reft.node.progress import STACKS_SUFFIX, read_pages
from reft.node.report import ENDED_WELL, NodeReport
from reft.storage.persisted import job_directory

logger = logging.getLogger("reft.job.launch")

_GRACE_MARGIN_SECS = 5.0
_LEAST_FLUSH_SECS = 1.0
LEAVE_SIGNAL = signal.SIGUSR1
_IMPATIENT_SECS = 1.0
_TORCHS_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # TorchElastic's default


class StopSignals:
    """Turns the first signal to stop into TorchElastic's exception; later ones do not disturb the
    end, but a second Ctrl-C by a person cuts the grace short. ``received``: the signal to stop;
    None: there was none. ``asked_to_leave``: SIGUSR1 asks for this node to leave the job; whoever
    has seen to it resets it."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        # Looked up once: TorchElastic sets handlers of its own whenever it starts trainers.
        self._handled = not_ignored(STOP_SIGNALS)
        self.received: signal.Signals | None = None
        self.asked_to_leave = False
        self._at = 0.0
        # the launcher tidies up from here on, which is bounded and not interrupted
        self.quiet = False

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle if number in self._handled else signal.SIG_IGN)
        signal.signal(LEAVE_SIGNAL, self._ask_to_leave)

    def handled_names(self, names: str) -> str:
        """Remove ignored signals from ``names``, which are separated by commas: if TorchElastic
        handles one while it starts trainers, they do not inherit that it is ignored."""
        ignored = {number.name for number in STOP_SIGNALS if number not in self._handled}
        return ",".join(name for name in names.split(",") if name.strip() not in ignored)

    def elapsed_secs(self) -> float:
        return time.monotonic() - self._at if self.received is not None else 0.0

    def ignore(self) -> None:
        """The exit code stands: the interpreter would restore the default actions while it ends."""
        for number in (*STOP_SIGNALS, LEAVE_SIGNAL):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None or self.quiet:
            if (
                number == signal.SIGINT
                and now - self._at > _IMPATIENT_SECS
                and self.agent is not None
            ):
                self.agent.wait_no_more()
            return
        self.received, self._at = signal.Signals(number), now
        if self.agent is not None:
            self.agent.told_to_stop = True
        raise SignalException(f"stopped by {self.received.name}", sigval=self.received)

    def _ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_leave = True


class JobEnd(Enum):
    UNFINISHED = auto()  # Told to stop, or the job has failed: it may be started again
    WELL = auto()
    LEFT = auto()  # It was told to leave, and the others have a version without it
    REPLACED = auto()  # It was cut off, and the job went on without it


_WHY = {JobEnd.WELL: ENDED_WELL, JobEnd.LEFT: "it has left, as requested"}


class Launcher:
    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._secret = user_secret()
        self._memory = NodeMemory(options.memory_dir, options.job_id, options.node)
        self.place = find_store(options, self._secret)
        self.rendezvous: StoreRendezvous  # Once it has joined the place
        self._events = EventLog(-1)
        self._signals = StopSignals()
        self._daemon: DaemonSupervisor | None = None
        self.hangs = HangDetector(options.node, self._memory.path)
        self._agent: Agent | None = None
        self._warm: ForkServer | None = None
        # What fails as one with this node: itself if somebody declared it to be one, else its host
        # (P4).
        host = f"host {socket.gethostname()} {kernel_id()[:8]}"
        domain = options.node if options.node_declared else host
        self._board = JobStatus(
            self.place.connect_for_status,
            NodeReport(node=options.node, domain=domain),
            self._memory.path,
            job_id=options.job_id,
            has_daemon=options.daemon,
        )
        self._end = JobEnd.UNFINISHED
        self._scaler: Scaler | None = None
        self._before: Agreement | None = None
        self._failed_at: float | None = None
        self._over_at: float | None = None

    # -- what the agent tells and asks -------------------------------------------------------------

    def round_formed(self, agreement: Agreement) -> None:
        self._memory.make_again(self._secret)
        os.environ.update(
            {
                ENV_STORE: self.place.trainers_endpoint(),
                ENV_ROUND: str(agreement.round),
                ENV_INCARNATION: str(agreement.incarnation),
                ENV_NODES: f"{self._options.config.min_nodes}:{self._options.config.max_nodes}",
            }
        )
        if self._options.daemon and self._daemon is None:
            assert self._memory.job_dir is not None
            self._daemon = DaemonSupervisor(self._memory.job_dir)
            self._daemon.start()
        if self._daemon is not None:
            self._daemon.incarnation = agreement.incarnation
        logger.info(
            "round %d, start %d of the job: %d trainers on %s; restarts used: %d of %d",
            agreement.round,
            agreement.incarnation,
            sum(agreement.workers),
            ", ".join(agreement.nodes),
            agreement.restarts_used,
            self._options.config.max_restarts,
        )
        self._events.write(
            "round",
            node=self._options.node,
            round=agreement.round,
            nodes=list(agreement.nodes),
            restarts_used=agreement.restarts_used,
        )
        # At a restart too: a trainer may have been killed while it built.
        warn_abandoned_builds()
        self._note_start(agreement)

    def _note_start(self, agreement: Agreement) -> None:
        """Note in the history what this round follows, as far as this node has seen it."""
        before = self._before or agreement
        ranks = self.rendezvous.left
        gone = before.nodes_without(agreement.members)
        left = tuple(n for rank, n in enumerate(before.nodes) if rank in ranks and n in gone)
        lost = tuple(n for n in gone if n not in left)
        note(
            self._memory.path,
            STARTED,
            round=agreement.round,
            nodes=agreement.nodes,
            failures=agreement.failures,
            lost=lost,
            left=left,
            joined=agreement.nodes_without(before.members),
            newest_step=agreement.known_step,
            gathering_secs=_between(self._over_at, time.time()),
            ending_secs=_between(self._failed_at, self._over_at),
            failed_unix_secs=self._failed_at,
        )
        self._before, self._over_at, self._failed_at = agreement, None, None

    def failure_seen(self) -> None:
        """A trainer of this node has failed; the others are still to be ended."""
        if self._failed_at is None:
            self._board.tell("a trainer has failed", failed="a trainer has failed")
        self._failed_at = self._failed_at or time.time()

    def round_over(self) -> None:
        self._over_at = time.time()
        # So long the next round waits for others in the place of lost nodes, as the job's block
        # says.
        told = (read_json(self._memory.path / CONFIG_FILE) or {}).get("elastic", {})
        self.rendezvous.wait_secs = told.get("wait_secs")

    def workers_started(self, pids: list[int]) -> None:
        self.hangs.clear()
        # TorchElastic has just set its own handlers.
        self._signals.install()
        if self._daemon is not None:
            self._daemon.workers = tuple(pids)

    def trainers_run(self, group_rank: int) -> None:
        """The agent has looked at the trainers, and all is well. ``group_rank``: of this node."""
        if self._scaler is not None and self._before is not None:
            self._scaler.look(self._before, group_rank)

    def state_changed(self, state: str, **facts: Any) -> None:
        failure = self._agent.failure if self._agent is not None else None
        own = failure is not None and failure.cause is not ExitCause.PEER
        self._board.tell(
            state, round=facts.get("round"), failed=failure.reason if failure and own else ""
        )
        self._events.write("launcher", node=self._options.node, state=state, **facts)

    def newest_step(self) -> int:
        """Step of the newest committed version; -1 if none is known of."""
        if self._memory.job_dir is None:
            return -1
        try:
            newest = CommitWatch(self._memory.job_dir).newest()
        except OSError as error:
            logger.warning("the versions in %s cannot be read: %s", self._memory.path, error)
            newest = None
        return -1 if newest is None else newest.step

    def newest_incarnation(self) -> int:
        """Number of the newest start of the job that this node knows of; 0 if there was none."""
        try:
            return 0 if self._memory.job_dir is None else self._memory.job_dir.newest_incarnation()
        except (OSError, ReftError) as error:
            logger.warning("the starts recorded in %s cannot be read: %s", self._memory.path, error)
            return 0

    def fenced(self) -> str:
        """Why this node has to end, as shared storage told its daemon; empty if it goes on."""
        return "" if self._daemon is None else self._daemon.fenced

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> int:
        self._signals.install()
        try:
            self._memory.prepare(self._secret)
            return self._run()
        except SignalException as stop:
            logger.warning("%s; the trainers have ended", stop)
            self.place.wait_for_others()
            return 128 + int(stop.sigval)
        except FencedError as error:
            self._end = JobEnd.REPLACED
            note(self._memory.path, ENDED, reason=str(error))
            if self.rendezvous.outcome() == ENDED_WELL:
                self._end = JobEnd.WELL
                return 0
            logger.error("%s (exit code %d)", error, EX_FENCED)
            return EX_FENCED
        except LeftError as left:
            self._end = JobEnd.LEFT
            note(self._memory.path, ENDED, reason=str(left))
            logger.warning("%s (exit code 0)", left)
            if self._scaler is not None:
                self._scaler.left()
            return 0
        except JobEndedError as error:
            note(self._memory.path, ENDED, reason=str(error))
            raise
        finally:
            self._signals.quiet = True
            self._tidy_up()
            self._signals.ignore()

    def _run(self) -> int:
        options = self._options
        node = self._memory.environ(self._secret, os.getpid(), declared=options.node_declared)
        os.environ.update({**node, ENV_DRY_RUN: str(int(options.dry_run))})
        if options.block_file is not None:
            os.environ[ENV_CONFIG] = str(options.block_file)
        if options.devices is not None:
            show_devices(options.devices, os.environ)
        if options.warm:
            # The last is what TorchElastic gives its trainers.
            shared = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
            self._warm = ForkServer(options.preload, shared)
        handler = self.rendezvous = self.place.join()
        self._board.start(
            lambda: handler.is_spare, lambda: handler.nodes, lambda: self.hangs.waiting
        )
        names = getattr(options.config, "signals_to_handle", _TORCHS_SIGNALS)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self._signals.handled_names(names)
        agent = self._agent = Agent(
            options,
            place=self.place,
            handler=handler,
            secret=self._secret,
            launcher=self,
            exits_dir=self._memory.path,
            grace_secs=lambda: self._grace_secs() + _GRACE_MARGIN_SECS,
        )
        self._scaler = Scaler(handler, options, self._memory.path, self._board, self._signals)
        self._signals.agent = agent
        try:
            return self.judge(agent, agent.run())
        except RendezvousTimeoutError as error:
            least, most, fitting = (
                options.config.min_nodes,
                options.config.max_nodes,
                handler.fitting,
            )
            wanted = str(least)
            if fitting and not set(range(least, most + 1)) <= set(fitting):
                said = ", ".join(map(str, fitting))
                wanted = f"{said} (of --nnodes {least}:{most}, what the layout and the batch allow)"
            message = (
                f"{wanted} nodes did not join in "
                f"{options.join_timeout_secs:.0f} s: no node replaced a missing one. Start `reft "
                "launch` "
                "on another node in time, or wait longer with --rdzv-conf join_timeout=SECS. Only "
                "nodes "
                f"with one run id meet, here {options.config.run_id!r}; without --rdzv-id it is "
                "made of "
                "user, directory, program and arguments"
            )
            if disagree := handler.describe_other_nnodes():
                message = f"too few nodes joined in {options.join_timeout_secs:.0f} s: {disagree}"
            if handler.incarnation:  # it has taken part; else others may train, or wait longer
                self.rendezvous.shutdown(message)
            raise JobEndedError(message) from error
        except RendezvousClosedError as error:
            outcome = self.rendezvous.outcome() or "the job ended on another node"
            if outcome == ENDED_WELL and agent.agreement is not None:
                # This node was cut off, and the job went on to its end with another in its place.
                self._end = JobEnd.WELL
                return 0
            raise JobEndedError(
                f"the rendezvous of run {options.config.run_id!r} is closed: {outcome}. To start "
                "the job "
                f"again, take a new --rdzv-id, and --job-id {options.job_id} to find its memory, "
                "or "
                f"{self.place.reopens}"
            ) from error
        except JobEndedError as error:
            self.rendezvous.shutdown(str(error))
            raise

    def judge(self, agent: Agent, failures: dict[int, ProcessFailure] | None) -> int:
        """What the end of this node's trainers means for the job (:meth:`Agent.run`); the exit
        code."""
        if failures is None:
            if self.rendezvous.outcome() == ENDED_WELL:
                self._end = JobEnd.WELL
            return 0
        if not failures:
            if agent.all_ended_well:
                self._end = JobEnd.WELL
                if not self._options.keep_memory:
                    self.rendezvous.incarnations.forget_committed()
            self.rendezvous.shutdown(ENDED_WELL)
            if agent.all_ended_well:
                self.place.wait_for_others()
            else:
                logger.warning(
                    "this node's trainers ended well, but not all nodes reported so; memory is kept"
                )
            return 0
        failure = agent.failure
        reason = failure.reason if failure else "the trainers failed"
        self.rendezvous.shutdown(f"node {self._options.node} gave up: {reason}")
        note(self._memory.path, ENDED, reason=reason)
        if failure is None or failure.cause is not ExitCause.REFUSED:  # that has been told in words
            words = (a for a in self._options.arguments if not a.startswith("-"))
            name = next(words, self._options.entrypoint)
            logger.error("%s", ChildFailedError(name, failures))
        return failure.exit_code if failure else 1

    def _grace_secs(self) -> float:
        """What the command line says, else the job's own ``reft`` block, which the daemon was
        told."""
        if self._options.grace_secs is not None:
            return self._options.grace_secs
        told = read_json(self._memory.path / CONFIG_FILE) or {}
        return float(told.get("grace_secs", parse_block({}).grace_secs))

    def _tidy_up(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._board.close(_WHY.get(self._end, "it was stopped, or the job has failed"))
        self.place.close()
        if self._warm is not None:
            self._warm.close()
        if self._daemon is not None:
            # To write the newest version it has what the trainers left of the grace.
            left_secs = max(_LEAST_FLUSH_SECS, self._grace_secs() - self._signals.elapsed_secs())
            persist = parse_block(read_json(self._memory.path / CONFIG_FILE) or {}).persist
            stops = self._end is JobEnd.UNFINISHED and self._signals.received is not None
            exports = persist.export_at_end is not None and (stops or self._end is JobEnd.WELL)
            # The last version is taken when the script ends; its memory is removed next.
            stores = exports or (persist.dir is not None and self._end is JobEnd.WELL)
            if stores and not stops:
                left_secs = persist.timeout_secs
            self._daemon.end(left_secs if stores or self._end is JobEnd.UNFINISHED else 0.0)
            if exports and self._agent is not None and self._agent.leads:
                assert persist.dir is not None
                stored = job_directory(persist.dir, self._options.job_id)
                words = ["persist", "--from", stored, "--out", persist.export_at_end]
                subprocess.run(
                    [sys.executable, "-P", "-m", "reft.cli", *map(str, words)], check=False
                )
        if self._end in (JobEnd.WELL, JobEnd.LEFT) and not self._options.keep_memory:
            logs = self._options.config.logs_specs
            self._memory.remove(None if logs is None else Path(logs.root_log_dir))
        elif self._agent is None or self._agent.agreement is None:
            self._memory.discard_unused()
        elif self._memory.job_dir is not None and self._memory.holds_versions():
            logger.warning(
                "the memory of job %s stays in %s", self._options.job_id, self._memory.path
            )
        elif not (self._options.keep_memory or self._end is JobEnd.REPLACED):
            self._memory.discard_unused()


def _between(began: float | None, ended: float | None) -> float | None:
    """Seconds, as a clock that may be set meanwhile tells them; None where one is not known."""
    return None if began is None or ended is None else max(0.0, ended - began)


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft launch``; returns the exit code: 0, the first failed trainer's or 1,
    128 + n only when told to stop by signal n, 2 for wrong use, 76 where another node has taken
    this one's place."""
    _log_to_stderr("", "launcher")
    try:
        options = parse_options(argv)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    return launch(options)


def launch(options: LaunchOptions) -> int:
    _log_to_stderr(options.job_id, f"launcher {options.node}")
    if options.script is not None and not options.script.exists():
        logger.error(
            "there is no script %s; write its path after the options, or -m for a module",
            options.script,
        )
        return 2
    for warning in find_warnings(options):
        logger.warning("%s", warning)
    try:
        return Launcher(options).run()
    except (ConfigError, AuthenticationError) as error:
        logger.error("%s", error)
        return 2
    except (ReftError, OSError) as error:
        logger.error("%s", error)
        return 1


def _log_to_stderr(job: str, who: str) -> None:
    set_place(job, who)
    to_stderr()
    # The agent says itself what a trainer ended of; TorchElastic would show the signal it was sent.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


# -- trainers that stand still: the other nodes are asked, the culprit is named --------------------

_ASK_SECS = 0.5
_COURTESY_SECS = 2.0  # the culprit's node ends its trainers first: it has their stacks written
# a node that was struck out and lives takes its place again with its next heartbeat
_SILENT_SECS = 2.0
_STACKS_SECS = 3.0
_MOST_STACK_CHARS = 16_000


class HangDetector:
    """Of one node's trainers, in one round at a time."""

    def __init__(self, node: str, job_dir: Path) -> None:
        self._node = node
        self._job_dir = job_dir
        self._watch = ActivityTracker()
        self.waiting: list[TrainerActivity] = []  # At what they were when they were looked at last
        self._looked_at = time.monotonic()
        self.clear()

    def clear(self) -> None:
        self._watch.clear()
        self.waiting = []
        self._told: bytes | None = None
        self._cannot_ask = False
        self._asked_at = 0.0
        self._open_since: float | None = None
        self._named_at: float | None = None
        self._silent_since: float | None = None

    def look(self, pids: Collection[int]) -> list[TrainerActivity]:
        """What those of these processes are at that have a page, for how long."""
        elapsed = time.monotonic() - self._looked_at
        if elapsed >= _ASK_SECS:
            self._looked_at += elapsed
            seen = [page for page in read_pages(self._job_dir) if page.pid in pids]
            self.waiting = [replace(w, node=self._node) for w in self._watch.poll(seen, elapsed)]
        return [w for w in self.waiting if w.seen.pid in pids]

    def judge(
        self,
        mine: list[TrainerActivity],
        table: Any,
        index: int,
        size: int,
        *,
        silent: bool = False,
    ) -> TrainerFailure | None:
        """Why the trainers have to be restarted; None: go on. Looks at the table of the round in
        the store only while one of them is quiet. ``mine``: at what they are. ``silent``: a node of
        this round was struck out for its silence, and the others may go on without it."""
        now = time.monotonic()
        self._silent_since = (self._silent_since or now) if silent else None
        # It waits for another node: it is quiet, and not at what may take its time alone.
        waits = any(w.suspected or (w.quiet and w.communicates) for w in mine)
        if self._silent_since is not None and now - self._silent_since > _SILENT_SECS and waits:
            reason = (
                "a node was removed because it is silent, and its peers wait for it; they "
                "continue without it"
            )
            logger.error("the job hangs: %s (%s)", reason, "; ".join(map(str, mine)))
            return TrainerFailure(ExitCause.PEER, mine[0].seen.local_rank, EX_PEER_FAILED, reason)
        quiet = any(w.quiet for w in mine)
        if (not quiet and self._told is None) or now - self._asked_at < _ASK_SECS:
            return None
        self._asked_at = now
        reports = self._exchange(table, index, size, mine if quiet else [])
        known = [w for report in reports.values() for w in report]
        # A node that has told, and tells of nobody now, goes on.
        verdict = name_culprit(known) if all(reports.values()) else None
        if verdict is None:
            self._open_since = self._named_at = None
            return None
        self._open_since = self._open_since or now
        # The trainers of nodes that have not told go on, as far as these know.
        limit = max(max(w.seen.hang_timeout_secs, step_limit_secs(w.seen)) for w in known)
        if len(reports) < size and now - self._open_since < limit:
            return None
        self._named_at = self._named_at or now
        own = [w for w in mine if w.seen.rank in verdict.ranks]
        if verdict.ranks and not own and now - self._named_at < _COURTESY_SECS:
            return None
        logger.error("the job hangs: %s", verdict.reason)
        for waiting in own or mine:
            logger.error("%s\n%s", waiting, stacks(self._job_dir, waiting))
        cause, code = (ExitCause.OWN, 1) if own else (ExitCause.PEER, EX_PEER_FAILED)
        return TrainerFailure(cause, (own or mine)[0].seen.local_rank, code, verdict.reason)

    def _exchange(
        self, table: Any, index: int, size: int, mine: list[TrainerActivity]
    ) -> dict[int, list[TrainerActivity]]:
        """Tell what this node's trainers are at, and hear of the others'; by number of the node."""
        reports = {index: mine}
        try:
            told = WAITING.dump_json(mine) if mine else None
            if told != self._told:
                table.set(f"hang/{index}", told or b"[]")
                self._told = told
            for other in range(size):
                if other != index and (report := table.peek(f"hang/{other}")) is not None:
                    reports[other] = WAITING.validate_json(report)
        except (ReftError, RuntimeError, OSError, ValueError) as error:
            if not self._cannot_ask:
                logger.warning("cannot ask other nodes what their trainers wait for: %s", error)
            self._cannot_ask = True
        return reports


def stacks(job_dir: Path, waiting: TrainerActivity) -> str:
    """Where a trainer's threads are, by itself if it runs; and what the kernel tells."""
    seen, told = waiting.seen, ""
    if seen.state == STOPPED:
        told = "a stopped process cannot write its stacks"
    elif seen.stack_signal:
        told = _read_trainer_stack(
            job_dir / f"{seen.local_rank}{STACKS_SUFFIX}", seen.pid, seen.stack_signal
        )
    return "\n".join(filter(None, (_read_kernel_stack(seen.pid), told)))


def _read_trainer_stack(path: Path, pid: int, number: int) -> str:
    try:
        before = told = path.read_bytes()
        os.kill(pid, number)
        deadline, written = time.monotonic() + _STACKS_SECS, False
        while not written and time.monotonic() < deadline:
            time.sleep(0.2)
            so_far, told = told, path.read_bytes()
            written = told == so_far != before
    except OSError as error:
        return f"its stacks cannot be read: {error}"
    text = told[len(before) :].decode(errors="replace").strip()
    return text[:_MOST_STACK_CHARS] or f"it has written no stacks in {_STACKS_SECS:.0f} s"


def _read_kernel_stack(pid: int) -> str:
    """Its state; where it waits in the kernel, as far as this user may see that."""
    told = []
    for name in ("status", "wchan", "stack"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            if name == "status":
                told += [
                    " ".join(line.split())
                    for line in text.splitlines()
                    if line.startswith("State:")
                ]
            elif text not in ("", "0"):
                told.append(f"{name}: {text}")
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
