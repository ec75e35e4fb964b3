"""P5, P7, P8 on disk: whose checkpoints they are, whether they are sound, and what they give back."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.engine.load.disk import DiskCheckpoint, find_on_disk, in_order, share_of
from reft.naming import Label
from reft.storage.persisted import FileRecord
from tests.engine.ranks import run_ranks

JOB = Path(__file__).with_name("disk_job.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(JOB, tmp_path_factory.mktemp("disk"))


@pytest.mark.process
def test_p5_a_damaged_checkpoint_is_refused_and_an_older_one_loaded(results: list[dict]) -> None:
    for r in results:
        assert r["damaged"]["step"] == 4
        assert r["damaged"]["equal"]
        assert r["damaged"]["incarnation"] == 2


@pytest.mark.process
def test_p5_where_all_are_damaged_every_rank_refuses(results: list[dict]) -> None:
    for r in results:
        kind, text = r["damaged"]["all_damaged"]
        assert kind == "UnrecoverableError"
        assert "global_step8: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: checksum" in text
        assert "global_step4: reft_host-pp0.dp1.tp0.msgpack: checksum" in text


@pytest.mark.process
def test_p7_jobs_that_share_a_persist_directory_share_nothing(results: list[dict]) -> None:
    for r in results:
        assert r["shared"]["fresh"] == [0, None]
        assert r["shared"]["step"] == 8
        assert r["shared"]["equal"]


@pytest.mark.process
def test_p3_a_checkpoint_that_the_job_went_back_behind_is_not_newer(results: list[dict]) -> None:
    for r in results:
        assert r["went_back"]["back"] == 4
        assert r["went_back"]["resumed"] == 6
        assert r["went_back"]["back again"] == 4
        assert r["went_back"]["resumed again"] == 7


@pytest.mark.process
def test_p3_what_was_committed_after_an_older_checkpoint_is_newer(results: list[dict]) -> None:
    for r in results:
        assert r["outlived"]["found"] == [5, 9]
        assert r["outlived"]["by tag"] == [5, 9]


@pytest.mark.process
def test_p8_client_state_comes_back_from_disk(results: list[dict]) -> None:
    for rank, r in enumerate(results):
        assert r["damaged"]["client"] == {"step": 4, "rank": rank, "epoch": None, "given": None}
        assert r["own"]["client"] == {"step": 4, "rank": rank, "epoch": 3, "given": 5}
        assert (r["own"]["step"], r["own"]["equal"]) == (4, True)


@pytest.mark.process
def test_p8_random_state_is_saved_beside_client_state_that_only_deepspeed_can_hold(
    results: list[dict],
) -> None:
    for r in results:
        assert (r["arguments"]["step"], r["arguments"]["given"]) == (4, {"hidden": 16})
        assert r["arguments"]["equal"]


@pytest.mark.process
def test_p6_a_rank_whose_data_cannot_be_captured_has_its_checkpoint(results: list[dict]) -> None:
    for r in results:
        assert "escaped" not in r["arguments"]


@pytest.mark.process
@pytest.mark.parametrize("how", ["torn", "empty", "outside"])
def test_p6_a_torn_latest_is_an_error_on_every_rank(results: list[dict], how: str) -> None:
    for r in results:
        kind, text = r["own"][how]
        assert kind == "UnrecoverableError"
        assert "is torn or names no checkpoint" in text


# --- without ranks -----------------------------------------------------------------------------------


def persisted(incarnation: int, step: int) -> DiskCheckpoint:
    return DiskCheckpoint(Path("/p"), f"global_step{step}", step, Label(incarnation, step), "job", {})


def users(step: int, label: Label | None = None) -> DiskCheckpoint:
    return DiskCheckpoint(Path("/u"), f"global_step{step}", step, label, "job" if label else None)


def order(labelled: list[DiskCheckpoint], own: DiskCheckpoint | None = None) -> tuple[list[str], int]:
    taken, left_out = in_order(labelled, own)
    return [f"{c.directory.name}{c.step}" for c in taken], len(left_out)


def test_checkpoints_are_tried_newest_first() -> None:
    assert order([persisted(1, 4), persisted(2, 12), persisted(1, 8)]) == (["p12", "p8", "p4"], 0)
    assert order([]) == ([], 0)
    assert order([], users(3)) == (["u3"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(6)) == (["p8", "u6", "p4"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(9)) == (["u9", "p8", "p4"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(2)) == (["p8", "p4", "u2"], 0)
    assert order([persisted(2, 4), persisted(2, 6)], users(5, Label(2, 5))) == (["p6", "u5", "p4"], 0)


def test_a_future_that_was_given_up_is_left_out() -> None:
    # Incarnation 2 went back to 4 and on to 6: what 1 had beyond is another future.
    assert order([persisted(1, 4), persisted(1, 8), persisted(2, 6)]) == (["p6", "p4"], 1)
    assert order([persisted(1, 8), persisted(2, 6)], users(9, Label(1, 9))) == (["p6"], 2)
    # A restart that went on from 8 gave nothing up.
    assert order([persisted(1, 8), persisted(2, 12)]) == (["p12", "p8"], 0)


def test_newer_than_memory() -> None:
    assert persisted(2, 4).newer_than(Label(1, 9))
    assert not persisted(1, 9).newer_than(Label(2, 4))
    assert not persisted(1, 9).newer_than(Label(1, 9))
    assert users(10).newer_than(Label(2, 9))
    assert not users(9).newer_than(Label(2, 9))


def test_every_file_is_read_by_one_rank() -> None:
    files = {f"file{i}": FileRecord(100 * (i % 7) + 1, i) for i in range(40)}
    shares = [share_of(files, rank, 6) for rank in range(6)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(f.nbytes for f in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 601
    assert share_of({}, 0, 2) == {}


def test_p6_what_cannot_be_listed_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find_on_disk(tmp_path / "file", tmp_path / "file", "job").checkpoints == ()
    assert find_on_disk(None, tmp_path, "..").problems
    (tmp_path / "job" / "global_step4").mkdir(parents=True)
    (tmp_path / "job" / "global_step4" / "reft.json").write_text("{")
    for content in (b"{", b"\xff\xfe", b"[1]", b'{"format": null}'):
        (tmp_path / "job" / "global_step4" / "reft.json").write_bytes(content)
        found = find_on_disk(tmp_path / "nothing", tmp_path, "job")
        assert "is not a marker" in found.problems[0]
