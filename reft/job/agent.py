"""The agent of one node: TorchElastic's, but lost peers are free and any node may be replaced.

What differs from ``torchrun``'s agent:

- Trainers that end because a peer vanished use up none of ``--max-restarts`` (:mod:`reft.job.exits`);
  restarts are counted for the whole job (:mod:`reft.job.agreement`).
- Every round gets a store of its own for the trainers (:mod:`reft.job.trainer_store`). TorchElastic
  keeps the first one: a replacement waits for its address in vain when the old first node lives, and the
  survivors call the dead when not.
- A node that dies while a round forms costs another round, not the job.
- A lost rendezvous store stops no healthy trainers; the next round waits for it.
- A failed group is ended quickly: what counts is in memory already.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.env import ENV_EXIT_DIR
from reft.errors import FencedError, ReftError
from reft.job.agreement import Agreement, DuplicateNodeError
from reft.job.exits import EXITS_PREFIX, Cause, ExitNote, Failure, WorkerExit, judge
from reft.job.options import LaunchOptions
from reft.job.rendezvous.client import JobEndedError, RendezvousClient
from reft.job.rendezvous.handler import replaced
from reft.job.trainer_store import LOOPBACK, TrainerStore

if TYPE_CHECKING:
    from reft.job.launch import Launcher

logger = logging.getLogger(__name__)

_FORM_ATTEMPTS = 10
_PROGRESS_SECS = 600.0  # Trainers that ran so long have made progress, also where nothing is committed
_SEEN_SECS = 5.0
_KILLED = 128
"""From here on an exit code tells of a signal: another start may do better, as where memory was short."""
_TELL_SECS = 1.0
_ONE_AFTER_THE_OTHER_SECS = 1.0
"""Trainers of a node fail one after the other; the first to be seen need not be the first to fail."""
_OWN_CAUSES = (Cause.REFUSED, Cause.OWN)


class ReftAgent(LocalElasticAgent):
    """Starts, watches and restarts the trainers of one node; ``grace_secs`` is their time to commit and end
    when the launcher was told to stop."""

    def __init__(
        self,
        spec: WorkerSpec,
        options: LaunchOptions,
        *,
        client: RendezvousClient,
        secret: bytes,
        launcher: Launcher,
        exits_dir: Path,
        grace_secs: Callable[[], float],
        **others: Any,
    ) -> None:
        super().__init__(spec, **others)
        self._spec = spec
        self._options = options
        self._client = client
        assert client.handler is not None
        self._handler, self._incarnations = client.handler, client.handler.incarnations
        self._secret = secret
        self._launcher = launcher
        self._grace_secs = grace_secs
        self._started_at = 0.0
        self._trainers = Trainers(self._processes, exits_dir)
        self._trainer_store: TrainerStore | None = None
        self._store_lost = False
        self._without_progress = 0
        self._start_error = ""  # what ended the trainers last, before there was any version
        self.agreement: Agreement | None = None
        self.failure: Failure | None = None
        self.all_ended_well = False
        self.told_to_stop = False

    @property
    def leads(self) -> bool:
        """Whether this is the first node of the job."""
        return int(self._worker_group.group_rank or 0) == 0

    # -- the loop ----------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(self._spec.monitor_interval)
            self._end_if_replaced()
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                self._launcher.state_changed("ended, waiting for other nodes")
                self._exit_barrier()
                if self.all_ended_well or not self._nodes_waiting():
                    return result
                logger.warning("a peer lost its trainers before it had ended; joining it again")
                self._launcher.round_over()
                self._restart_workers(group)
            elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                self._launcher.round_over()
                if not self._may_restart():
                    self._stop_workers(group)
                    self._end_if_replaced(ask=True)
                    group.state = WorkerState.FAILED
                    return result
                self._restart_workers(group)
            elif self._nodes_waiting():
                self._end_for_another_size()
                self._launcher.round_over()
                self._restart_workers(group)
            else:
                self._launcher.trainers_run(int(group.group_rank or 0))

    def _end_for_another_size(self) -> None:
        """Trainers that nothing is wrong with commit the step that they are in: none is lost."""
        size = "fewer nodes" if self._handler.is_scaled_down else "a node that joins"
        logger.warning("the trainers restart with %s", size)
        if self._handler.is_whole:
            self._trainers.end(signal.SIGTERM, self._grace_secs())

    def _end_if_replaced(self, *, ask: bool = False) -> None:
        """Raises FencedError where the job goes on without this node, by the last heartbeat, or the store."""
        if self._handler.is_leaving:
            return  # it is a spare until the others need it no more
        mine = self.agreement.incarnation if self.agreement is not None else 0
        newest = self._handler.newest_incarnation
        if ask:
            with suppress(StoreError):
                newest = self._incarnations.read()
        if newest > mine > 0:
            raise replaced(mine, newest, by_another=self._handler.is_full)
        if why := self._launcher.fenced():
            raise FencedError(why)

    def run(self, role: str = "default") -> Any:
        """As TorchElastic's. Raises FencedError: it was replaced, and has ended its trainers."""
        try:
            return super().run(role)
        except FencedError:
            self._trainers.end(signal.SIGKILL, 0.0)
            raise

    def _may_restart(self) -> bool:
        """Judge the failure of this round's trainers; whether another round is worth it."""
        self._end_if_peers_were_stopped()
        failure = self.failure or Failure(Cause.OWN, 0, 1, "the trainers can no longer be watched")
        alone = self.agreement is not None and len(self.agreement.members) == 1
        if failure.cause in (Cause.UNCLEAR, Cause.STOPPED) and alone:
            failure = replace(failure, cause=Cause.OWN)
        if failure.cause in (Cause.PEER, Cause.STOPPED) and not self._is_free():
            failure = replace(
                failure,
                cause=Cause.OWN,
                reason=f"{failure.reason} (after {self._options.free_restarts} free restarts without "
                "progress)",
            )
        if failure.cause is Cause.SIZE and not self._may_be_resized():
            failure = replace(failure, cause=Cause.REFUSED)
        self.failure = failure
        rank = self._worker_group.workers[failure.local_rank].global_rank
        info = self._handler.info = replace(
            self._handler.info, cause=failure.cause, failure=f"rank {rank}, {failure.reason}"
        )
        if failure.cause is Cause.REFUSED:
            logger.error("%s: the job ends; a restart would be refused again", failure.reason)
            return False
        starts = self._options.restarts_renew and self._launcher.newest_step() < 0
        if starts and failure.cause is Cause.OWN and failure.exit_code < _KILLED:
            if failure.reason == self._start_error:
                logger.error(
                    "%s: the same error twice, and no version was committed: the job ends", failure.reason
                )
                return False
            self._start_error = failure.reason
        used = 0 if self._options.restarts_renew and self._has_new_version() else info.restarts_used
        allowed = self._spec.max_restarts
        since = " since the last new version" if self._options.restarts_renew else ""
        if failure.cause is Cause.OWN and used >= allowed:
            logger.error(
                "%s; restarts used%s: %d of %d (--max-restarts): the job ends",
                *(failure.reason, since, used, allowed),
            )
            return False
        price = {
            Cause.OWN: f"uses restart {used + 1} of {allowed}{since}",
            Cause.UNCLEAR: "the other nodes decide whether this uses a restart",
            Cause.SIZE: "another number of nodes may fit: uses no restart",
        }.get(failure.cause, "a peer vanished: uses no restart")
        logger.warning("trainers ended: %s; %s", failure.reason, price)
        return True

    def _may_be_resized(self) -> bool:
        """Whether another number of nodes may do than this round's, which was refused."""
        with suppress(RendezvousError, StoreError):  # else it is refused once more
            return self._handler.refuse_size()
        return True

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
                    "the rendezvous store no longer answers. Training goes on; without the store no node "
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

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._launcher.state_changed("waiting for nodes")
        for attempt in range(1, _FORM_ATTEMPTS + 1):
            if self._store_lost:
                self._client.reconnect()
                self._note_store_is_back()
            try:
                self._bring_newest()
                super()._rendezvous(worker_group)
                break
            except (RendezvousClosedError, RendezvousGracefulExitError, RendezvousTimeoutError, FencedError):
                raise
            except DuplicateNodeError as error:
                if self._is_refused or attempt == _FORM_ATTEMPTS:
                    raise
                logger.warning("a node was refused: %s", error)
            except (RendezvousError, RuntimeError, TimeoutError) as error:
                if isinstance(error, ReftError) or attempt == _FORM_ATTEMPTS:
                    raise
                self._store_lost = isinstance(error, (RendezvousConnectionError, StoreError))
                logger.warning(
                    "a node was lost while the round formed (%s); it is formed again", _first_line(error)
                )
        agreement = self.agreement
        assert agreement is not None
        assert self._trainer_store is not None
        worker_group.master_addr = LOOPBACK  # type: ignore[assignment]
        worker_group.master_port = self._trainer_store.port  # type: ignore[assignment]
        if agreement.restarts_used > self._spec.max_restarts:
            reason = self.failure.reason if self.failure else "on another node"
            raise JobEndedError(
                f"restarts used: {agreement.restarts_used}, allowed: {self._spec.max_restarts} "
                f"(--max-restarts); the last failure: {reason}"
            )
        self._launcher.round_formed(agreement)

    def _bring_newest(self) -> None:
        """Into the round, what this node knows of the job."""
        info = self._handler.info
        known = info.incarnation, self._launcher.newest_incarnation(), self._incarnations.read()
        newest = self._launcher.newest_step()
        self._handler.info = replace(info, newest_step=newest, incarnation=max(known))

    @property
    def _is_refused(self) -> bool:
        agreement = self._handler.agreement
        return agreement is not None and self._handler.node in agreement.refused

    def _assign_worker_ranks(
        self, store: RendezvousStore, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the trainers, and say where they meet."""
        agreement = self._handler.agreement
        assert agreement is not None
        if agreement.refused:
            raise DuplicateNodeError(agreement.nodes[agreement.members.index(agreement.refused[0])])
        self._close_trainer_store()
        self._trainer_store = TrainerStore.open(
            store,
            self._secret,
            group_rank,
            group_world_size,
            spec.local_addr,
            incarnation=agreement.incarnation,
        )
        self.agreement = agreement
        self._incarnations.raise_to(agreement.incarnation)
        return [
            Worker(
                local_rank=i,
                global_rank=rank,
                role_rank=rank,
                world_size=agreement.world_size,
                role_world_size=agreement.world_size,
            )
            for i, rank in enumerate(agreement.ranks[group_rank])
        ]

    # -- trainers ----------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert self.agreement is not None
        self.failure = None
        self._trainers.begin(self.agreement.round)
        # TORCHELASTIC_RESTART_COUNT is computed from this, and must be the same on all nodes: older
        # versions of torch make it part of the keys under which trainers find each other.
        self._remaining_restarts = self._spec.max_restarts - (self.agreement.round - 1)
        self._started_at = time.monotonic()
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._launcher.workers_started([int(pid) for pid in ids.values()])
        self._launcher.state_changed("running", round=self.agreement.round)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        exits = self._trainers.failures()
        if exits:
            self._launcher.failure_seen()
            exits = self._trainers.once_clear(exits)
            self.failure = judge(exits)
            self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        elif (hang := self._hang()) is not None:
            self._launcher.failure_seen()
            self.failure = hang
            self._trainers.end(signal.SIGKILL, self._options.stop_secs)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and not exits and self.failure is None:
            # It failed between the two looks; those that TorchElastic ended show its signal.
            seen = self._trainers.failures()
            exits = {r: e for r, e in seen.items() if e.exit_code != -signal.SIGTERM} or seen
            self.failure = judge(exits) if exits else None
        if exits:
            # Those that the agent ended itself did not fail.
            failed = {worker_group.workers[rank].global_rank for rank in exits}
            kept = {rank: f for rank, f in result.failures.items() if rank in failed}
            result.failures = kept or result.failures
        return result

    def _hang(self) -> Failure | None:
        """Why the trainers, none of which has failed, have to be ended."""
        index: Any = self._worker_group.group_rank
        if self.agreement is None or self.told_to_stop or index is None:
            return None
        store: Any = self._store
        table = store.with_prefix(f"reft/{self.agreement.round}")
        nodes, running = len(self.agreement.members), self._trainers.running()
        silent = self._handler.is_left_by_silent
        return self._launcher.hangs.judge(table, index, nodes, running, silent=silent)

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._trainers.end(signal.SIGTERM, self._options.stop_secs)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self.told_to_stop and self.agreement is not None:
            # Before its trainers, and with them those of its peers, end; a store that hangs costs a second.
            telling = threading.Thread(target=self._tell_peers, args=(death_sig,), daemon=True)
            telling.start()
            telling.join(_TELL_SECS)
        # Told to stop, trainers have the grace to commit what they have.
        self._trainers.end(death_sig, self._grace_secs() if self.told_to_stop else self._options.stop_secs)
        super()._shutdown(signal.SIGKILL, *args, **kwargs)

    # -- the end -----------------------------------------------------------------------------------

    def _tell_peers(self, number: int) -> None:
        store: Any = self._store
        with suppress(RuntimeError):
            store.set(self._stopped("by"), f"{int(number)} {self._options.node}")
            store.add(self._stopped("nodes"), 1)
            store.add(self._stopped("seen"), 1)

    def _end_if_peers_were_stopped(self) -> None:
        """Raises SignalException where other launchers were told to stop, without which it cannot go on."""
        store: Any = self._store
        with suppress(RuntimeError):
            gone = store.add(self._stopped("nodes"), 0)
            if not gone or self._handler.goes_on_without(gone):
                return
            number, node = store.get(self._stopped("by")).decode().split(" ", 1)
            store.add(self._stopped("seen"), 1)
            sent = signal.Signals(int(number))
            raise SignalException(
                f"node {node} was stopped by {sent.name}, and no other node replaces it", sigval=sent
            )

    def wait_for_peers(self) -> None:
        """This launcher was told to stop, and the store ends with it: its peers look there first."""
        if self.agreement is not None:
            with suppress(RuntimeError):
                _wait_until_all_have_seen(self._store, self._stopped("seen"), 1 + len(self.agreement.members))

    def _stopped(self, name: str) -> str:
        """A key in the store of this round, about launchers that were told to stop."""
        assert self.agreement is not None
        return f"reft/stopped/{self.agreement.round}/{name}"

    def _exit_barrier(self) -> None:
        """Wait until all trainers have ended well, or a node wants another round."""
        assert self.agreement is not None
        prefix, size = f"reft/ended/{self.agreement.round}", len(self.agreement.members)
        store: Any = self._store
        deadline = time.monotonic() + self._exit_barrier_timeout
        try:
            if store.add(prefix, 1) >= size:
                store.set(f"{prefix}/all", "1")
            while not store.check([f"{prefix}/all"]):
                if time.monotonic() > deadline or self._nodes_waiting():
                    return
                self._end_if_peers_were_stopped()
                time.sleep(max(0.1, self._spec.monitor_interval))
            self.all_ended_well = True
            _wait_until_all_have_seen(store, f"{prefix}/seen", size)
        except RuntimeError as error:
            if not self.all_ended_well:
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


def _wait_until_all_have_seen(store: Any, key: str, size: int) -> None:
    """The store may live in this process: others read first that all is well."""
    deadline = time.monotonic() + _SEEN_SECS
    seen = store.add(key, 1)
    while seen < size and time.monotonic() < deadline:
        time.sleep(0.05)
        seen = store.add(key, 0)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Trainers:
    """Looks at trainers from outside; in ``exits_dir`` they may leave why they ended."""

    def __init__(self, processes: Callable[[], Mapping[int, Any]], exits_dir: Path) -> None:
        self._processes = processes
        self._root = Path(tempfile.mkdtemp(prefix=EXITS_PREFIX, dir=exits_dir))
        self._notes = self._root
        self._ended_groups: set[int] = set()
        self.hurry = False  # They are waited for no more

    def begin(self, number: int) -> None:
        if self._notes != self._root:
            shutil.rmtree(self._notes, ignore_errors=True)
        self._notes = self._root / str(number)
        try:
            # The directory of all rounds is gone where somebody has removed the job's memory.
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._notes.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("trainers cannot record why they end: %s", error)
        os.environ[ENV_EXIT_DIR] = str(self._notes)
        self._ended_groups.clear()

    def running(self) -> list[int]:
        return [process.pid for process in self._processes().values() if process.poll() is None]

    def failures(self) -> dict[int, WorkerExit]:
        """Those that have failed, or say that they do, by local rank."""
        found = {}
        for local_rank, process in self._processes().items():
            code = process.poll()
            note = ExitNote.read(self._notes, local_rank)
            if code not in (None, 0) or (note is not None and code is None):
                found[local_rank] = WorkerExit(code, note)
        return found

    def once_clear(self, failures: dict[int, WorkerExit]) -> dict[int, WorkerExit]:
        """The same a moment later, once it is clear whose fault it was: all have failed, or one by its
        own cause."""
        deadline = time.monotonic() + _ONE_AFTER_THE_OTHER_SECS
        while failures and time.monotonic() < deadline:
            ended = [f for f in failures.values() if f.exit_code is not None]
            if len(ended) == len(self._processes()) or any(f.cause in _OWN_CAUSES for f in ended):
                break
            time.sleep(0.02)
            failures = self.failures()
        return failures

    def end(self, number: int, timeout_secs: float) -> None:
        """Signal them, wait, and kill what is left of their process groups, once.

        A trainer that handles the signal is signalled alone: it finishes its step, for which it needs its
        DataLoader's workers. Any other, as a shell that runs the trainer, is signalled with its group."""
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

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _handles(pid: int, number: int) -> bool:
    try:
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, ValueError, KeyError):
        return False
