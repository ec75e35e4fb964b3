"""What a node tells of the whole job: what ``reft status --json`` prints, and its daemon serves as
a web page, and metrics for Prometheus.

Names and meanings of metrics are stable; docs/monitoring.md has them as a table. A port that is
taken, or a package that is missing, costs a line of the log and the metrics, nothing else (P6).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from reft.config import MetricsConfig
from reft.errors import ReftError
from reft.memory.jobdir import DAEMON_FILE, JobDir, is_running, read_json
from reft.node.advice import advise, situation
from reft.node.client import read_record
from reft.node.observe import NodeObserver
from reft.node.progress import Phase, read_pages
from reft.node.report import (
    CONFIG_FILE,
    ENDED_WELL,
    FAILED,
    WAITING,
    HealthSignal,
    NodeReport,
    ReportBoard,
    is_well,
    newest_board,
    read_board,
    read_history,
    restarts_among,
    summary,
    why,
)
from reft.node.stragglers import STEP_PARTS

logger = logging.getLogger(__name__)

ENDED_AS_WANTED = "it ended well"
_OLD_SECS = 10.0
_BRIEF_SECS = 2.0  # in which nodes that are there come to meet after a failure
_MOST_ROUNDS = 64


class NodeState(StrEnum):
    RUNS = "runs"
    RECOVERING = "recovering"
    WAITING = "waiting for a node"
    ENDED = "ended"


class StatusReader:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._observers = {
            JobDir.open(path).node: NodeObserver(path, has_daemon=(path / DAEMON_FILE).exists())
            for path in paths
        }

    def read(self) -> dict[str, Any]:
        now = time.time()
        running = any(map(_runs, self.paths))
        board, said = self._board(now, running)
        told = summary(board, now)
        here = [_node(path) for path in self.paths]
        found = advise(situation(self.paths, board, None)) if running else ()
        state, waiting = _state(board, self.paths) if running else (NodeState.ENDED, None)
        return told | {
            "warnings": [*said, *told["warnings"]],
            "advice": [advice.to_json() for advice in found],
            "state": str(state),
            "waiting": waiting,
            "ended": None if running else _end(self.paths),
            "well": state is NodeState.RUNS and is_well(told) and all(map(_node_is_well, here)),
            "here": here,
        }

    def _board(self, now: float, running: bool) -> tuple[ReportBoard, list[str]]:
        """The newest board on any of the nodes; of a job without one what these nodes tell
        themselves."""
        if (board := newest_board(self.paths)) is not None:
            said = []
            if running and (old := now - board.written_unix_secs) > _OLD_SECS:
                said.append(
                    f"the launcher of this node has reported nothing for {old:.0f} s: is "
                    "it stopped?"
                )
            if (lost := board.store_lost_unix_secs) is not None:
                said.append(
                    f"the launcher has not reached the rendezvous store since {clock(lost)}: the "
                    "other "
                    f"nodes are shown as they were then"
                )
            return board, said
        told = [
            (NodeReport(node=node, domain=node), seen) for node, seen in self._observers.items()
        ]
        nodes = tuple(observer.look(mine) for mine, observer in told)
        alone = (
            "no reft launcher reports on other nodes: only nodes whose memory was read are shown"
        )
        board = ReportBoard(job_id=JobDir.open(self.paths[0]).job_id, unix_secs=now, nodes=nodes)
        return board, [alone] if running else []


def _state(board: ReportBoard, paths: Sequence[Path]) -> tuple[NodeState, dict[str, Any] | None]:
    """What a running job does; while it waits for nodes: for which, since when, and until when. The
    limit is None if the launchers' join timeout is the only one."""
    rounds = [row for path in paths for row in read_history(path)[-1:]]
    last = max(rounds, key=lambda row: row.unix_secs, default=None)
    present = [
        n for n in board.nodes if n.seen is not HealthSignal.OFFLINE and not n.quiet and not n.spare
    ]
    waits = [n for n in present if n.doing == WAITING]
    missing = [] if last is None else sorted(set(last.nodes) - {n.node for n in waits})
    since = min((n.doing_since_unix_secs for n in waits if n.doing_since_unix_secs), default=None)
    late = since is not None and time.time() - since > _BRIEF_SECS
    if waits and (last is None or set(missing) - {n.node for n in present} or (missing and late)):
        block = next(filter(None, (read_json(path / CONFIG_FILE) for path in paths)), {})
        wait_secs = (block.get("elastic") or {}).get("wait_secs")
        until = since + wait_secs if since and wait_secs else None
        return NodeState.WAITING, {
            "for": missing,
            "since_unix_secs": since,
            "until_unix_secs": until,
        }
    if waits or any(n.doing == FAILED for n in present):
        return NodeState.RECOVERING, None
    pages = [page for path in paths for page in read_pages(path) if page.state not in ("", "Z")]
    trains = any(page.phase not in (Phase.LOADING, Phase.FIRST_STEP) for page in pages)
    if last is not None and restarts_among([last]) and not trains:
        return NodeState.RECOVERING, None
    return NodeState.RUNS, None


def _node(path: Path) -> dict[str, Any]:
    """What the node's own files tell, next to what the whole job knows: storage, traffic,
    protection."""
    directory = JobDir.open(path)
    rounds = read_history(path)
    restarts = restarts_among(rounds)
    record = read_record(path)
    return {
        "job_id": directory.job_id,
        "node": directory.node,
        "memory": str(path),
        "daemon_runs": _daemon_runs(path),
        "status": directory.read_status(),
        "restarts": f"{len(restarts)}; the last: {why(restarts[-1])}" if restarts else "none",
        "last_recovery": asdict(restarts[-1]) if restarts else None,
        "history": [{**asdict(row), "why": why(row)} for row in rounds[-_MOST_ROUNDS:]],
        "protection": None if record is None else asdict(record),
    }


def _node_is_well(node: dict[str, Any]) -> bool:
    status = node["status"] or {}
    persist = status.get("persist") or {}
    stale = (
        status.get("stale_since_step") is not None or persist.get("stale_since_step") is not None
    )
    return bool(node["daemon_runs"]) and status.get("last_committed") is not None and not stale


def _daemon_runs(path: Path) -> bool:
    daemon = read_json(path / DAEMON_FILE)
    return daemon is not None and is_running(daemon)


def _launcher_ended(path: Path) -> str:
    """Why the node's launcher has ended, by its own last word; "" while it runs, or where it was
    killed."""
    board = read_board(path)
    node = None if board is None else board.node(JobDir.open(path).node)
    return node.why if node is not None and node.left else ""


def _runs(path: Path) -> bool:
    """Whether any process of the job runs on the node, without touching a lock that it may want."""
    if _daemon_runs(path) or any(page.state not in ("", "Z") for page in read_pages(path)):
        return True
    board = read_board(path)
    told = board is not None and time.time() - board.written_unix_secs < _OLD_SECS
    return told and not _launcher_ended(path)


def _end(paths: Sequence[Path]) -> str:
    """Why the job does not run any more, as far as these nodes know."""
    for path in paths:
        rounds = read_history(path)
        if rounds and rounds[-1].ended is not None:
            return rounds[-1].ended
    said = list(map(_launcher_ended, paths))
    if ENDED_WELL in said:
        return ENDED_AS_WANTED
    return "its launcher was stopped" if any(said) else "its processes are gone"


def clock(unix_secs: float) -> str:
    return f"{datetime.fromtimestamp(unix_secs):%H:%M:%S}"


# -- Prometheus and the web page -------------------------------------------------------------------

_RETRY_SECS = 30.0
_MOST_CAUSES = 32

METRICS = {
    "reft_node_signal": "1 for the current signal of this node, 0 for the others",
    "reft_nodes": "nodes of the job, by their signal; without replaced nodes",
    "reft_round": "starts of the trainers under these launchers",
    "reft_step": "newest optimizer step",
    "reft_steps_per_second": "optimizer steps per second, over the last 64 steps seen",
    "reft_step_part_seconds": (
        "seconds of a step, by rank and part: compute, busy (ready to compute, without a core), "
        "transfer, wait, other; means over the last steps"
    ),
    "reft_slow": "factor by which a rank, node or link is slower than its peers",
    "reft_slow_cost_seconds": "seconds of every step that this costs, at most",
    "reft_effective_training_ratio": (
        "fraction of the time since the job's start that was effective training, 0 to 1"
    ),
    "reft_lost_seconds_total": "seconds lost since the job's start, by cause",
    "reft_samples_per_second": "samples trained on per second, since the job's start",
    "reft_model_tflops": "10^12 operations of the model per second, since the job's start",
    "reft_memory_used_bytes": "bytes in use of a memory that limits the trainers",
    "reft_memory_limit_bytes": "bytes at which that memory is full",
    "reft_memory_full_seconds": "seconds until a memory that is running out is full",
    "reft_committed_step": "optimizer step of the newest committed version",
    "reft_commit_age_seconds": "seconds since the newest committed version was complete",
    "reft_commit_lag_steps": "optimizer steps made since the newest committed version",
    "reft_tolerance_nodes": "node losses that the job survives when all nodes are present",
    "reft_tolerance_left_nodes": "node losses that the job survives now; -1: the versions in "
    "memory are lost",
    "reft_recoveries_total": "restarts that followed a failure",
    "reft_last_recovery_seconds": "parts of the last recovery, in seconds",
    "reft_snapshot_seconds": "median seconds that the copy of a version took, by local rank",
    "reft_stall_seconds": "median seconds that training waited for a version, by local rank",
    "reft_snapshot_bytes": "bytes of the newest version, by way (to_host, sent) and kind",
    "reft_versions_committed_total": "versions committed since this daemon started",
    "reft_versions_skipped_total": "versions given up, by cause",
    "reft_stale": "1 from a version that was given up until the next commit, else 0",
    "reft_persisted_step": "optimizer step of the newest checkpoint on storage",
    "reft_persist_lag_steps": "optimizer steps by which storage is behind memory",
    "reft_persist_stale": "1 while checkpoints do not reach storage, else 0",
}
"""What is said of each name; those that end in ``_total`` are counters, the others gauges."""

Value = tuple[str, Mapping[str, str], float]  # Name, labels next to job and node, value


def values(
    board: ReportBoard | None, node: str, status: Mapping[str, Any], now: float
) -> Iterator[Value]:
    """What is exposed now. ``board``: of the job; None where no launcher writes one. ``node``: this
    node. ``status``: what its daemon knows."""
    if board is not None:
        yield from _describe_job(summary(board, now), node)
    yield from _describe_node(status)


def _describe_job(told: Mapping[str, Any], node: str) -> Iterator[Value]:
    counted = dict.fromkeys(HealthSignal, 0)
    for each in told["nodes"]:
        signal = HealthSignal(each["signal"])
        if signal is not HealthSignal.OFFLINE or each["holds_shards"]:
            counted[signal] += 1
        if each["node"] == node:
            yield from (("reft_node_signal", {"signal": s}, s is signal) for s in HealthSignal)
    yield from (("reft_nodes", {"signal": s}, n) for s, n in counted.items())
    for speed in (speed for speed in told["speeds"] if speed["node"] == node):
        for part in STEP_PARTS:
            labels = {"rank": str(speed["rank"]), "part": part}
            yield "reft_step_part_seconds", labels, speed[f"{part}_secs"]
    for slow in told["slow"]:
        labels = {"kind": slow["kind"], "name": slow["name"]}
        yield "reft_slow", labels, slow["factor"]
        yield "reft_slow_cost_seconds", labels, slow["cost_secs"]
    for use in (use for use in told["memory"] if use["node"] == node):
        yield "reft_memory_used_bytes", {"memory": use["name"]}, use["used_bytes"]
        yield "reft_memory_limit_bytes", {"memory": use["name"]}, use["limit_bytes"]
    for memory in (memory for memory in told["runs_out"] if memory["node"] == node):
        yield "reft_memory_full_seconds", {"memory": memory["name"]}, memory["in_secs"]
    counts = told["since_start"] or {}
    for cause, secs in counts.get("lost_secs", {}).items():
        yield "reft_lost_seconds_total", {"cause": cause}, secs
    plain = {
        "reft_round": told["round"],
        "reft_step": told["step"],
        "reft_steps_per_second": told["steps_per_sec"],
        "reft_effective_training_ratio": counts.get("effective_ratio"),
        "reft_samples_per_second": counts.get("samples_per_sec"),
        "reft_model_tflops": counts.get("tflops"),
        "reft_committed_step": (told["newest_commit"] or {}).get("step"),
        "reft_commit_age_seconds": told["commit_age_secs"],
        "reft_commit_lag_steps": told["commit_lag_steps"],
        "reft_tolerance_nodes": told["tolerance"],
        "reft_tolerance_left_nodes": told["tolerance_left"],
        "reft_recoveries_total": told["restarts"],
    }
    yield from ((name, {}, value) for name, value in plain.items() if value is not None)
    for part, secs in ((told["last_recovery"] or {}).get("secs") or {}).items():
        yield "reft_last_recovery_seconds", {"part": part}, secs


def _describe_node(status: Mapping[str, Any]) -> Iterator[Value]:
    moved = Counter[tuple[str, str]]()
    for rank, trainer in (status.get("trainers") or {}).items():
        stats = trainer.get("stats") or {}
        for name, key in (
            ("reft_snapshot_seconds", "copy_secs_median"),
            ("reft_stall_seconds", "stall_secs_median"),
        ):
            if stats.get(key) is not None:
                yield name, {"rank": str(rank)}, stats[key]
        for way, kinds in (stats.get("traffic") or {}).items():
            moved.update({(way, kind): nbytes for kind, nbytes in kinds.items()})
    for (way, kind), nbytes in moved.items():
        yield "reft_snapshot_bytes", {"way": way, "kind": kind}, nbytes
    yield "reft_versions_committed_total", {}, status.get("commits") or 0
    skipped = status.get("skipped") or {}
    for cause in sorted(skipped)[:_MOST_CAUSES]:
        yield "reft_versions_skipped_total", {"cause": cause}, skipped[cause]
    yield "reft_stale", {}, status.get("stale_since_step") is not None
    persist = status.get("persist") or {}
    if persist.get("dir"):
        if persist.get("last"):
            yield "reft_persisted_step", {}, persist["last"]["step"]
        yield "reft_persist_lag_steps", {}, persist.get("lag_steps") or 0
        yield "reft_persist_stale", {}, persist.get("stale_since_step") is not None


_PAGE = Path(__file__).with_name("status.html")
_HEADERS = [
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src "
                                "'unsafe-inline'; "
     "connect-src 'self'"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
]  # fmt: skip


class MetricsServer:
    """Serves the metrics of one node, if the block asks for it: the status page at ``/``, what
    ``reft status --json`` prints at ``/status.json``, and the metrics at every other path."""

    def __init__(self, job_dir: JobDir, status: Callable[[], Mapping[str, Any]]) -> None:
        self._job_dir = job_dir
        self._status = status
        self._config = MetricsConfig()
        self._ended = threading.Event()
        self._server: WSGIServer | None = None
        self.problem: str | None = None  # why nothing is served although the block asks for it
        self._reader: StatusReader | None = None
        self._reading = threading.Lock()

    @property
    def url(self) -> str | None:
        """Of the page; None while nothing is served."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return None if self._server is None else f"http://{host}:{self._server.server_port}/"

    def configure(self, config: MetricsConfig) -> None:
        """Serve as the block says, from now on; does not wait. Another block later changes
        nothing."""
        if config.port and not self._config.port and not self._ended.is_set():
            self._config = config
            threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterable[Any]:
        """What prometheus_client asks for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job, node = self._job_dir.job_id, self._job_dir.node
        families: dict[str, Any] = {}
        board = read_board(self._job_dir.path)
        for name, labels, value in values(board, node, self._status(), time.time()):
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, METRICS[name], labels=("job", "node", *labels))
            families[name].add_metric((job, node, *labels.values()), float(value))
        return families.values()

    def _answer(
        self, metrics: WSGIApplication, environ: WSGIEnvironment, start: StartResponse
    ) -> Iterable[bytes]:
        path, reads = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "GET"
        if path == "/" and reads:
            start("200 OK", [("Content-Type", "text/html; charset=utf-8"), *_HEADERS])
            return [_PAGE.read_bytes()]
        if path == "/status.json" and reads:
            try:
                with self._reading:
                    self._reader = self._reader or StatusReader([self._job_dir.path])
                    status = json.dumps(self._reader.read(), default=str)
            except (ReftError, OSError) as error:
                start(
                    "503 Service Unavailable",
                    [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS],
                )
                return [str(error).encode()]
            start("200 OK", [("Content-Type", "application/json"), *_HEADERS])
            return [status.encode()]
        return metrics(environ, start)

    def _serve(self) -> None:
        told = False
        place = f"{self._config.host} port {self._config.port}"
        while not self._ended.is_set():
            try:
                from prometheus_client import CollectorRegistry, start_http_server

                registry = CollectorRegistry()
                registry.register(self)
                # P11: a thread for each request, so that a stranger who says nothing holds up
                # nobody.
                server, _ = start_http_server(self._config.port, self._config.host, registry)
                metrics = server.get_app()
                assert metrics is not None
                server.set_app(partial(self._answer, metrics))
                self._server, self.problem = server, None
                logger.info(
                    "metrics for Prometheus, and the status page, are served at %s", self.url
                )
                return
            except ImportError:
                self.problem = (
                    "the package prometheus-client is missing; pip install 'reft-ckpt[metrics]'"
                )
                logger.warning("no metrics: %s", self.problem)
                return
            except (OSError, OverflowError, UnicodeError) as error:
                self.problem = f"{place}: {error}"
                if not told:
                    logger.warning(
                        "no metrics at %s: %s; reft tries again, training does not wait for it. "
                        "Set "
                        "another metrics.port, or a metrics.host of this machine",
                        place,
                        error,
                    )
                told = True
                self._ended.wait(_RETRY_SECS)
