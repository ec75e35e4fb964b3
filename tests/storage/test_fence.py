"""P3 on shared storage: at every instant of writing a checkpoint ``latest`` names one that is whole, and whoever was
stopped in the middle, and goes on after a later start of the job has written its own, changes nothing that is read
afterwards."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from reft.errors import PersistError
from reft.grid import Degrees, VersionId
from reft.storage import fence
from reft.storage.persisted import (
    FileRecord,
    PersistedInfo,
    check_files,
    file_checksum,
    find_markers,
    format_tag,
    job_directory,
    latest_tag,
    list_persisted,
)
from reft.storage.publish import WorkDir, publish, remove_debris
from tests.storage.job_memory import latest_persisted, verify_persisted

EVENTS = ("open", "os.", "shutil.", "ctypes.call_function")
"""Beginnings of the audit events by which the interpreter tells of everything that touches a file system."""


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """In memory, where to flush costs nothing."""
    tmpfs = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="reft-fence-", dir=tmpfs) as made:
        yield Path(made)


def write(directory: Path, label: VersionId) -> None:
    fence.claim(directory, JOB, label.incarnation)
    remove_debris(WorkDir.of(directory, JOB, label))
    publish(*prepare(directory, label), keep=1)


def stop_at(number: int) -> None:
    """Stop this process before its operation ``number`` on the file system."""
    seen = 0

    def count(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(EVENTS):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(count)


def stopped_while(work: Callable[[], None], number: int) -> int | None:
    """A process that does ``work`` and stands still before its operation ``number``; None if it has fewer."""
    pid = os.fork()
    if pid == 0:
        try:
            stop_at(number)
            work()
        except Exception:
            os._exit(1)
        finally:
            os._exit(0)
    if os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
        return pid
    return None


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    os.waitpid(pid, 0)


def state(directory: Path) -> tuple[VersionId, str | None]:
    return max(i.label for i in list_persisted(directory, JOB)), latest_tag(directory)


def whole(directory: Path) -> set[str]:
    """The checkpoints, if all are as they were written."""
    found = list_persisted(directory, JOB)
    return set() if any(check_files(i.path, i.files) for i in found) else {i.tag for i in found}


QUICK = {(4, 12, True, True), (4, 8, False, True), (8, 4, True, False), (8, 8, False, False)}
CASES = [
    pytest.param(case, id=str(case), marks=() if case in QUICK else (pytest.mark.nightly,))
    for case in product((4, 8), (4, 8, 12), (True, False), (True, False))
    if case[:2] not in ((4, 4), (8, 12))
]


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_stopped_at_any_operation_the_older_start_changes_nothing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[int, int, bool, bool]
) -> None:
    """Start 1 has written step ``first``, start 2 is stopped while it writes step 8; start 3 claims the
    directory, and may write step ``newer``. Start 2 goes on. ``exchange``: how directories are replaced."""
    first, newer, publishes, exchange = case
    if not exchange:
        monkeypatch.setattr("reft.storage.publish.exchange", lambda a, b: False)
    wrong = []
    number = 0
    while True:
        number += 1
        directory = memory_path / str(number)
        directory.mkdir()
        write(directory, VersionId(1, first))
        pid = stopped_while(lambda at=directory: write(at, VersionId(2, 8)), number)
        if pid is None:
            break
        try:
            # As SIGKILL there would leave it. Without an exchange what is replaced has a name aside for an instant.
            there = whole(directory)
            assert latest_tag(directory) in there or (there and not exchange), (
                f"stopped at {number}"
            )
            fence.claim(directory, JOB, 3, alone=True)
            if publishes:
                write(directory, VersionId(3, newer))
                assert latest_tag(directory) == f"global_step{newer}"
            before = state(directory)
        finally:
            go_on(pid)
        after = state(directory)
        if before != after or latest_tag(directory) not in whole(directory):
            wrong.append(
                f"stopped at {number}: {before} has become {after}, whole: {whole(directory)}"
            )
        # The next one cleans up.
        write(directory, VersionId(4, 16))
        debris = [name for name in names(directory) if name.startswith(".")]
        assert (latest_tag(directory), debris) == ("global_step16", []), f"stopped at {number}"
    assert number > 30
    assert wrong == []


JOB = "job-a"


def prepare(directory: Path, label: VersionId, job_id: str = JOB) -> tuple[WorkDir, PersistedInfo]:
    work = WorkDir.of(directory, job_id, label)
    work.scripts.mkdir(parents=True)
    (work.scripts / "zero_to_fp32.py").write_text("# script")
    (work.root / "mp_rank_00_model_states.pt").write_text(f"state of {label} of {job_id}")
    files = {
        p.name: FileRecord(p.stat().st_size, file_checksum(p))
        for p in work.root.iterdir()
        if p.is_file()
    }
    info = PersistedInfo(
        directory, format_tag(label), job_id, label, Degrees(1, 1, 1), time.time(), {}, files
    )
    return work, info


def publish_version(directory: Path, label: VersionId, *, keep: int = 2, job_id: str = JOB) -> None:
    publish(*prepare(directory, label, job_id), keep)


def state_of(info: PersistedInfo | None) -> str:
    assert info is not None
    assert verify_persisted(info.directory, info.tag) == []
    return (info.path / "mp_rank_00_model_states.pt").read_text()


def names(directory: Path) -> list[str]:
    """What lies there beside the claim."""
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith(".incarnation-"))


def test_keep_removes_the_oldest_of_this_job_only(tmp_path: Path) -> None:
    publish_version(tmp_path, VersionId(1, 1), job_id="other")
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "global_step2" / "mp_rank_00_model_states.pt").write_text("the user's")
    for step in (3, 4, 5, 6):
        publish_version(tmp_path, VersionId(1, step), keep=2)
    tags = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert tags == ["global_step1", "global_step2", "global_step5", "global_step6"]
    # A later incarnation that resumed further back: what lies ahead does not crowd out what it falls back to.
    publish_version(tmp_path, VersionId(2, 4), keep=2)
    assert latest_tag(tmp_path) == "global_step4"
    assert [i.label for i in list_persisted(tmp_path, JOB)] == [
        VersionId(1, 5),
        VersionId(1, 6),
        VersionId(2, 4),
    ]
    for step in (5, 6, 7):
        publish_version(tmp_path, VersionId(2, step), keep=2)
    assert [i.label for i in list_persisted(tmp_path, JOB)] == [VersionId(2, 6), VersionId(2, 7)]


def test_a_node_that_was_cut_off_cannot_overwrite_its_successors(tmp_path: Path) -> None:
    publish_version(tmp_path, VersionId(2, 4))
    for stale in (VersionId(1, 4), VersionId(1, 9), VersionId(2, 3)):
        work, info = prepare(tmp_path, stale)
        with pytest.raises(PersistError, match="refused"):
            publish(work, info, 2)
        assert latest_tag(tmp_path) == "global_step4"
        assert [i.label for i in list_persisted(tmp_path)] == [VersionId(2, 4)]


def test_p7_what_reft_or_this_job_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    publish_version(tmp_path, VersionId(1, 8), job_id="one")
    with pytest.raises(
        PersistError, match="is a checkpoint of job one; job two does not replace it"
    ):
        publish_version(tmp_path, VersionId(3, 8), job_id="two")
    assert state_of(latest_persisted(tmp_path, "one")) == "state of step 8 (incarnation 1) of one"
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mine.pt").write_text("precious")
    with pytest.raises(PersistError, match="was not written by reft"):
        publish_version(tmp_path, VersionId(1, 4))
    assert (tmp_path / "global_step4" / "mine.pt").read_text() == "precious"


def test_damage_is_found_and_an_older_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    publish_version(tmp_path, VersionId(1, 4))
    publish_version(tmp_path, VersionId(1, 8))
    state = tmp_path / "global_step8" / "mp_rank_00_model_states.pt"
    content = bytearray(state.read_bytes())
    content[3] ^= 1
    state.write_bytes(content)
    problems = verify_persisted(tmp_path)
    assert len(problems) == 1
    assert "mp_rank_00_model_states.pt: checksum" in problems[0]
    state.write_bytes(content[:-1])
    assert latest_persisted(tmp_path, JOB).label == VersionId(1, 4)  # type: ignore[union-attr]
    state.unlink()
    assert latest_persisted(tmp_path).label == VersionId(1, 4)  # type: ignore[union-attr]
    assert "No such file" in verify_persisted(tmp_path, "global_step8")[0]
    (tmp_path / "global_step4" / "reft.json").write_text("{")
    assert latest_persisted(tmp_path) is None


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b"])
def test_p7_a_job_directory_lies_in_the_persist_directory(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(PersistError, match="cannot name a directory"):
        job_directory(tmp_path, job_id)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            b"mp_rank_00_model_states.pt",
            b"../global_step4/reft.json",
            "is not a file of the checkpoint",
        ),
        (b'"format": 1', b'"format": 1, \xff\xfe', "is not a marker"),
        (b"}", b"", "is not a marker"),
    ],
    ids=["files elsewhere", "no text", "torn"],
)
def test_p5_p6_a_wrong_marker_is_a_problem_and_no_more(
    tmp_path: Path, old: bytes, new: bytes, said: str
) -> None:
    publish_version(tmp_path, VersionId(1, 4))
    publish_version(tmp_path, VersionId(1, 8))
    marker = tmp_path / "global_step8" / "reft.json"
    marker.write_bytes(marker.read_bytes().replace(old, new))
    found, problems = find_markers(tmp_path, JOB)
    assert [i.label for i in found] == [VersionId(1, 4)]
    assert said in problems[0]
    assert latest_persisted(tmp_path).label == VersionId(1, 4)  # type: ignore[union-attr]
