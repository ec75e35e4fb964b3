"""Starts the trainer processes of one node as torchrun does, watches, signals and kills them."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.api import macros

from reft.env import ENV_EXIT_DIR
from reft.job.node_memory import EXITS_PREFIX
from reft.job.options import LaunchOptions
from reft.job.rendezvous.membership import Agreement
from reft.job.script import ExitCause, ExitNote, WorkerExit
from reft.job.signals import StopSignals
from reft.job.trainer_store import deal_ranks, trainer_environ

logger = logging.getLogger(__name__)

_CONSECUTIVE_FAILURES_SECS = 1.0
"""Time to wait for further failures after the first one. The trainers of a node fail one after
another, and the one whose failure is noticed first need not be the one that failed first.
"""
_OWN_CAUSES = (ExitCause.REFUSED, ExitCause.OWN)
_CLOSE_SECS = 30
_MAX_NAMED = 10
_OPTIONAL_ARGUMENTS = ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
"""Arguments of ``start_processes`` that only newer versions of torch have."""


class Trainers:
    """The trainers of one node. One object serves all rounds.

    Args:
        options: options of the launcher.
        exits_dir: parent of the directory, made here, to which trainers write their exit notes: a
            small file in which a trainer records why it ends.
        signals: signals of the launcher; a repeated Ctrl-C ends the wait for trainers to exit.
    """

    def __init__(self, options: LaunchOptions, exits_dir: Path, signals: StopSignals) -> None:
        self._options = options
        self._signals = signals
        self._root = Path(tempfile.mkdtemp(prefix=EXITS_PREFIX, dir=exits_dir))
        self._notes = self._root
        self._context: Any = None
        self._ended_groups: set[int] = set()

    def start(self, agreement: Agreement, group_rank: int, port: int) -> list[int]:
        """Start the trainers of a round.

        Args:
            agreement: what the nodes agreed on for the round.
            group_rank: group rank of this node.
            port: port of the trainers' store on this node.

        Returns:
            The process ids in the order of local ranks.
        """
        self._prepare_notes(agreement.round)
        config: Any = self._options.config
        ranks = deal_ranks(agreement.workers, agreement.rank_stride)[group_rank]
        prefix_template = config.log_line_prefix_template
        prefixes = None
        if prefix_template:
            prefixes = {
                local_rank: Template(prefix_template).safe_substitute(
                    role_name=config.role, rank=rank, local_rank=local_rank
                )
                for local_rank, rank in enumerate(ranks)
            }
        accepted = inspect.signature(start_processes).parameters
        optional = {
            name: getattr(config, name)
            for name in _OPTIONAL_ARGUMENTS
            if name in accepted and hasattr(config, name)
        }
        arguments = list(self._options.arguments)
        self._context = start_processes(
            name=config.role,
            entrypoint=self._options.entrypoint,
            args={
                local_rank: tuple(macros.substitute(arguments, str(local_rank)))
                for local_rank in range(len(ranks))
            },
            envs=self._environments(agreement, group_rank, port),
            logs_specs=config.logs_specs,
            log_line_prefixes=prefixes,
            **optional,
        )
        return [int(pid) for pid in self._context.pids().values()]

    def _environments(
        self, agreement: Agreement, group_rank: int, port: int
    ) -> dict[int, dict[str, str]]:
        """Return the environment variables of each trainer, by local rank."""
        config: Any = self._options.config
        ranks = deal_ranks(agreement.workers, agreement.rank_stride)[group_rank]
        local_size, world_size = len(ranks), sum(agreement.workers)
        node = (group_rank, len(agreement.members))
        # Older versions of torch put the number of restarts into the store keys under which
        # trainers find each other. Derive the number from the round, which is the same on all
        # nodes.
        restarts = (agreement.round - 1, config.max_restarts)
        shared = {
            "ROLE_NAME": config.role,
            "TORCHELASTIC_RUN_ID": config.run_id,
            ENV_EXIT_DIR: str(self._notes),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        environments = {}
        for local_rank, rank in enumerate(ranks):
            own = trainer_environ(
                (rank, world_size), (local_rank, local_size), node, port, restarts
            )
            environments[local_rank] = shared | own
        if getattr(config, "virtual_local_rank", False):
            all_devices = ",".join(map(str, range(local_size)))
            devices = os.environ.get("CUDA_VISIBLE_DEVICES", all_devices).split(",")
            for local_rank, environment in environments.items():
                environment["LOCAL_RANK"] = "0"
                environment["CUDA_VISIBLE_DEVICES"] = devices[local_rank].strip()
        return environments

    def _prepare_notes(self, round_number: int) -> None:
        """Make an empty directory for the exit notes of a round."""
        if self._notes != self._root:
            shutil.rmtree(self._notes, ignore_errors=True)
        self._notes = self._root / str(round_number)
        try:
            # If a user has removed the job's memory, the root is missing and is created again.
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._notes.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("trainers cannot record why they end: %s", error)
        self._ended_groups.clear()

    # -- their state -------------------------------------------------------------------------------

    def running(self) -> list[int]:
        """Return the process ids of the trainers that are running."""
        return [process.pid for process in self._processes().values() if process.poll() is None]

    def ended(self) -> dict[int, ProcessFailure] | None:
        """Return the failed trainers by local rank, empty if none failed; None while any runs.

        TorchElastic gives the answer, and ends all other trainers as soon as one has failed.
        """
        result = self._context.wait(0)
        if result is None:
            return None
        failures: dict[int, ProcessFailure] = result.failures
        return failures

    def failures(self) -> dict[int, WorkerExit]:
        """Return, by local rank, trainers that failed or whose exit note announces a failure."""
        failures = {}
        for local_rank, process in self._processes().items():
            code = process.poll()
            # A trainer whose script ended well may still fail while the process shuts down. In that
            # case the exit code counts, not the trainer's note.
            note = None if self.script_has_ended(local_rank) else self._read_note(local_rank)
            if code not in (None, 0) or (note is not None and code is None):
                failures[local_rank] = WorkerExit(code, note)
        return failures

    def settled_failures(self, failures: dict[int, WorkerExit]) -> dict[int, WorkerExit]:
        """Wait until it is clear which trainer caused the failure, one second at most.

        That is clear once all trainers have ended, or once one has failed for its own reason
        rather than because it lost a peer.

        Args:
            failures: the failures that :meth:`failures` returned.

        Returns:
            The failures known when the wait ends, by local rank.
        """
        deadline = time.monotonic() + _CONSECUTIVE_FAILURES_SECS
        while failures and time.monotonic() < deadline:
            ended = [failure for failure in failures.values() if failure.exit_code is not None]
            if any(failure.cause in _OWN_CAUSES for failure in ended):
                break
            if len(ended) + len(self.ended_well()) == len(self._processes()):
                break
            time.sleep(0.02)
            failures = self.failures()
        return failures

    def ended_well(self) -> dict[int, str]:
        """Describe, by local rank, the trainers that ended well, or whose script has ended well.

        Returns:
            Text with the exit code and, if known, the last step of each such trainer.
        """
        ends = {}
        for local_rank, process in self._processes().items():
            code, note = process.poll(), self._read_note(local_rank)
            if code in (None, 0) and note is not None and note.cause is ExitCause.ENDED:
                ends[local_rank] = note.error
            elif code == 0:
                ends[local_rank] = "exit code 0"
        return ends

    def script_has_ended(self, local_rank: int) -> bool:
        """Whether a trainer's script has ended well; the process may still be running."""
        note = self._read_note(local_rank)
        return note is not None and note.cause is ExitCause.ENDED

    def _read_note(self, local_rank: int) -> ExitNote | None:
        return ExitNote.read(self._notes, local_rank)

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._context, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    # -- their end ---------------------------------------------------------------------------------

    def end(self, number: int, timeout_secs: float) -> None:
        """Signal the trainers, wait, and kill what is left of their process groups.

        A trainer that has a handler for the signal receives it alone: its DataLoader workers must
        live on, so that it can finish its step. Without a handler the whole process group receives
        the signal: the process may be a shell, with the trainer as its child.

        Args:
            number: number of the signal.
            timeout_secs: longest time between that signal and SIGKILL.
        """
        processes = [p for p in self._processes().values() if p.pid not in self._ended_groups]
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    if _handles(process.pid, number):
                        os.kill(process.pid, number)
                    else:
                        os.killpg(process.pid, number)
        deadline = time.monotonic() + timeout_secs
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or self._signals.impatient:
                break
            time.sleep(0.05)
        for process in processes:
            # Kill the group even if the trainer itself has ended: its children may still run.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Kill a group only once: afterwards the kernel may reuse its number for another group.
            self._ended_groups.add(process.pid)
        if any(process.poll() != 0 for process in processes):
            self._kill_detached()

    def _kill_detached(self) -> None:
        """Kill processes that failed trainers started in sessions of their own.

        Such processes may hold ports and devices that the next trainers need. They are recognized
        by a variable in the environment that they inherited, even if their parent has ended.
        """
        marker = f"{ENV_EXIT_DIR}={self._notes}\0".encode()
        killed = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            pid = int(entry.parent.name)
            with suppress(OSError):  # Another user's process, or one that has just ended
                if marker in entry.read_bytes() and os.getpgid(pid) not in self._ended_groups:
                    name = entry.with_name("comm").read_text().strip()
                    os.kill(pid, signal.SIGKILL)
                    killed.append(f"{pid} {name}")
        if killed:
            logger.warning(
                "ended %d %s that failed trainers had left in sessions of their own (%s)",
                len(killed),
                "process" if len(killed) == 1 else "processes",
                ", ".join(killed[:_MAX_NAMED]),
            )

    def release(self) -> None:
        """Kill what is left of this round's trainers, and release TorchElastic's resources."""
        if self._context is not None:
            self._context.close(signal.SIGKILL, _CLOSE_SECS)

    def close(self) -> None:
        """Remove the directory of the exit notes."""
        shutil.rmtree(self._root, ignore_errors=True)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, by the mask of caught signals in /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines)
        return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, ValueError, KeyError):
        return False
