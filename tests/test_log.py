"""Every log line of reft begins with the job, the rank and the step."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import reft
import reft_etcd
import reft_mpi
from reft import log
from reft.durable import whole_file, write_durably
from reft.env import ENV_EVENTS

SCRIPT = """
import logging, sys
from reft import log
if "basic" in sys.argv:
    logging.basicConfig(format="[program] %(message)s")
if "stderr" in sys.argv:
    log.to_stderr()
log.install()
log.install()
logger = logging.getLogger("reft.engine.session")
logger.warning("before %s", "all")
log.set_place("job%s", "pp0.dp1.tp0", 7)
logger.warning("100% without arguments")
logger.warning("%d %% with arguments", 100)
log.set_step(8)
logger.info("not a warning")
logging.getLogger("else").warning("of others")
"""


@pytest.mark.process
@pytest.mark.parametrize("program", ["silent", "basic", "stderr"])
def test_lines_begin_with_job_rank_and_step(program: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    mark = "[program] " if program == "basic" else ""
    expected = [
        "reft: before all",
        "reft [job%s/pp0.dp1.tp0 step 7] 100% without arguments",
        "reft [job%s/pp0.dp1.tp0 step 7] 100 % with arguments",
        *(["reft [job%s/pp0.dp1.tp0 step 8] not a warning"] if program == "stderr" else []),
        "of others",
    ]
    assert found.stderr.splitlines() == [mark + line for line in expected]


def test_modules_that_are_run_with_m_log_under_their_own_name() -> None:
    """There ``__name__`` is "__main__", whose lines get neither prefix nor level."""
    packages = [Path(package.__file__ or "").parent for package in (reft, reft_etcd, reft_mpi)]
    texts = {path: path.read_text() for package in packages for path in package.rglob("*.py")}
    run = [path for path, text in texts.items() if '__name__ == "__main__"' in text]
    assert run
    assert not [path for path in run if "getLogger(__name__)" in texts[path]]


@pytest.mark.process
@pytest.mark.parametrize(
    ("level", "lines"), [("INFO", 2), ("warning", 1), ("ERROR", 0), ("loud", 3)]
)
@pytest.mark.parametrize("program", ["silent", "basic"])
def test_reft_loglevel_is_for_trainers_too(program: str, level: str, lines: int) -> None:
    """Whatever the program's own logging lets through."""
    script = SCRIPT.partition("log.set_place")[0] + "logger.info('information')"
    found = subprocess.run(
        [sys.executable, "-c", script, program],
        env={**os.environ, "REFT_LOGLEVEL": level},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said = found.stderr.splitlines()
    assert said[-2:] == ["reft: before all", "reft: information"][: min(lines, 2)]
    if level == "loud":
        assert "REFT_LOGLEVEL is 'loud'; write DEBUG, INFO, WARNING or ERROR" in said[0]


def test_a_level_that_is_none_is_said_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a launcher the first time; daemons and trainers inherit what it takes instead."""
    logger = logging.getLogger("reft")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setenv("REFT_LOGLEVEL", "loud")
    for _ in range(2):
        log.to_stderr()
    assert capsys.readouterr().err.count("REFT_LOGLEVEL is 'loud'") == 1
    assert os.environ["REFT_LOGLEVEL"] == "INFO"


@pytest.mark.process
def test_lines_go_to_the_stderr_of_their_moment() -> None:
    """A thread may log when the one that was there at the start is closed."""
    script = (
        "import io, logging, sys; from reft import log; then = sys.stderr = io.StringIO(); log.to_stderr(); "
        "sys.stderr = sys.__stderr__; then.close(); logging.getLogger('reft.memory').warning('refused')"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stderr.splitlines() == ["reft: refused"]


def test_other_handlers_get_the_prefix_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)
    monkeypatch.setattr(logging.getLogger(log.NAME), "handlers", [log.PrefixHandler()])
    log.set_place("job", "daemon n0")
    logging.getLogger("reft.memory").warning("full: %s", "/tmp")
    log.set_place("", "")
    assert [record.getMessage() for record in caplog.records] == ["reft [job/daemon n0] full: /tmp"]


def test_p6_events_that_cannot_be_written_are_lost_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_EVENTS, "/proc/no-such-place")
    log.EventLog(0).write("commit", step=1)
    monkeypatch.setenv(ENV_EVENTS, str(tmp_path))
    (tmp_path / f"reft-1-{os.getpid()}.jsonl").symlink_to("/dev/full")
    events = log.EventLog(1)
    for step in (1, 2):
        events.write("commit", step=step)
    events.write("odd", value=object())
    said = [record.levelname for record in caplog.records if record.name == "reft.log"]
    assert said == ["WARNING", "WARNING"], "once each"


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_durably(path, b"old")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"new, but not")
            assert path.read_bytes() == b"old"
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    with whole_file(tmp_path / "secret", mode=0o600, sync=False) as file:
        assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_draft_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "latest"
    draft = f".latest.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.new"
    (tmp_path / draft).symlink_to(elsewhere)
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert not elsewhere.exists()


def test_of_several_that_do_not_replace_one_another_the_first_stays(tmp_path: Path) -> None:
    path, begun = tmp_path / "secret", threading.Barrier(8)
    found = []

    def write(number: int) -> None:
        begun.wait(60)
        with whole_file(path, replace=False) as file:
            file.write(bytes([number]) * 4096)
        found.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert set(found) == {path.read_bytes()}
    assert len(set(path.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [path]
