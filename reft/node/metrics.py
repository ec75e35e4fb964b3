"""Serves metrics for Prometheus, and the status page, from a node's daemon.

Names and meanings of the metrics are stable; docs/monitoring.md lists them. If the port is in use
or the package prometheus-client is missing, a warning is logged and only the metrics are missing
(P6).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from reft.config import MetricsConfig
from reft.errors import ReftError
from reft.memory.jobdir import JobDir
from reft.node.report import (
    HealthSignal,
    ReportBoard,
    read_board,
)
from reft.node.status import StatusReader
from reft.node.stragglers import STEP_PARTS
from reft.node.summary import summary

logger = logging.getLogger(__name__)

_RETRY_SECS = 30.0
_MAX_CAUSES = 32
_PAGE = Path(__file__).with_name("status.html")
_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
        "'self'",
    ),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
]

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
    "reft_versions_committed_total": "versions committed since the trainers started",
    "reft_versions_skipped_total": "versions given up, by cause",
    "reft_stale": "1 from a version that was given up until the next commit, else 0",
    "reft_persisted_step": "optimizer step of the newest checkpoint on storage",
    "reft_persist_lag_steps": "optimizer steps by which storage is behind memory",
    "reft_persist_stale": "1 while checkpoints do not reach storage, else 0",
}
"""Meaning of each metric. Names that end in ``_total`` are counters, the others gauges."""

Value = tuple[str, Mapping[str, str], float]  # Name, labels in addition to job and node, value


def values(
    board: ReportBoard | None, node: str, status: Mapping[str, Any], now: float
) -> Iterator[Value]:
    """Yield the current metrics.

    Args:
        board: reports of all nodes; None if no launcher writes them.
        node: name of this node.
        status: status of this node's daemon.
        now: Unix seconds.
    """
    if board is not None:
        yield from _describe_job(summary(board, now), node)
    yield from _describe_node(status)


def _describe_job(job: Mapping[str, Any], node: str) -> Iterator[Value]:
    by_signal = dict.fromkeys(HealthSignal, 0)
    for each in job["nodes"]:
        signal = HealthSignal(each["signal"])
        if signal is not HealthSignal.OFFLINE or each["holds_shards"]:
            by_signal[signal] += 1
        if each["node"] == node:
            yield from (("reft_node_signal", {"signal": s}, s is signal) for s in HealthSignal)
    yield from (("reft_nodes", {"signal": s}, n) for s, n in by_signal.items())
    for speed in (speed for speed in job["speeds"] if speed["node"] == node):
        for part in STEP_PARTS:
            labels = {"rank": str(speed["rank"]), "part": part}
            yield "reft_step_part_seconds", labels, speed[f"{part}_secs"]
    for slow in job["slow"]:
        labels = {"kind": slow["kind"], "name": slow["name"]}
        yield "reft_slow", labels, slow["factor"]
        yield "reft_slow_cost_seconds", labels, slow["cost_secs"]
    for use in (use for use in job["memory"] if use["node"] == node):
        yield "reft_memory_used_bytes", {"memory": use["name"]}, use["used_bytes"]
        yield "reft_memory_limit_bytes", {"memory": use["name"]}, use["limit_bytes"]
    for forecast in (forecast for forecast in job["runs_out"] if forecast["node"] == node):
        yield "reft_memory_full_seconds", {"memory": forecast["name"]}, forecast["in_secs"]
    counts = job["since_start"] or {}
    for cause, secs in counts.get("lost_secs", {}).items():
        yield "reft_lost_seconds_total", {"cause": cause}, secs
    plain = {
        "reft_round": job["round"],
        "reft_step": job["step"],
        "reft_steps_per_second": job["steps_per_sec"],
        "reft_effective_training_ratio": counts.get("effective_ratio"),
        "reft_samples_per_second": counts.get("samples_per_sec"),
        "reft_model_tflops": counts.get("tflops"),
        "reft_committed_step": (job["newest_commit"] or {}).get("step"),
        "reft_commit_age_seconds": job["commit_age_secs"],
        "reft_commit_lag_steps": job["commit_lag_steps"],
        "reft_tolerance_nodes": job["tolerance"],
        "reft_tolerance_left_nodes": job["tolerance_left"],
        "reft_recoveries_total": job["restarts"],
    }
    yield from ((name, {}, value) for name, value in plain.items() if value is not None)
    for part, secs in ((job["last_recovery"] or {}).get("secs") or {}).items():
        yield "reft_last_recovery_seconds", {"part": part}, secs


def _describe_node(status: Mapping[str, Any]) -> Iterator[Value]:
    traffic = Counter[tuple[str, str]]()
    for rank, trainer in (status.get("trainers") or {}).items():
        stats = trainer.get("stats") or {}
        for name, key in (
            ("reft_snapshot_seconds", "copy_secs_median"),
            ("reft_stall_seconds", "stall_secs_median"),
        ):
            if stats.get(key) is not None:
                yield name, {"rank": str(rank)}, stats[key]
        for way, kinds in (stats.get("traffic") or {}).items():
            traffic.update({(way, kind): nbytes for kind, nbytes in kinds.items()})
    for (way, kind), nbytes in traffic.items():
        yield "reft_snapshot_bytes", {"way": way, "kind": kind}, nbytes
    yield "reft_versions_committed_total", {}, status.get("commits") or 0
    skipped = status.get("skipped") or {}
    for cause in sorted(skipped)[:_MAX_CAUSES]:
        yield "reft_versions_skipped_total", {"cause": cause}, skipped[cause]
    yield "reft_stale", {}, status.get("stale_since_step") is not None
    persist = status.get("persist") or {}
    if persist.get("dir"):
        if persist.get("last"):
            yield "reft_persisted_step", {}, persist["last"]["step"]
        yield "reft_persist_lag_steps", {}, persist.get("lag_steps") or 0
        yield "reft_persist_stale", {}, persist.get("stale_since_step") is not None


class MetricsServer:
    """Serves the metrics of one node if ``metrics.port`` is set in the ``reft`` block.

    The status page is at ``/``, the output of ``reft status --json`` at ``/status.json``, and the
    metrics at every other path.

    Args:
        job_dir: the job's memory directory on this node.
        status: returns the daemon's status.

    Attributes:
        problem: why nothing is served although a port is set; None if there is no problem.
    """

    def __init__(self, job_dir: JobDir, status: Callable[[], Mapping[str, Any]]) -> None:
        self._job_dir = job_dir
        self._status = status
        self._config = MetricsConfig()
        self._ended = threading.Event()
        self._server: WSGIServer | None = None
        self.problem: str | None = None
        self._reader: StatusReader | None = None
        self._reading = threading.Lock()

    @property
    def url(self) -> str | None:
        """Address of the status page; None while nothing is served."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return None if self._server is None else f"http://{host}:{self._server.server_port}/"

    def configure(self, config: MetricsConfig) -> None:
        """Start serving in a thread if a port is set. Later calls with a port have no effect."""
        if config.port and not self._config.port and not self._ended.is_set():
            self._config = config
            threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterable[Any]:
        """Collect the metrics; prometheus_client calls this for every scrape."""
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
        logged = False
        place = f"{self._config.host} port {self._config.port}"
        while not self._ended.is_set():
            try:
                from prometheus_client import CollectorRegistry, start_http_server

                registry = CollectorRegistry()
                registry.register(self)
                # P11: this server has a thread per request, so a silent client blocks no other.
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
                if not logged:
                    logger.warning(
                        "no metrics at %s: %s; reft tries again, training does not wait for it. "
                        "Set another metrics.port, or a metrics.host of this machine",
                        place,
                        error,
                    )
                logged = True
                self._ended.wait(_RETRY_SECS)
