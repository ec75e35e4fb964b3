"""``reft launch``: a replacement of torchrun with the same options, whose jobs survive lost nodes.

It also starts one daemon per node, which outlives the trainers. The training script runs through
:mod:`reft.job.script`, which installs reft's import hook, so the script needs no change.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousTimeoutError,
)

from reft.config import parse_block
from reft.engine.build_locks import warn_abandoned_builds
from reft.env import ENV_CONFIG, ENV_DRY_RUN, ENV_INCARNATION, ENV_NODES, ENV_ROUND, ENV_STORE
from reft.errors import AuthenticationError, ConfigError, FencedError, ReftError
from reft.job.agent import Agent
from reft.job.daemon_supervisor import DaemonSupervisor
from reft.job.hang_verdict import HangDetector
from reft.job.hosts import show_devices
from reft.job.node_memory import NodeMemory
from reft.job.options import LaunchOptions, check_memory_size, find_warnings, parse_options
from reft.job.rendezvous.backend import JobEndedError, find_backend
from reft.job.rendezvous.handler import LeftError, StoreRendezvous
from reft.job.rendezvous.membership import Agreement
from reft.job.rendezvous.scaling import Scaler
from reft.job.script import EX_FENCED, ExitCause
from reft.job.signals import StopSignals
from reft.job.warm import ForkServer
from reft.log import EventLog, set_place, to_stderr
from reft.memory.job_secret import user_secret
from reft.memory.jobdir import CONFIG_FILE, read_json
from reft.naming import kernel_id
from reft.node.commit_watch import CommitWatch
from reft.node.history import ENDED, STARTED, note
from reft.node.job_status import JobStatus
from reft.node.report import ENDED_WELL, NodeReport
from reft.storage.persisted import job_directory

logger = logging.getLogger("reft.job.launch")

_GRACE_MARGIN_SECS = 5.0
_MIN_FLUSH_SECS = 1.0
_TORCHS_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # TorchElastic's default


class JobEnd(Enum):
    """The way in which the job ended on this node; decides what happens to the job's memory."""

    UNFINISHED = auto()  # The job was stopped or has failed, and may be started again
    WELL = auto()  # All trainers exited without an error
    LEFT = auto()  # This node left on request, and the others have committed without it
    REPLACED = auto()  # This node was cut off from the others, which continued without it


_STATUS_AT_END = {JobEnd.WELL: ENDED_WELL, JobEnd.LEFT: "it has left, as requested"}


class Launcher:
    """One node's part of a job: its memory, daemon, status and agent, from start to end."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._secret = user_secret()
        self._memory = NodeMemory(options.memory_dir, options.job_id, options.node)
        self.backend = find_backend(options, self._secret)
        self.rendezvous: StoreRendezvous  # Set when the backend is connected
        self._events = EventLog(-1)
        self._signals = StopSignals()
        self._daemon: DaemonSupervisor | None = None
        self._hangs = HangDetector(options.node, self._memory.path)
        self._agent: Agent | None = None
        self._fork_server: ForkServer | None = None
        # P4: if the user gave the node an id, the node is a failure domain; otherwise its host is.
        host = f"host {socket.gethostname()} {kernel_id()[:8]}"
        domain = options.node if options.node_declared else host
        self._board = JobStatus(
            self.backend.connect_for_status,
            NodeReport(node=options.node, domain=domain),
            self._memory.path,
            job_id=options.job_id,
            has_daemon=options.daemon,
        )
        self._end = JobEnd.UNFINISHED
        self._scaler: Scaler | None = None
        self._last_round: Agreement | None = None
        self._failed_at: float | None = None  # Unix time at which this round's trainers failed
        self._round_ended_at: float | None = None  # Unix time at which the last round ended

    # -- callbacks of the agent --------------------------------------------------------------------

    def round_formed(self, agreement: Agreement) -> None:
        self._memory.make_again(self._secret)
        config = self._options.config
        os.environ[ENV_STORE] = self.backend.trainers_endpoint()
        os.environ[ENV_ROUND] = str(agreement.round)
        os.environ[ENV_INCARNATION] = str(agreement.incarnation)
        os.environ[ENV_NODES] = f"{config.min_nodes}:{config.max_nodes}"
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
            config.max_restarts,
        )
        self._events.write(
            "round",
            node=self._options.node,
            round=agreement.round,
            nodes=list(agreement.nodes),
            restarts_used=agreement.restarts_used,
        )
        # Checked at restarts, too: a trainer may have been killed while it compiled an operator.
        warn_abandoned_builds()
        self._note_start(agreement)

    def _note_start(self, agreement: Agreement) -> None:
        """Record in the job's history why this round follows the last one."""
        before = self._last_round or agreement
        gone = before.nodes_without(agreement.members)
        left = tuple(
            node
            for rank, node in enumerate(before.nodes)
            if rank in self.rendezvous.left and node in gone
        )
        note(
            self._memory.path,
            STARTED,
            round=agreement.round,
            nodes=agreement.nodes,
            failures=agreement.failures,
            lost=tuple(node for node in gone if node not in left),
            left=left,
            joined=agreement.nodes_without(before.members),
            newest_step=agreement.known_step,
            gathering_secs=_seconds_between(self._round_ended_at, time.time()),
            ending_secs=_seconds_between(self._failed_at, self._round_ended_at),
            failed_unix_secs=self._failed_at,
        )
        self._last_round = agreement
        self._round_ended_at = self._failed_at = None

    def trainers_started(self, pids: list[int]) -> None:
        if self._daemon is not None:
            self._daemon.workers = tuple(pids)

    def trainers_healthy(self, group_rank: int) -> None:
        if self._scaler is not None and self._last_round is not None:
            self._scaler.poll(self._last_round, group_rank)

    def failure_seen(self) -> None:
        if self._failed_at is None:
            self._board.report("a trainer has failed", failed="a trainer has failed")
            self._failed_at = time.time()

    def round_over(self) -> None:
        self._round_ended_at = time.time()
        # The job's `reft` block limits how long the next round waits for replacements of lost
        # nodes.
        elastic = (read_json(self._memory.path / CONFIG_FILE) or {}).get("elastic", {})
        self.rendezvous.wait_secs = elastic.get("wait_secs")

    def state_changed(self, state: str, **facts: Any) -> None:
        failure = self._agent.failure if self._agent is not None else None
        reason = ""
        if failure is not None and failure.cause is not ExitCause.PEER:
            reason = failure.reason
        self._board.report(state, round=facts.get("round"), failed=reason)
        self._events.write("launcher", node=self._options.node, state=state, **facts)

    def newest_step(self) -> int:
        if self._memory.job_dir is None:
            return -1
        try:
            newest = CommitWatch(self._memory.job_dir).newest()
        except OSError as error:
            logger.warning("the versions in %s cannot be read: %s", self._memory.path, error)
            return -1
        return -1 if newest is None else newest.step

    def newest_incarnation(self) -> int:
        if self._memory.job_dir is None:
            return 0
        try:
            return self._memory.job_dir.newest_incarnation()
        except (OSError, ReftError) as error:
            logger.warning("the starts recorded in %s cannot be read: %s", self._memory.path, error)
            return 0

    def fenced(self) -> str:
        return "" if self._daemon is None else self._daemon.fenced

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run this node's part of the job to its end.

        Returns:
            The exit code.

        Raises:
            JobEndedError: the job cannot continue.
        """
        self._signals.install()
        try:
            self._memory.prepare(self._secret)
            return self._run()
        except SignalException as stop:
            logger.warning("%s; the trainers have ended", stop)
            self._end_daemon()
            self.backend.wait_for_others()
            return 128 + int(stop.sigval)
        except FencedError as error:
            self._end = JobEnd.REPLACED
            note(self._memory.path, ENDED, reason=str(error))
            if self.rendezvous.outcome() == ENDED_WELL:
                self._end = JobEnd.WELL
                return 0
            logger.error("%s (exit code %d)", error, EX_FENCED)
            return EX_FENCED
        except LeftError as error:
            self._end = JobEnd.LEFT
            note(self._memory.path, ENDED, reason=str(error))
            logger.warning("%s (exit code 0)", error)
            if self._scaler is not None:
                self._scaler.left()
            return 0
        except JobEndedError as error:
            note(self._memory.path, ENDED, reason=str(error))
            raise
        finally:
            self._signals.closing = True
            self._shut_down()
            self._signals.ignore()

    def _run(self) -> int:
        options = self._options
        self._prepare_environment()
        if options.warm:
            # TorchElastic sets this variable for trainers. Set it for the fork server, too, so that
            # the modules that it imports see the same environment.
            shared = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
            self._fork_server = ForkServer(options.preload, shared)
        rendezvous = self.rendezvous = self.backend.join()
        self._board.start(
            lambda: rendezvous.is_spare, lambda: rendezvous.nodes, lambda: self._hangs.activities
        )
        agent = self._agent = Agent(
            options,
            backend=self.backend,
            rendezvous=rendezvous,
            secret=self._secret,
            launcher=self,
            signals=self._signals,
            hangs=self._hangs,
            exits_dir=self._memory.path,
            grace_secs=lambda: self._grace_secs() + _GRACE_MARGIN_SECS,
        )
        self._scaler = Scaler(rendezvous, options, self._memory.path, self._board, self._signals)
        try:
            return self.conclude(agent, agent.run())
        except RendezvousTimeoutError as error:
            message = self._describe_timeout()
            # A node that took part in no round must not close the run: others may be training.
            if rendezvous.incarnation:
                rendezvous.shutdown(message)
            raise JobEndedError(message) from error
        except RendezvousClosedError as error:
            outcome = rendezvous.outcome() or "the job ended on another node"
            if outcome == ENDED_WELL and agent.agreement is not None:
                # This node was cut off, and the job ended well with another node in its place.
                self._end = JobEnd.WELL
                return 0
            raise JobEndedError(
                f"the rendezvous of run {options.config.run_id!r} is closed: {outcome}. To start "
                f"the job again, take a new --rdzv-id, and --job-id {options.job_id} to find its "
                f"memory, or {self.backend.reopens}"
            ) from error
        except JobEndedError as error:
            rendezvous.shutdown(str(error))
            raise

    def _prepare_environment(self) -> None:
        """Set the variables that trainers inherit from this process."""
        options = self._options
        os.environ.update(
            self._memory.environ(self._secret, os.getpid(), declared=options.node_declared)
        )
        os.environ[ENV_DRY_RUN] = str(int(options.dry_run))
        if options.block_file is not None:
            os.environ[ENV_CONFIG] = str(options.block_file)
        if options.devices is not None:
            show_devices(options.devices, os.environ)
        names = getattr(options.config, "signals_to_handle", _TORCHS_SIGNALS)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self._signals.handled_names(names)

    def _describe_timeout(self) -> str:
        """Describe why no round formed in time."""
        options, rendezvous = self._options, self.rendezvous
        secs = options.join_timeout_secs
        if disagreement := rendezvous.describe_other_nnodes():
            return f"too few nodes joined in {secs:.0f} s: {disagreement}"
        min_nodes, max_nodes = options.config.min_nodes, options.config.max_nodes
        required = str(min_nodes)
        fitting = rendezvous.fitting
        if fitting and not set(range(min_nodes, max_nodes + 1)) <= set(fitting):
            numbers = ", ".join(map(str, fitting))
            allowed = f"of --nnodes {min_nodes}:{max_nodes}, what the layout and the batch allow"
            required = f"{numbers} ({allowed})"
        return (
            f"{required} nodes did not join in {secs:.0f} s: no node replaced a missing one. Start "
            "`reft launch` on another node in time, or wait longer with --rdzv-conf "
            f"join_timeout=SECS. Only nodes with one run id meet, here {options.config.run_id!r}; "
            "without --rdzv-id it is made of user, directory, program and arguments"
        )

    def conclude(self, agent: Agent, failures: dict[int, ProcessFailure] | None) -> int:
        """Decide what the exit of this node's trainers means for the job.

        Args:
            agent: agent of this node.
            failures: the result of :meth:`Agent.run`.

        Returns:
            The exit code of the launcher.
        """
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
                self._end_daemon()
                self.backend.wait_for_others()
            else:
                logger.warning(
                    "this node's trainers ended well, but not all nodes reported so; memory is kept"
                )
            return 0
        failure = agent.failure
        reason = failure.reason if failure else "the trainers failed"
        self.rendezvous.shutdown(f"node {self._options.node} gave up: {reason}")
        note(self._memory.path, ENDED, reason=reason)
        # If reft refused the job, the reason is already logged: omit TorchElastic's error table.
        if failure is None or failure.cause is not ExitCause.REFUSED:
            words = (a for a in self._options.arguments if not a.startswith("-"))
            name = next(words, self._options.entrypoint)
            logger.error("%s", ChildFailedError(name, failures))
        return failure.exit_code if failure else 1

    def _grace_secs(self) -> float:
        """Time in seconds that trainers get to commit and exit after a stop signal.

        It is taken from the command line, or else from the job's ``reft`` block.
        """
        if self._options.grace_secs is not None:
            return self._options.grace_secs
        # Trainers write their `reft` block into this file for the daemon.
        block = read_json(self._memory.path / CONFIG_FILE) or {}
        return float(block.get("grace_secs", parse_block({}).grace_secs))

    # -- the end -----------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        if self._agent is not None:
            self._agent.close()
        status = _STATUS_AT_END.get(self._end, "it was stopped, or the job has failed")
        self._board.close(status)
        self.backend.close()
        if self._fork_server is not None:
            self._fork_server.close()
        self._end_daemon()
        self._release_memory()

    def _end_daemon(self) -> None:
        """End the daemon. If storage lacks the newest version, let the daemon write it first.

        Daemons whose nodes have disks of their own meet in the rendezvous store meanwhile, which
        the launcher of one of the nodes may serve.
        """
        self._signals.closing = True
        daemon, self._daemon = self._daemon, None
        if daemon is None:
            return
        persist = parse_block(read_json(self._memory.path / CONFIG_FILE) or {}).persist
        ended_well = self._end is JobEnd.WELL
        was_stopped = self._end is JobEnd.UNFINISHED and self._signals.received is not None
        exports = persist.export_at_end is not None and not persist.local
        exports = exports and (was_stopped or ended_well)
        # When a script ends well, its last version exists in memory only, which is removed below:
        # the daemon must write it first.
        stores = exports or (persist.dir is not None and ended_well)
        if stores and not was_stopped:
            flush_secs = persist.timeout_secs
        elif stores or self._end is JobEnd.UNFINISHED:
            # The daemon gets the part of the grace period that the trainers did not use.
            left_secs = self._grace_secs() - self._signals.elapsed_secs()
            flush_secs = max(_MIN_FLUSH_SECS, left_secs)
        else:
            flush_secs = 0.0
        daemon.end(flush_secs)
        if exports and self._agent is not None and self._agent.leads:
            assert persist.dir is not None
            stored = job_directory(persist.dir, self._options.job_id)
            words = ["persist", "--from", stored, "--out", persist.export_at_end]
            command = [sys.executable, "-P", "-m", "reft.cli", *map(str, words)]
            subprocess.run(command, check=False)

    def _release_memory(self) -> None:
        """Remove the job's memory on this node; if a later start may need it, log where it is."""
        keep = self._options.keep_memory
        if self._end in (JobEnd.WELL, JobEnd.LEFT) and not keep:
            logs = self._options.config.logs_specs
            self._memory.remove(None if logs is None else Path(logs.root_log_dir))
        elif self._agent is None or self._agent.agreement is None:
            self._memory.discard_unused()
        elif self._memory.job_dir is not None and self._memory.holds_versions():
            logger.warning(
                "the memory of job %s stays in %s", self._options.job_id, self._memory.path
            )
        elif not keep and self._end is not JobEnd.REPLACED:
            self._memory.discard_unused()


def _seconds_between(start: float | None, end: float | None) -> float | None:
    """Return the seconds between two wall-clock times; None if one of the times is unknown.

    The result is never negative, although the clock may be set back between the two times.
    """
    return None if start is None or end is None else max(0.0, end - start)


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft launch``.

    Returns:
        The exit code: 0 if the job ended well; 1, or the code of the trainer that failed first, if
        it failed; 2 for wrong usage; 76 if another node took this one's place; 128 + n after a stop
        by signal n.
    """
    _log_to_stderr("", "launcher")
    try:
        options = parse_options(argv)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    return launch(options)


def launch(options: LaunchOptions) -> int:
    """Run a launcher with parsed options; return the same exit codes as :func:`main`."""
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
        check_memory_size(options.memory_dir)
        return Launcher(options).run()
    except (ConfigError, AuthenticationError) as error:
        logger.error("%s", error)
        return 2
    except (ReftError, OSError) as error:
        logger.error("%s", error)
        return 1


def _log_to_stderr(job: str, process: str) -> None:
    set_place(job, process)
    to_stderr()
    # reft's agent logs why a trainer ended; TorchElastic's message names only the exit signal.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
