"""Metrics of a job for Prometheus: what the node's daemon and its launcher's board tell when it is asked for.

Names and meanings are stable; docs/operations.md has them as a table. A port that is taken, or a package that
is missing, costs a line of the log and the metrics, nothing else (P6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from reft.config import MetricsConfig
from reft.memory.jobdir import JobDir
from reft.node.signals import Board, Signal, read_board, summary
from reft.speed.reports import STEP_PARTS

logger = logging.getLogger(__name__)

_REQUEST_SECS = 2.0
"""Requests are answered one after the other: who says nothing holds up the next one for so long."""
_RETRY_SECS = 30.0
_MOST_CAUSES = 32


@dataclass(frozen=True)
class Metric:
    """One name.

    Attributes:
        name: as it is exposed; of a counter with ``_total``.
        help: what it says, with its unit.
        labels: beside ``job`` and ``node``, which all have.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS = (
    Metric("reft_node_signal", "1 for the signal that this node gives, 0 for the others", ("signal",)),
    Metric(
        "reft_nodes", "nodes of the job, by the signal that they give; without those replaced", ("signal",)
    ),
    Metric("reft_round", "starts of the trainers under these launchers"),
    Metric("reft_step", "newest optimizer step that was made"),
    Metric("reft_steps_per_second", "optimizer steps per second, over the last 64 steps seen"),
    Metric(
        "reft_step_part_seconds",
        "seconds of a step, by rank and part: compute, busy (ready to compute, without a core), transfer, "
        "wait, other; means over the last steps",
        ("rank", "part"),
    ),
    Metric("reft_slow", "how many times as long as its peers what is slow takes", ("kind", "name")),
    Metric("reft_slow_cost_seconds", "seconds of every step that it costs, at most", ("kind", "name")),
    Metric(
        "reft_effective_training_ratio", "time that was training that counts, since the job's start, 0 to 1"
    ),
    Metric("reft_lost_seconds_total", "seconds since the job's start that were lost, by cause", ("cause",)),
    Metric("reft_samples_per_second", "samples trained on per second, since the job's start"),
    Metric("reft_model_tflops", "10^12 operations of the model per second, since the job's start"),
    Metric("reft_memory_used_bytes", "bytes in use of a memory that limits the trainers", ("memory",)),
    Metric("reft_memory_limit_bytes", "bytes at which that memory is full", ("memory",)),
    Metric("reft_memory_full_seconds", "seconds until a memory that is running out is full", ("memory",)),
    Metric("reft_committed_step", "optimizer step of the newest committed version"),
    Metric("reft_commit_age_seconds", "seconds since the newest committed version was whole"),
    Metric("reft_commit_lag_steps", "optimizer steps made since the newest committed version"),
    Metric("reft_tolerance_nodes", "node losses that are survived when all nodes are there"),
    Metric(
        "reft_tolerance_left_nodes", "node losses that are survived now; -1: the versions in memory are lost"
    ),
    Metric("reft_recoveries_total", "restarts that followed a failure"),
    Metric("reft_last_recovery_seconds", "parts of the last recovery, in seconds", ("part",)),
    Metric(
        "reft_snapshot_seconds", "median seconds that the copy of a version took, by local rank", ("rank",)
    ),
    Metric(
        "reft_stall_seconds", "median seconds that training waited for a version, by local rank", ("rank",)
    ),
    Metric(
        "reft_snapshot_bytes", "bytes of the newest version, by way (to_host, sent) and kind", ("way", "kind")
    ),
    Metric("reft_versions_committed_total", "versions that this daemon has seen committed"),
    Metric("reft_versions_skipped_total", "versions that were given up, by cause", ("cause",)),
    Metric("reft_stale", "1 while no version is taken, or none was since one was given up; else 0"),
    Metric("reft_persisted_step", "optimizer step of the newest checkpoint on storage"),
    Metric("reft_persist_lag_steps", "optimizer steps that storage is behind memory"),
    Metric("reft_persist_stale", "1 while checkpoints do not reach storage, else 0"),
)
"""Everything that is exposed. One of which nothing is known yet is left out."""

Value = tuple[str, tuple[str, ...], float]
"""Name, labels beside job and node, value."""


def values(board: Board | None, node: str, status: Mapping[str, Any], now: float) -> Iterator[Value]:
    """What is exposed now.

    Args:
        board: of the job; None where no launcher writes one.
        node: this node.
        status: what its daemon knows.
        now: seconds since 1970.
    """
    if board is not None:
        yield from _of_job(summary(board, now), node)
    yield from _of_node(status)


def _of_job(told: Mapping[str, Any], node: str) -> Iterator[Value]:
    counted = dict.fromkeys(Signal, 0)
    for each in told["nodes"]:
        signal = Signal(each["signal"])
        if signal is not Signal.OFFLINE or each["holds_shards"]:
            counted[signal] += 1
        if each["node"] == node:
            yield from (("reft_node_signal", (str(s),), float(s is signal)) for s in Signal)
    yield from (("reft_nodes", (str(s),), float(n)) for s, n in counted.items())
    for speed in told["speeds"]:
        if speed["node"] == node:
            rank = str(speed["rank"])
            yield from (("reft_step_part_seconds", (rank, p), float(speed[f"{p}_secs"])) for p in STEP_PARTS)
    for slow in told["slow"]:
        labels = (str(slow["kind"]), str(slow["name"]))
        yield "reft_slow", labels, float(slow["factor"])
        yield "reft_slow_cost_seconds", labels, float(slow["cost_secs"])
    for use in told["memory"]:
        if use["node"] == node:
            yield "reft_memory_used_bytes", (str(use["name"]),), float(use["used_bytes"])
            yield "reft_memory_limit_bytes", (str(use["name"]),), float(use["limit_bytes"])
    for running_out in told["runs_out"]:
        if running_out["node"] == node:
            yield "reft_memory_full_seconds", (str(running_out["name"]),), float(running_out["in_secs"])
    counts = told["since_start"] or {}
    for cause, secs in (counts.get("lost_secs") or {}).items():
        yield "reft_lost_seconds_total", (cause,), float(secs)
    commit = told["newest_commit"]
    plain = {
        "reft_round": told["round"],
        "reft_step": told["step"],
        "reft_steps_per_second": told["steps_per_sec"],
        "reft_effective_training_ratio": counts.get("effective_ratio"),
        "reft_samples_per_second": counts.get("samples_per_sec"),
        "reft_model_tflops": counts.get("tflops"),
        "reft_committed_step": None if commit is None else commit["step"],
        "reft_commit_age_seconds": told["commit_age_secs"],
        "reft_commit_lag_steps": told["commit_lag_steps"],
        "reft_tolerance_nodes": told["tolerance"],
        "reft_tolerance_left_nodes": told["tolerance_left"],
        "reft_recoveries_total": told["restarts"],
    }
    yield from ((name, (), float(value)) for name, value in plain.items() if value is not None)
    if (last := told["last_recovery"]) is not None:
        yield from (("reft_last_recovery_seconds", (p,), float(secs)) for p, secs in last["secs"].items())


def _of_node(status: Mapping[str, Any]) -> Iterator[Value]:
    moved: dict[tuple[str, str], float] = {}
    for rank, trainer in (status.get("trainers") or {}).items():
        stats = trainer.get("stats") or {}
        for name, key in (
            ("reft_snapshot_seconds", "copy_secs_median"),
            ("reft_stall_seconds", "stall_secs_median"),
        ):
            if stats.get(key) is not None:
                yield name, (str(rank),), float(stats[key])
        for way, kinds in (stats.get("traffic") or {}).items():
            for kind, nbytes in kinds.items():
                moved[way, kind] = moved.get((way, kind), 0.0) + nbytes
    yield from (("reft_snapshot_bytes", labels, nbytes) for labels, nbytes in moved.items())
    yield "reft_versions_committed_total", (), float(status.get("commits") or 0)
    skipped = status.get("skipped") or {}
    for cause in sorted(skipped)[:_MOST_CAUSES]:
        yield "reft_versions_skipped_total", (cause,), float(skipped[cause])
    yield "reft_stale", (), float(status.get("stale_since_step") is not None)
    persist = status.get("persist") or {}
    if persist.get("dir"):
        if persist.get("last"):
            yield "reft_persisted_step", (), float(persist["last"]["step"])
        yield "reft_persist_lag_steps", (), float(persist.get("lag_steps") or 0)
        yield "reft_persist_stale", (), float(persist.get("stale_since_step") is not None)


class _Collector:
    """What prometheus_client asks."""

    def __init__(self, job_dir: JobDir, status: Callable[[], Mapping[str, Any]]) -> None:
        self._job_dir = job_dir
        self._status = status

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job, node = self._job_dir.job_id, self._job_dir.node
        families = {}
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            families[metric.name] = kind(metric.name, metric.help, labels=("job", "node", *metric.labels))
        for name, labels, value in values(self._board(), node, self._status(), time.time()):
            families[name].add_metric((job, node, *labels), value)
        return families.values()

    def _board(self) -> Board | None:
        return read_board(self._job_dir.path)


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECS

    def log_message(self, *args: Any) -> None:
        """Requests are no news."""


class _Server(WSGIServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics from %s failed", client_address, exc_info=True)


class MetricsServer:
    """Serves the metrics of one node, if the block asks for it.

    Args:
        job_dir: the job's memory on this node.
        status: what the node's daemon knows.
    """

    def __init__(self, job_dir: JobDir, status: Callable[[], Mapping[str, Any]]) -> None:
        self._collector = _Collector(job_dir, status)
        self._config = MetricsConfig()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._server: WSGIServer | None = None

    @property
    def port(self) -> int | None:
        """Where it serves; None while it does not."""
        return None if self._server is None else int(self._server.server_port)

    def configure(self, config: MetricsConfig) -> None:
        """Serve as the block says, from now on; does not wait. Another block later changes nothing."""
        with self._lock:
            if not config.port or self._config.port or self._ended.is_set():
                return
            self._config = config
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()

    def _serve(self) -> None:
        told = False
        place = f"{self._config.host} port {self._config.port}"
        while not self._ended.is_set():
            try:
                server = self._make()
            except ImportError:
                logger.warning(
                    "no metrics: the package prometheus-client is missing; pip install 'reft-ckpt[metrics]'"
                )
                return
            except (OSError, OverflowError) as error:
                if not told:
                    logger.warning(
                        "no metrics at %s: %s; it is tried again, training does not wait for it. Another "
                        "metrics.port, or metrics.host of this machine, may help",
                        place,
                        error,
                    )
                told = True
                self._ended.wait(_RETRY_SECS)
                continue
            with server:
                self._server = server
                logger.info("metrics for Prometheus are served at %s", place)
                server.serve_forever()
            return

    def _make(self) -> WSGIServer:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        registry.register(self._collector)
        return make_server(
            self._config.host,
            self._config.port,
            make_wsgi_app(registry),
            server_class=_Server,
            handler_class=_Handler,
        )
