"""Protection that is switched while versions are taken, between real processes: P3, P4, P9."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from reft.cli.running import describe
from reft.config import FaultConfig, FaultPoint
from reft.errors import ConfigError
from reft.grid import Degrees, Topology, VersionId
from reft.memory.arena import Arena, scan
from reft.memory.header import Geometry
from reft.memory.jobdir import write_json
from reft.memory.protection_record import (
    REQUEST_FILE,
    ProtectionRecord,
    ProtectionRequest,
    parse_request,
    read_record,
    read_request,
    resume_record,
    write_record,
    write_request,
)
from reft.policy.switching import MemoryBudget, RetentionConfig, agree_on_room
from reft.protect.codes import Scheme
from reft.recover.decide import plan_recovery
from reft.recover.inventory import ArenaStore
from reft.recover.plan import RecoveryPlan
from reft.snapshot import arenas
from tests.faults.job import exchange
from tests.snapshot.ranks import FOUR, PAIR, SECRET, Rank, Results
from tests.snapshot.test_worker import versions_in
from tests.spawn import RankError


def order(me: Rank, scheme: str) -> None:
    try:
        write_request([me.job_dir], scheme)
    except ConfigError:
        # Whoever wrote it knew less of the job than this node: the ranks have to see to it.
        given = ProtectionRequest(time.time_ns() // 1_000_000, scheme)
        write_json(me.job_dir / REQUEST_FILE, asdict(given))


def arenas_found(me: Rank) -> dict[str, tuple[int, str, int]]:
    found = {}
    for path, arena in scan(me.job_dir, SECRET):
        with arena:
            header = arena.header()
            step, scheme = (header.label.step, header.scheme) if header is not None else (0, "")
            found[path.name] = (step, scheme, arena.file_bytes)
    return found


def switch(rank: int, root: Path) -> dict[str, Any]:
    """Schemes ordered on one node each, some of which nobody can follow."""
    me = Rank(rank, root, FOUR)
    orders = {
        2: (3, "aec"),
        4: (0, "none"),
        6: (1, "arc"),
        8: (2, "rs:2"),
        9: (1, "arc+aor"),
        10: (3, "aec"),
    }
    outcome, found = {}, {}
    for step in range(1, 13):
        who, scheme = orders.get(step, (None, ""))
        if who == rank:
            order(me, scheme)
        if step == 6 and rank == 2:
            me.arenas.limit_bytes = 2 * max(size for _, _, size in arenas_found(me).values())
        dist.barrier()
        outcome[step] = me.take(step)
        found[step] = sorted(arenas_found(me).values())
        if step == 9 and rank == 2:
            me.arenas.limit_bytes = None
    me.worker.close(10)
    return {
        "outcome": outcome,
        "found": found,
        "records": [record.to_json() for record in me.records],
        "stats": me.stats.to_json(),
    }


def switch_killed(rank: int, root: Path) -> dict[str, Any]:
    point, step = (root / "fault").read_text().split()
    me = Rank(
        rank, root, FOUR, faults=(FaultConfig(point=FaultPoint(point), step=int(step), pp=1, dp=1),)
    )
    for number in range(1, 6):
        if number == 3 and rank == 0:
            order(me, "aec")
        dist.barrier()
        me.take(number)
    raise AssertionError("the fault did not strike")


def pressure(rank: int, root: Path) -> dict[str, Any]:
    """One rank's memory is too short at the start; then there is enough, then less, still less, and enough."""
    me = Rank(rank, root, FOUR, keeping=RetentionConfig(versions=3, look_secs=0.0, calm_secs=0.1))
    limits: dict[int, int | None] = {1: 1_200_000, 4: None}
    outcome, found, files = {}, {}, {}
    for step in range(1, 41):
        if step == 15:
            whole = sum(size for _, _, size in arenas_found(me).values())
            limits = {16: whole - 1, 20: whole // 2, 26: None}
        if rank == 2 and step in limits:
            me.arenas.limit_bytes = limits[step]
        time.sleep(0.06)
        dist.barrier()
        outcome[step] = me.take(step)
        found[step] = sorted(arenas_found(me).values())
        files[step] = sorted(path.stat().st_ino for path in me.job_dir.glob("*.arena"))
    me.worker.close(10)
    records = [record.to_json() for record in me.records]
    return {"outcome": outcome, "found": found, "files": files, "records": records}


@pytest.mark.process
def test_p3_a_switch_keeps_the_old_version_until_the_first_under_the_new_scheme(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path, switch, world=4).of(switch)
    assert all(result["records"] == results[0]["records"] for result in results)
    for rank, result in enumerate(results):
        assert set(result["outcome"].values()) == {True}, (
            "no version is lost where training waits for each"
        )
        found = {int(step): arenas for step, arenas in result["found"].items()}
        # The order of step 2 is heard in its vote: version 2 is still arc's, and stays beside an empty arena.
        assert [scheme for _, scheme, _ in found[2]] == ["", "arc"]
        assert [(step, scheme) for step, scheme, _ in found[3]] == [(0, ""), (3, "aec")]
        sizes = {size for _, _, size in found[3]}
        assert len(sizes) == 1, "what arc took is given back at the first commit under aec"
        assert [(step, scheme) for step, scheme, _ in found[5]] == [(0, ""), (5, "none")]
        assert max(size for _, _, size in found[5]) < min(sizes)
        assert [scheme for _, scheme, _ in found[9]] == ["none", "none"], (
            "refused orders change nothing"
        )
        assert [scheme for _, scheme, _ in found[12]] == ["aec", "aec"]
        _check_content_of_parity(tmp_path / "switch", rank)
    records = [ProtectionRecord.from_json(record) for record in results[0]["records"]]
    assert [r.scheme for r in records] == ["aec", "none", "none", "none", "none", "aec"]
    assert [r.tolerance for r in records] == [1, 0, 0, 0, 0, 1]
    assert [r.step for r in records] == [2, 4, 4, 4, 4, 10]
    assert "memory_limit_bytes" in records[2].refused.cause
    assert "at least 3 data-parallel members, found 2" in records[3].refused.cause
    assert "recomputing is fixed at the start" in records[4].refused.cause
    assert records[5].refused is None


def _check_content_of_parity(root: Path, rank: int) -> None:
    assert set(versions_in(root, rank)) == {11, 12}
    arena = versions_in(root, rank)[12]
    header = arena.header()
    assert header.coding.startswith("aec")
    assert all(arena.verify(entry) for entry in header.entries)


@pytest.mark.process
@pytest.mark.parametrize("fault", ["during_switch 3", "during_copy 4", "before_commit 4"])
def test_p3_a_kill_during_a_switch_loses_no_version_and_restarts_with_one_scheme(
    tmp_path: Path, fault: str
) -> None:
    root = tmp_path / "switch_killed"
    root.mkdir()
    (root / "fault").write_text(fault)
    with pytest.raises(RankError, match="SIGKILL"):
        Results(tmp_path, switch_killed, world=4)
    inventories = [
        ArenaStore(root / f"node{r}", FOUR.nodes[r], SECRET).inventory() for r in range(4)
    ]
    for lost in (None, 0, 1, 2, 3):
        present = [inventory for r, inventory in enumerate(inventories) if r != lost]
        plan = plan_recovery(present, FOUR, job_id="job")
        assert isinstance(plan, RecoveryPlan), f"with node {lost} lost: {plan}"
        # Version 3 was committed before the switch; version 4 may be whole, and then is aec's everywhere.
        assert plan.label.step >= 3
    records = [record for r in range(4) if (record := read_record(root / f"node{r}"))]
    begun = resume_record(records, "arc")
    assert begun == resume_record(list(reversed(records)), "arc")
    if fault.endswith("4"):
        assert begun.scheme == "aec"
    for rank in range(4):
        for _, arena in scan(root / f"node{rank}", SECRET):
            if not isinstance(arena, Arena):
                assert "no record" in arena, (
                    "a rank is killed, with the first, while it makes a slot anew"
                )
                continue
            header = arena.header()
            if header is not None and header.state.whole:
                assert header.scheme == ("arc" if header.label.step <= 3 else "aec")
                assert all(arena.verify(entry) for entry in header.entries)


def test_an_order_that_asks_for_recomputing_needs_a_job_that_was_started_with_it(
    tmp_path: Path,
) -> None:
    assert write_request([tmp_path], "arc+aor").scheme == "arc+aor", (
        "not known yet: the ranks will see to it"
    )
    write_record(tmp_path, ProtectionRecord("arc", "arc", aor=True))
    assert write_request([tmp_path], "rs:2+aor").scheme == "rs:2+aor"
    assert parse_request("rs:2+aor", aor=True) == parse_request("rs:2", aor=True) == Scheme(0, 2)
    record = read_record(tmp_path)
    assert describe(record.to_json())[0].startswith("arc+aor, survives")
    with pytest.raises(ConfigError, match=r"'none\+aor' keeps nothing of a peer .*; order 'none'"):
        write_request([tmp_path], "none+aor")
    write_record(tmp_path, ProtectionRecord("arc", "arc"))
    with pytest.raises(
        ConfigError, match=r"fixed at the start, .* order 'aec', or write 'aec\+aor' into"
    ):
        write_request([tmp_path], "aec+aor")
    newest = read_request(tmp_path)
    assert newest.scheme == "rs:2+aor"


def test_the_block_counts_again_once_it_is_edited() -> None:
    switched = ProtectionRecord(
        "aec", "arc", number=7, step=12, incarnation=1, tolerance=1, ordered=True
    )
    stale = ProtectionRecord("arc", "arc", number=3, step=2, incarnation=1, tolerance=1)
    assert resume_record([stale, switched], "arc") == switched
    edited = resume_record([stale, switched], "rs:2")
    assert (edited.scheme, edited.number) == ("rs:2", 7)  # orders of before stay done
    assert resume_record([], "arc").scheme == "arc"
    # "auto" chooses anew at every start, unless somebody has switched by hand.
    chosen = ProtectionRecord("arc", "auto:1", number=7, step=12, incarnation=1)
    assert resume_record([chosen], "auto:1", "aec").scheme == "aec"
    by_hand = ProtectionRecord("rs:2", "auto:1", number=8, step=20, incarnation=1, ordered=True)
    assert resume_record([chosen, by_hand], "auto:1", "aec").scheme == "rs:2"


@pytest.mark.process
def test_p9_protection_goes_down_and_up_with_the_memory_of_the_poorest_rank(tmp_path: Path) -> None:
    results = Results(tmp_path, pressure, world=4).of(pressure)
    assert all(result["records"] == results[0]["records"] for result in results)
    records = [ProtectionRecord.from_json(record) for record in results[0]["records"]]
    assert {r.scheme for r in records} == {"arc"}
    kept = [(r.degraded.scheme, r.degraded.versions) if r.degraded else ("arc", 3) for r in records]
    down, up = [("arc", 2), ("none", 2)], [("arc", 2), ("arc", 3)]
    assert kept == [("none", 2), *up, *down, *up]
    assert [r.tolerance for r in records] == [0, 1, 1, 1, 0, 1, 1]
    causes = [r.degraded.cause for r in records if r.degraded]
    assert "arc with 3 versions needs" in causes[0]
    assert "reft.memory_limit_bytes leaves it 1.1 MiB" in causes[0]
    assert [r.step for r in records[3:5]] == [16, 20]
    for result in results:
        assert set(result["outcome"].values()) == {True}, (
            "no version is lost where training waits for each"
        )
        found = {int(step): arenas for step, arenas in result["found"].items()}
        assert [scheme for _, scheme, _ in found[3]] == ["none"] * 2
        assert [scheme for _, scheme, _ in found[19]] == ["arc"] * 2, (
            "a third version is given back"
        )
        # A version is given up by giving up its file: the others stay where they are.
        assert {ino for step in range(16, 20) for ino in result["files"][str(step)]} <= {
            *result["files"]["15"]
        }
        assert [scheme for _, scheme, _ in found[24]] == ["none"] * 2
        assert sum(size for *_, size in found[24]) < 0.6 * sum(size for *_, size in found[19])
        assert [(step, scheme) for step, scheme, _ in found[40]] == [
            (n, "arc") for n in (38, 39, 40)
        ]


def test_p9_a_node_has_room_for_what_its_ranks_want_together_beside_the_largest_margin() -> None:
    """Of ranks on one node, what each needs more counts together; all ranks find the same."""
    mib = 2**20
    nodes = Topology(Degrees(1, 3, 1), Degrees(1, 3, 1).coordinates(), ("A", "A", "B"))

    def found(*rooms: MemoryBudget) -> str | None:
        control = mock.Mock(gather_ints=lambda mine: [list(astuple(room)) for room in rooms])
        (answer,) = {agree_on_room(control, nodes, room) for room in rooms}
        return answer

    fits = MemoryBudget(needed=30 * mib, held=10 * mib, free=100 * mib, limit=-1, margin=0)
    assert found(fits, fits, fits) is None
    assert "needs 40.0 MiB more than now on node A" in str(
        found(fits, replace(fits, margin=61 * mib), fits)
    )
    assert "on node B" in str(found(fits, fits, replace(fits, free=19 * mib)))
    assert "memory_limit_bytes leaves it 29.0 MiB" in str(
        found(fits, fits, replace(fits, limit=29 * mib))
    )


def _damage(me: Rank, kind: str, which: str) -> None:
    newest = max(me.commits)
    for path, arena in scan(me.job_dir, SECRET):
        with arena:
            header, geometry = arena.header(), Geometry.of(arena.data_bytes, arena.max_entries)
        holds_newest = header is not None and header.label.step == newest
        if which == "all" or (which == "newest") == holds_newest:
            if kind == "remove":
                path.unlink()
            elif kind == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            elif kind == "replace":
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content)
                path.chmod(0o600)
            elif kind == "tear":
                with path.open("r+b") as file:
                    for copy in (0, 1):
                        file.seek(geometry.copy_offset(copy))
                        file.write(b"\xff" * 64)


ATTACKS = [
    *(("remove", which) for which in ("newest", "other", "all")),
    *(("truncate", which) for which in ("newest", "other")),
    *(("replace", which) for which in ("newest", "other", "all")),
    *(("tear", which) for which in ("newest", "other", "all")),
    ("root", "all"),
]


def files(rank: int, root: Path) -> dict[str, Any]:
    me, found = Rank(rank, root, PAIR), {}
    me.take_next(3)
    for kind, which in ATTACKS:
        dist.barrier()
        if rank == 1:
            if kind == "root":
                while me.job_dir.exists():  # its worker may make a file there meanwhile
                    shutil.rmtree(me.job_dir, ignore_errors=True)
            else:
                _damage(me, kind, which)
        dist.barrier()
        with mock.patch.object(arenas.logger, "error") as error:
            last = me.take_next(3)[-1]
        found[f"{kind} {which}"] = {
            **{"last": last, "in_files": me.steps_in_files(), "step": me.now},
            "said": [call.args[0] % call.args[1:] for call in error.mock_calls],
        }
    me.worker.close(10)
    return found


def swap(rank: int, root: Path) -> dict[str, Any]:
    """The files of two local ranks are exchanged under a running job: nobody overwrites what is the other's."""
    me, found = Rank(rank, root, PAIR, together=True), {}
    for slots in ((0, 0), (0, 1), (1, 1)):
        me.take_next(3)
        dist.barrier()
        if rank == 0:
            exchange(*(me.job_dir / f"rank{r}-slot{s}.arena" for r, s in enumerate(slots)))
        dist.barrier()
        last = me.take_next(4)[-1]
        dist.barrier()
        found[str(slots)] = {"last": last, "in_files": me.steps_in_files(), "step": me.now}
        found["names"] = sorted(path.name for path in me.job_dir.glob("*.arena"))
        dist.barrier()  # both have read before either writes on
    me.worker.close(10)
    return found


def swapped_before(rank: int, root: Path) -> dict[str, Any]:
    me = Rank(rank, root, PAIR, together=True)
    assert me.take_next(2) == [True, True]
    me.worker.close(10)
    dist.barrier()
    if rank == 0:
        names = {}
        for path, arena in scan(me.job_dir, SECRET):
            with arena:
                header = arena.header()
                names[header.coordinate.dp, header.label.step] = path
        # Rank 1's newest version lies where rank 0's older one was.
        exchange(names[0, 1], names[1, 2])
    dist.barrier()
    frozen = {0: VersionId(1, 2), 1: VersionId(1, 2)} if rank == 0 else {}
    me = Rank(rank, root, PAIR, together=True, frozen=frozen)
    dist.barrier()
    before = me.steps_in_files()
    dist.barrier()
    committed = [me.take(step) for step in (3, 4)]
    dist.barrier()
    me.worker.close(10)
    return {"before": before, "committed": committed}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("files"), files, swap, swapped_before)


@pytest.mark.process
def test_p3_damaged_files_are_noticed_and_made_anew(results: Results) -> None:
    for rank, result in enumerate(results.of(files)):
        for kind, which in ATTACKS:
            found = result[f"{kind} {which}"]
            assert found["last"], (rank, kind, which)
            # What is told to be committed lies in files that a restart finds.
            assert found["in_files"] == [found["step"]], (rank, kind, which)
            # On the node that was attacked it was said why, at the next version.
            assert bool(found["said"]) == (rank == 1), (rank, kind, which)


@pytest.mark.process
def test_p3_files_exchanged_between_local_ranks_are_told_apart(results: Results) -> None:
    for result in results.of(swap):
        assert result.pop("names") == [f"rank{r}-slot{s}.arena" for r in (0, 1) for s in (0, 1)]
        for slots, found in result.items():
            assert found["last"], slots
            assert found["in_files"] == [found["step"]] * 2, slots


@pytest.mark.process
def test_p3_a_recovered_version_in_all_slots_of_a_rank_leaves_room_for_the_next(
    results: Results,
) -> None:
    for result in results.of(swapped_before):
        assert result["before"] == [2, 2], "nothing of the recovered version is given up"
        assert result["committed"] == [True, True]
