"""The node daemon writes checkpoints: what is due, what memory cannot keep, and where there is no room (P3)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reft.config import PersistConfig, ReftConfig, parse_block
from reft.errors import OvertakenError
from reft.grid import Coordinate
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.node.client import DaemonClient, request
from reft.storage import fence
from reft.storage.persister import committed_labels
from tests.job.daemons import commit, request_status, wait_for

pytestmark = pytest.mark.process


def persist_status(job_dir: JobDir) -> dict:
    return request_status(job_dir)["persist"]


class FileWriter:
    """Writes a version's name into a file of the persist directory, and fails as the file system does: once it
    is let go, and what memory still holds."""

    def __init__(self, *, held: bool = False, before: Callable[[Label], object] = lambda label: None) -> None:
        self.calls: list[int] = []
        self.go = threading.Event()
        self._before = before
        if not held:
            self.go.set()

    def __call__(self, job_dir: JobDir, label: Label, config: ReftConfig, **_: object) -> Path:
        assert config.persist.dir is not None
        self.calls.append(label.step)
        assert self.go.wait(240)
        self._before(label)
        path = config.persist.dir / "checkpoint"
        with path.open("w") as file:
            file.write(str(label))
        return path


def persist_config(directory: Path, interval: int) -> ReftConfig:
    persist = PersistConfig(dir=directory, interval_steps=interval)
    return ReftConfig(enabled=True, job_id="job", persist=persist)


def test_what_the_ranks_agree_on_is_written_where_the_block_says_auto(
    job_dir: JobDir, run_here: Callable, tmp_path: Path
) -> None:
    """The daemon decides nothing then: what the note of a commit calls due is written, and the answer to a
    later one tells the trainer so."""
    writer = FileWriter()
    run_here(persist=writer)
    client = DaemonClient(job_dir.path, job_dir.secret)
    answers: list[dict] = []
    client.on_answer = lambda answer: answers.append(dict(answer))
    client.configure(parse_block({"persist": {"dir": str(tmp_path), "interval_steps": "auto"}}, {}))
    for step in (1, 2, 3, 4):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, due=step == 3)
        if step == 3:
            wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 3}, "step 3")
    wait_for(lambda: len(answers) == 4, "four answers")
    assert writer.calls == [3]
    well = {"failing": False, "overtaken": None}
    assert (answers[0], answers[3]) == ({"persisted": None, **well}, {"persisted": [1, 3], **well})
    client.close()


def test_p6_storage_is_well_where_memory_overtook_a_version_that_waited_for_its_turn(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next version that is due is written, and nobody hears of a storage that fails."""

    def in_memory(label: Label) -> None:
        if label not in committed_labels(job_dir) and label.step != 2:
            raise OvertakenError(f"no arena holds {label} any more")

    writer = FileWriter(held=True, before=in_memory)
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 2))
    commit(job_dir, 0, Label(1, 2))
    daemon.persister.offer(Label(1, 2))
    wait_for(lambda: writer.calls == [2], "the first version to be written")
    for step in (3, 4, 5, 6):  # of which the third arena keeps step 2, the others 5 and 6
        commit(job_dir, 1 + step % 2, Label(1, step))
        if step < 6:
            daemon.persister.offer(Label(1, step))
    writer.go.set()
    wait_for(lambda: persist_status(job_dir)["overtaken"] == {"incarnation": 1, "step": 4}, "step 4")
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["error"]) == (None, None)
    assert status["last"] == {"incarnation": 1, "step": 2}
    assert status["lag_steps"] == 1, "from step 4, which was due, to step 5"
    daemon.persister.offer(Label(1, 6))
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    assert not [r for r in caplog.records if "cannot be persisted" in r.getMessage()]
    assert len([r for r in caplog.records if "memory moved past step 4" in r.getMessage()]) == 1
    # Where no version is left for long enough there are no new checkpoints, and that is told.
    for step in (8, 10):
        daemon.persister.offer(Label(1, step))
        wait_for(lambda s=step: persist_status(job_dir)["overtaken"] == {"incarnation": 1, "step": s}, "it")
    wait_for(lambda: persist_status(job_dir)["stale_since_step"] == 8, "the second in a row")


def test_p6_a_write_that_the_next_start_of_this_very_job_refuses_ends_no_node(
    job_dir: JobDir, run_here: Callable, tmp_path: Path
) -> None:
    """The job starts anew, and claims the directory, while the daemon still writes a version of the start
    before: the node takes part in the new start and goes on. One of a start that it knows nothing of ends it."""

    def is_overtaken(label: Label) -> None:
        fence.claim(tmp_path, "job", label.step)
        fence.check(tmp_path, "job", 1)

    def told(incarnation: int) -> str:
        answer: str = request(job_dir.path, job_dir.secret, "fenced", incarnation=incarnation)
        return answer

    run_here(persist=FileWriter(before=is_overtaken))
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(persist_config(tmp_path, 2))
    commit(job_dir, 0, Label(1, 2))
    client.notify_commit(Label(1, 2), Coordinate(0, 0, 0), {})
    wait_for(lambda: "start 2 of job" in told(1), "the older start to be refused")
    assert told(2) == ""
    job_dir.note_incarnation(2)
    assert told(1) == ""
    assert persist_status(job_dir)["stale_since_step"] == 2
    client.close()


@pytest.mark.integration
def test_a_full_directory_is_told_retried_and_forgotten_when_there_is_room(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P6: training goes on, the status says since when checkpoints are stale."""
    full = tmp_path / "persist"
    full.mkdir()
    (full / "checkpoint").symlink_to("/dev/full")  # every write: no space left on device
    writer = FileWriter()
    run_here(persist=writer)
    client = DaemonClient(job_dir.path, job_dir.secret)
    client.configure(persist_config(full, 2))
    commit(job_dir, 0, Label(1, 2))
    client.notify_commit(Label(1, 2), Coordinate(0, 0, 0), {})
    wait_for(lambda: persist_status(job_dir)["attempts"] >= 2, "a second attempt")
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["last"]) == (2, None)
    assert "No space left" in status["error"]
    # The version is overwritten meanwhile: the next one that is due is tried.
    commit(job_dir, 0, Label(1, 3))
    commit(job_dir, 1, Label(1, 4))
    client.notify_commit(Label(1, 4), Coordinate(0, 0, 0), {})
    wait_for(lambda: 4 in writer.calls, "the next version")
    assert persist_status(job_dir)["stale_since_step"] == 2
    assert client.persist_now(Label(1, 4), 5.0) is None
    (full / "checkpoint").unlink()
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 4}, "recovery")
    status = persist_status(job_dir)
    assert (status["stale_since_step"], status["error"], status["attempts"]) == (None, None, 0)
    warnings = [r for r in caplog.records if "cannot be persisted" in r.message]
    assert len(warnings) == 1  # once per cause
    client.close()


def test_p3_what_memory_cannot_keep_is_persisted_at_once(
    job_dir: JobDir, run_here: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tolerance has fallen to 0: the first such version, on every node the same, whatever the interval."""
    writer = FileWriter()
    daemon = run_here(persist=writer)
    daemon.persister.configure(persist_config(tmp_path, 0))
    client = DaemonClient(job_dir.path, job_dir.secret)
    for step, unprotected in ((1, False), (2, True), (3, True)):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, unprotected=unprotected)
        wait_for(lambda s=step: daemon.status.last_committed == Label(1, s), "the commit")
        if step > 1:
            wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 2}, "step 2")
    # A slower trainer of the node tells of an older version.
    client.notify_commit(Label(1, 1), Coordinate(0, 1, 0), {}, unprotected=False)
    commit(job_dir, 0, Label(1, 4))
    client.notify_commit(Label(1, 4), Coordinate(0, 0, 0), {}, unprotected=True)
    wait_for(lambda: daemon.status.last_committed == Label(1, 4), "the commit")
    assert writer.calls == [2]
    assert any("no longer survives the loss of a node: step 2" in r.getMessage() for r in caplog.records)
    # Protected again, and lost again.
    for step, unprotected in ((5, False), (6, True)):
        commit(job_dir, step % 2, Label(1, step))
        client.notify_commit(Label(1, step), Coordinate(0, 0, 0), {}, unprotected=unprotected)
    wait_for(lambda: persist_status(job_dir)["last"] == {"incarnation": 1, "step": 6}, "step 6")
    assert writer.calls == [2, 6]
    client.close()
