"""Settings of the whole suite."""

from __future__ import annotations

import _posixsubprocess
import json
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.local_cluster import LocalCluster, use_own_extensions
from reft.job.local import LocalNodes
from tests import prefork
from tests.tiers import ENV_FAILURES

# Two busy cores: how long an example takes says nothing, and no test asserts a time. The examples are the same
# in every run, so that a change is what breaks a test; REFT_RANDOM_EXAMPLES=1 (make nightly) draws new ones.
settings.register_profile(
    "reft", deadline=None, derandomize="REFT_RANDOM_EXAMPLES" not in os.environ
)
settings.load_profile("reft")

# Launchers of the tests know each other by a secret of this run, which workers of pytest-xdist inherit: the
# user's own is none of their business, and there may be no home directory to make one in.
os.environ.setdefault("REFT_SECRET", secrets.token_hex(32))

# Trainers of the suite are forked already (tests/prefork.py); what imports ahead for one node has tests of its own.
os.environ.setdefault("REFT_WARM", "0")

# What tests compile, and the locks of those that are killed meanwhile, are none of the user's.
use_own_extensions()

LocalCluster.popen = LocalNodes.popen = prefork.Popen

# Started in the background by a shell, this process ignores SIGINT, and so would all its children;
# tests that press Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _environment_and_signals_are_kept() -> Iterator[None]:
    """A command that is called within a test may set variables for the processes it was to start, and ignore
    signals at its end: neither must reach the tests that follow, whose processes would inherit both."""
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    yield
    if os.environ != variables:
        os.environ.clear()
        os.environ.update(variables)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


# -- markers: a test that starts a process says so ---------------------------------------------------

SECS_WITHOUT_PROCESS = 60
_started: list[str] = []
"""What this process has started since the test began. Libraries that ask the linker are not meant."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started.append(event)
    elif event == "subprocess.Popen" and not str(arguments[0]).endswith(
        ("ldconfig", "gcc", "cc", "ld", "uname")
    ):
        _started.append(f"{event} {arguments[0]}")


def _fork_exec(*arguments: Any) -> int:
    _started.append("multiprocessing")
    return int(_really_fork_exec(*arguments))


sys.addaudithook(_note)
_really_fork_exec, _posixsubprocess.fork_exec = _posixsubprocess.fork_exec, _fork_exec
prefork.on_start.append(lambda program: _started.append(f"forked {program}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("integration"):
            item.add_marker("process")
        if not any(map(item.get_closest_marker, ("process", "nightly", "timeout"))):
            item.add_marker(pytest.mark.timeout(SECS_WITHOUT_PROCESS), append=False)
    # Two files run at a time. Those that take long begin first, or the last one would run alone.
    with_process = {item.path for item in items if item.get_closest_marker("process")}
    tests = Counter(item.path for item in items)
    # Last those that keep a process group: DeepSpeed cannot make another one in the same process.
    keeps_group = {item.path for item in items if "_world" in getattr(item, "fixturenames", ())}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        return item.path in keeps_group, item.path not in with_process, -tests[item.path]

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The simulated device is compiled here, where nobody counts processes and seconds, and loaded: autograd
    makes a queue for each device that it knows at its first use."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if (
        fixtures & {"sim", "vendor", "device", "case", "at_hand"}
        and not session.config.option.collectonly
    ):
        from tests.device.simulated import missing, simulated

        if not missing():
            simulated()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    if _started and not any(map(item.get_closest_marker, ("process", "nightly"))):
        pytest.fail(
            f"the test starts a process ({_started[0]}): mark it with pytest.mark.process",
            pytrace=False,
        )
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures for tests/tiers.py, which runs them again; workers of xdist leave it to their controller."""
    if report.failed and ENV_FAILURES in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[ENV_FAILURES], "a") as out:
            text = report.longreprtext + "".join(
                f"\n-- {name}\n{content}" for name, content in report.sections
            )
            out.write(json.dumps([report.nodeid, text]) + "\n")
