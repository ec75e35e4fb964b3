"""What Prometheus is told: stable names, on loopback, and never at training's cost."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from math import exp, sin
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reft.config import MetricsConfig, parse_block
from reft.grid import VersionId
from reft.memory.jobdir import JobDir, write_json
from reft.node.client import TrainerReport
from reft.node.daemon import NodeStatus
from reft.node.history import STARTED, note
from reft.node.memory_watch import (
    MemoryForecast,
    MemorySample,
    MemoryTrend,
    fullest,
)
from reft.node.metrics import METRICS, MetricsServer
from reft.node.observer import NodeObserver
from reft.node.progress import DeviceUse, ProgressPage
from reft.node.report import (
    BOARD_FILE,
    NodeReport,
)
from reft.storage.persister import PersistStatus
from tests.commands import command
from tests.job.daemons import wait_for
from tests.machine import Clock, free_port
from tests.node.boards import make_board

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(reft_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir.open_or_create(tmp_path, "job", "a", secret=b"s" * 32)
    write_json(job.path / BOARD_FILE, make_board().model_dump(mode="json"))
    return job


@pytest.fixture
def status(job: JobDir) -> NodeStatus:
    status = NodeStatus(job.path, {}, PersistStatus())
    status.add_commit(VersionId(1, 7))
    traffic = {"to_host": {"shard": 100}, "sent": {"owned": 7}}
    for rank in range(2):
        stats = {"copy_secs_median": 0.25, "stall_secs_median": 0.001, "traffic": traffic}
        if rank == 0:
            stats |= {"skipped": {"no memory": 1}, "stale_since_step": 8}
        status.set_report(rank, TrainerReport(1, stats=stats))
    status.persist.update(dir="/disk", last=VersionId(1, 5), lag_steps=2)
    return status


@pytest.fixture
def server(job: JobDir, status: NodeStatus) -> Iterator[MetricsServer]:
    made = MetricsServer(job, status.snapshot)
    yield made
    made.close()


def wait_until_served(server: MetricsServer) -> int:
    wait_for(lambda: server.url is not None, "the server")
    return urlsplit(server.url).port or 0


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        return str(page.read().decode())


def test_what_is_exposed_is_what_the_table_says(server: MetricsServer) -> None:
    server.configure(MetricsConfig(port=free_port()))
    families = list(text_string_to_metric_families(scrape(wait_until_served(server))))
    exposed = {}
    for family in families:
        (name,) = {sample.name for sample in family.samples}
        labels = tuple(k for k in family.samples[0].labels if k not in ("job", "node"))
        assert {(s.labels["job"], s.labels["node"]) for s in family.samples} == {("job", "a")}
        exposed[name] = (family.type, labels, family.documentation)
    told = (ROOT / "docs" / "monitoring.md").read_text()
    table = {
        name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels))), meaning)
        for name, kind, labels, meaning in ROW.findall(told)
    }
    assert exposed == table, "the table in docs/monitoring.md"
    assert exposed.keys() == METRICS.keys()


def test_p6_a_port_that_is_taken_is_said_once(
    server: MetricsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.configure(parse_block({}).metrics)
    assert server.url is None, "P10: nothing listens without the key"
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.WARNING):
        port = other.getsockname()[1]
        for _ in range(3):
            server.configure(MetricsConfig(port=port))
        wait_for(lambda: caplog.messages, "the warning")
        (said,) = caplog.messages
        assert f"no metrics at 127.0.0.1 port {port}" in said
        assert "training does not wait" in said
        assert server.problem is not None
        assert server.problem.startswith(f"127.0.0.1 port {port}: ")
    assert server.url is None


def test_p11_strangers_who_are_silent_or_talk_nonsense_shut_nobody_out(
    server: MetricsServer,
) -> None:
    server.configure(MetricsConfig(port=free_port()))
    port = wait_until_served(server)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for junk in (
        b"\xff" * 10_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
        b"POST / HTTP/1.0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(junk)
    assert "reft_step" in scrape(port)
    for connection in silent:
        connection.close()


def test_the_page_is_served_with_what_the_status_command_prints(
    tmp_path: Path, server: MetricsServer
) -> None:
    server.configure(MetricsConfig(port=free_port()))
    address = f"http://127.0.0.1:{wait_until_served(server)}/"
    with urllib.request.urlopen(address, timeout=60) as page:
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"<title>reft status</title>" in page.read()
    with urllib.request.urlopen(f"{address}status.json", timeout=60) as page:
        served = json.load(page)
    printed = command("status", "--memory-dir", tmp_path, "--json").json
    assert served.pop("commit_age_secs") <= printed.pop("commit_age_secs")
    assert served == printed


@pytest.mark.process
def test_p11_a_browser_shows_the_page_and_takes_no_text_of_the_job_for_html(
    job: JobDir, server: MetricsServer, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    failure = "<img src=x onerror=alert(1)> failed"
    facts = {"nodes": ["a"], "lost": [], "joined": [], "newest_step": 5}
    note(job.path, STARTED, round=1, failures=[], gathering_secs=None, **facts)
    note(job.path, STARTED, round=2, failures=[failure], gathering_secs=1.5, **facts)
    server.configure(MetricsConfig(port=free_port()))
    address = f"http://127.0.0.1:{wait_until_served(server)}/"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--no-first-run", "--virtual-time-budget=10000", "--dump-dom"]
    words = [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", address]
    shown = subprocess.run(words, check=True, capture_output=True, text=True, timeout=240).stdout
    assert "snapshot done" in shown
    assert "step 7" in shown
    assert "&lt;img src=x onerror=alert(1)&gt; failed" in shown
    assert "<img" not in shown


@pytest.mark.parametrize("torn", [b"", b"{ torn", b"[" * 100_000])
def test_p6_files_that_cannot_be_read_leave_figures_out(
    job: JobDir, server: MetricsServer, torn: bytes
) -> None:
    (job.path / BOARD_FILE).write_bytes(torn)
    server.configure(MetricsConfig(port=free_port()))
    page = scrape(wait_until_served(server))
    assert "reft_versions_committed_total{" in page
    assert "reft_step{" not in page


def test_the_dashboard_and_the_alerts_ask_for_what_is_exposed() -> None:
    for name in ("grafana.json", "alerts.yml"):
        asked = set(re.findall(r"\breft_\w+", (ROOT / "monitoring" / name).read_text()))
        assert asked <= METRICS.keys()
        assert len(asked) > 5


MIB, LIMIT = 2**20, 1000 * 2**20
Use = Callable[[int], float]  # MiB in use at a second


def watched(
    use: Use, secs: int, *, noise: float = 0.0, seed: int = 0
) -> list[tuple[int, MemoryForecast]]:
    """When what is said, one look a second at a job of two steps a second."""
    trend, found = MemoryTrend(), []
    draw = random.Random(seed)
    for now in range(secs):
        used = round((use(now) + draw.gauss(0.0, noise)) * MIB)
        parts = {"rank 0 (pid 1)": 100 * MIB, "rank 1 (pid 2)": used - 100 * MIB}
        trend.add(MemorySample(now, 2 * now, used, parts), LIMIT)
        if (said := trend.forecast("the host", LIMIT, steps_per_sec=2.0)) is not None:
            found.append((now, said))
    return found


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("from the start", lambda s: 400 + 2.0 * s),
        ("ever faster", lambda s: 300 + 0.01 * s * s),
        ("after half an hour", lambda s: 400 + max(0, s - 1800) * 2.0),
        ("in blocks", lambda s: 400 + 10 * (s // 5)),
        ("slowly", lambda s: 600 + 0.2 * s),
    ],
)
def test_what_runs_out_is_said_before_with_its_time_its_step_and_its_culprit(
    name: str, use: Use, noise: float
) -> None:
    full = next(s for s in range(100_000) if use(s) >= LIMIT / MIB)
    found = watched(use, full, noise=noise)
    assert found
    when, first = found[0]
    assert full - when > 0.1 * (full - (1800 if name == "after half an hour" else 0)), (
        "said too late"
    )
    assert first.who.startswith("rank 1 (pid 2) takes ")
    # It is said ever better: half way from there within a quarter.
    now, later = min(found, key=lambda f: abs(f[0] - (when + full) / 2))
    assert later.in_secs == pytest.approx(full - now, rel=0.5 if name == "ever faster" else 0.25)
    assert later.step == pytest.approx(2 * (now + later.in_secs), abs=2)
    assert "near step" in str(later)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (10.0, 1)])
@pytest.mark.parametrize(
    "use",
    [
        lambda s: 900.0,
        lambda s: 500 + 400 * (1 - exp(-s / 20)) * 0.9,  # levels off
        lambda s: 600 + 20 * sin(s / 40),
        lambda s: 400 + 400 * (s > 300),  # an evaluation's buffers, kept
        lambda s: 400 + 200 * (s > 100) + 200 * (s > 500) + 100 * (s > 900),
        lambda s: 500 + 100 * (s % 600 > 540),
        lambda s: 500 + 0.002 * s,  # full after three days: an hour says nothing of that
    ],
)
def test_nothing_is_said_of_a_steady_job(use: Use, noise: float, seed: int) -> None:
    assert watched(use, 3600, noise=noise, seed=seed) == []


def test_what_becomes_free_again_is_not_said_any_more() -> None:
    found = watched(lambda s: 400 + 3.0 * s if s < 100 else 400.0, 400)
    assert 0 < found[-1][0] < 101
    # What goes up and down is said in its first turn at most.
    assert watched(lambda s: 300 + 3.0 * (s % 100), 3600)[-1][0] <= 100


def test_memory_that_nobody_of_the_job_takes_accuses_nobody() -> None:
    trend = MemoryTrend()
    for now in range(60):
        trend.add(
            MemorySample(now, now, (500 + 5 * now) * MIB, {"rank 0 (pid 1)": 400 * MIB}), LIMIT
        )
    said = trend.forecast("the host", LIMIT, steps_per_sec=None)
    assert said is not None
    assert (said.who, said.step) == ("", None)
    assert "No process of the job is known to grow" in str(said)


@pytest.fixture
def job_dir(tmp_path: Path) -> JobDir:
    return JobDir.open_or_create(tmp_path, "job", "node0", secret=b"s" * 32)


def test_every_node_tells_of_its_memory_and_of_its_devices(
    job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("reft.node.memory_watch.time", clock)
    page = ProgressPage(job_dir.path, 0, 5, 10.0, 600.0)
    page.begin_step()
    watch, mine = (
        NodeObserver(job_dir.path, has_daemon=False),
        NodeReport(node="node0", domain="node0"),
    )
    assert watch.poll(mine).memory == ()
    page.end_step(1)
    page.set_device(DeviceUse(1000, 100, 700))
    clock.sleep(0.6)  # it looks twice a second at most
    report = watch.poll(mine)
    device = next(use for use in report.memory if use.device)
    assert (device.name, device.peak_bytes, device.limit_bytes) == (
        "the device of rank 5",
        700,
        1000,
    )
    host = fullest(report.memory)
    assert host is not None
    assert not host.device
    page.close()
