"""`reft inspect`, `verify` and `clean` on the memory of a dead job, in real directories."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from reft.errors import ArenaError
from reft.grid import Degrees, Topology, VersionId
from reft.memory.arena import Arena
from reft.memory.header import Entry
from reft.memory.jobdir import JobDir
from reft.storage.inspect import find_job_dirs, inspect_job
from tests.commands import command
from tests.recover.fleet import SECRET, Fleet

OLD, NEW = VersionId(1, 7), VersionId(1, 8)
DEGREES = Degrees(1, 2, 1)
FLEET = Fleet(
    Topology(DEGREES, DEGREES.coordinates(), ("node0", "node1")),
    block_bytes=4096,
    scale=32,
    job_id="job",
)


class JobMemory:
    """A directory per node. Step 7 is committed, step 8 was being written when the job died."""

    def __init__(self, root: Path) -> None:
        self.memory_dirs = [root / node for node in FLEET.topology.nodes]
        self.jobs = [
            JobDir.open_or_create(path, "job", path.name, SECRET) for path in self.memory_dirs
        ]
        for member, at in enumerate(DEGREES.coordinates()):
            for slot, label in enumerate((OLD, NEW)):
                written = FLEET.write_arena(root / "drafts", at, label, slot)
                written.rename(self.path(member, slot))
            with self.arena(member, 1) as arena:
                arena.begin(FLEET.header(at, NEW))

    def path(self, member: int, slot: int) -> Path:
        return self.jobs[member].path / f"rank0-slot{slot}.arena"

    def arena(self, member: int, slot: int) -> Arena:
        return Arena.open(self.path(member, slot), SECRET, writable=True)

    def flip(self, member: int, slot: int, entry: Entry) -> None:
        with self.arena(member, slot) as arena:
            arena.data[entry.arena_offset] ^= 1

    def entries(self, member: int, slot: int) -> tuple[Entry, ...]:
        with self.arena(member, slot) as arena:
            header = arena.header()
            return header.entries


@pytest.fixture
def memory(tmp_path: Path) -> JobMemory:
    return JobMemory(tmp_path)


def dirs(memory: JobMemory) -> list[Path]:
    return [job.path for job in memory.jobs]


def run(*arguments: str | Path) -> tuple[int, str]:
    answer = command(*arguments)
    return answer.code, answer.out + answer.err


def run_json(*arguments: str | Path) -> tuple[int, Any]:
    answer = command(*arguments, "--json")
    return answer.code, answer.json


def options(memory: JobMemory, *members: int) -> list[str]:
    found = [("--memory-dir", str(memory.memory_dirs[m])) for m in members or (0, 1)]
    return [word for pair in found for word in pair]


def test_versions_are_reported_whole_or_torn_recoverable_or_not(memory: JobMemory) -> None:
    report = inspect_job(dirs(memory))
    new, old = report.versions
    assert (new.label, new.recoverable, new.committed, new.whole_ranks) == (NEW, False, False, 0)
    assert new.ranks == 2
    assert (old.label, old.recoverable, old.committed, old.whole_ranks, old.ranks) == (
        OLD,
        True,
        True,
        2,
        2,
    )
    assert new.reasons == ("no rank finished writing it",)
    assert (report.restores, report.problems, report.empty) == (OLD, (), ())
    assert old.nbytes == sum(a.own_bytes + a.redundant_bytes for a in old.arenas) > 2 * 20_000
    assert report.well
    half = inspect_job(dirs(memory)[1:])
    assert (half.restores, half.versions[1].whole_ranks) == (OLD, 1), (
        "one node holds the copies of the other"
    )


def test_an_unrecoverable_version_says_what_is_missing(memory: JobMemory) -> None:
    host = next(e for e in memory.entries(0, 0) if e.owner and e.key.section == "host")
    shutil.rmtree(memory.jobs[1].path)
    copy = next(e for e in memory.entries(0, 0) if not e.owner and e.key.section == "owned")
    memory.flip(0, 0, copy)
    report = inspect_job(dirs(memory)[:1], verify=True)
    assert report.restores is None
    assert not report.versions[1].recoverable
    assert "owned" in " ".join(report.versions[1].reasons)
    assert host.key not in (report.versions[1].arenas[0].bad_blocks or ())


def test_p5_every_flipped_block_is_reported_with_its_arena(memory: JobMemory) -> None:
    assert inspect_job(dirs(memory), verify=True).bad_blocks == 0
    for member in (0, 1):
        for entry in memory.entries(member, 0):
            memory.flip(member, 0, entry)
            report = inspect_job(dirs(memory), verify=True)
            bad = {(a.node, a.path.name): a.bad_blocks for a in report.arenas if a.bad_blocks}
            assert bad == {(f"node{member}", "rank0-slot0.arena"): (entry.key,)}
            assert report.restores == OLD  # the other node has it too
            assert not report.well
            memory.flip(member, 0, entry)
    for member in (0, 1):
        memory.flip(member, 0, next(e for e in memory.entries(member, 0) if e.key == entry.key))
    report = inspect_job(dirs(memory), verify=True)
    assert report.restores is None
    assert report.bad_blocks == 2


def test_unreadable_and_empty_arenas_are_named(memory: JobMemory) -> None:
    memory.path(0, 1).write_bytes(b"junk")
    with memory.arena(1, 1) as arena:
        arena.clear()
    report = inspect_job(dirs(memory))
    assert len(report.problems) == 1
    assert "rank0-slot1.arena: not an arena" in report.problems[0]
    assert [(a.path.name, a.node, str(a.state)) for a in report.empty] == [
        ("rank0-slot1.arena", "node1", "empty")
    ]
    assert [v.label for v in report.versions] == [OLD]


def test_directories_of_several_jobs_are_not_mixed(memory: JobMemory, tmp_path: Path) -> None:
    other = JobDir.open_or_create(memory.memory_dirs[0], "other", "node0")
    with pytest.raises(ArenaError, match="other"):
        inspect_job([*dirs(memory), other.path])
    assert sorted(find_job_dirs(memory.memory_dirs)) == ["job", "other"]
    assert find_job_dirs([other.path]) == {"other": [other.path]}
    with pytest.raises(ArenaError, match="expected one job"):
        inspect_job([])


def test_inspect_command_for_people_and_programs(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = run("inspect", *options(memory))
    assert code == 0
    for text in (
        "step 7",
        "step 8",
        "torn",
        "committed",
        "dp1",
        "would restore step 7",
        "2 of 2 ranks",
    ):
        assert text in out
    monkeypatch.setenv("REFT_MEMORY_DIR", str(memory.memory_dirs[0]))
    assert run_json("inspect")[1]["restores"] == {"incarnation": 1, "step": 7}
    code, found = run_json("inspect", *options(memory))
    assert code == 0
    assert found["restores"] == {"incarnation": 1, "step": 7}
    assert [v["recoverable"] for v in found["versions"]] == [False, True]
    assert {a["node"] for a in found["versions"][1]["arenas"]} == {"node0", "node1"}


def test_exit_codes_1_not_well_2_wrong_use(memory: JobMemory, tmp_path: Path) -> None:
    assert run("inspect", "--memory-dir", tmp_path / "nowhere")[0] == 2
    (tmp_path / "bare").mkdir()
    JobDir.open_or_create(memory.memory_dirs[0], "other", "node0")
    both = options(memory)
    for arguments, expected, says in (
        (["--memory-dir", str(tmp_path / "bare")], 1, "no job has memory"),
        ([*both, "--job", "nope"], 1, "found: job, other"),
        (both, 2, "choose one with --job"),
        ([*both, "--job", "job"], 0, "would restore step 7"),
        ([*both, "--job", "other"], 1, "nothing to restore"),
        (["--nonsense"], 2, "Error"),
    ):
        code, out = run("inspect", *arguments)
        assert (code, says in out) == (expected, True), out


def test_verify_command_names_damaged_blocks(memory: JobMemory) -> None:
    code, out = run("verify", *options(memory))
    assert code == 0
    assert "blocks match their checksums" in out
    memory.flip(1, 0, memory.entries(1, 0)[0])
    code, out = run("verify", *options(memory))
    assert code == 1
    assert "replicated 1.0" in out
    code, found = run_json("verify", *options(memory))
    assert (code, found["bad_blocks"], found["restores"]["step"]) == (1, 1, 7)
    named = [a["bad_blocks"] for a in found["versions"][1]["arenas"]]
    assert named == [[], ["replicated block 0 of member 1"]]


def test_clean_removes_orphans_and_leaves_live_jobs(memory: JobMemory) -> None:
    live = JobDir.open_or_create(memory.memory_dirs[0], "live", "node0")
    arena = Arena.create(live.path / "rank0-slot0.arena", 4096, 1, live.secret)
    try:
        code, found = run_json("clean", *options(memory), "--dry-run")
        assert code == 0
        assert [(r["job_id"], r["action"].split(":")[0]) for r in found] == [
            ("job", "would be removed"),
            ("live", "left alone"),
            ("job", "would be removed"),
        ]
        assert not any(r["removed"] for r in found)
        assert all(path.exists() for path in dirs(memory))
        code, out = run("clean", *options(memory))
        assert code == 0
        assert "left alone" in out
        assert not any(path.exists() for path in dirs(memory))
        assert live.path.exists()
        code, out = run("clean", *options(memory), "--job", "live")
        assert code == 1
        assert live.path.exists()
        assert run("clean", *options(memory), "--force")[0] == 2
        assert live.path.exists()
        assert run("clean", *options(memory), "--job", "live", "--force")[0] == 0
        assert not live.path.exists()
    finally:
        arena.close()
    code, out = run("clean", *options(memory))
    assert (code, "no job has memory" in out) == (0, True)


def test_an_orphan_that_cannot_be_read_is_still_removed(memory: JobMemory) -> None:
    (memory.jobs[0].path / "secret").unlink()
    code, out = run("inspect", *options(memory))
    assert (code, "secret cannot be read" in out) == (1, True)
    assert run("clean", *options(memory), "--job", "job")[0] == 0
    assert not any(path.exists() for path in dirs(memory))
