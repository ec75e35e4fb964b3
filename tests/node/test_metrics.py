"""What Prometheus is told: stable names, on loopback, and never at training's cost."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
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
from reft.node.metrics import METRICS, MetricsServer
from reft.node.report import (
    BOARD_FILE,
)
from reft.storage.persister import PersistStatus
from tests.commands import command
from tests.job.daemons import wait_for
from tests.machine import free_port
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
