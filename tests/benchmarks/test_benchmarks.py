"""The benchmarks run as anyone would run them and say consistent things. Never a time: machines differ."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECS = 240
SAVERS = {"reft", "blocking_copy", "torch_save", "dcp_async_save", "deepspeed_save_checkpoint"}
REFT_WAYS = ("reft_all_local", "reft_node_lost")
WAYS = {
    *REFT_WAYS,
    "plain_copy",
    "deepspeed_load_checkpoint",
    "deepspeed_slow_storage",
    "torch_load",
    "dcp_load",
}


def start(script: str, *args: str, folder: Path) -> subprocess.Popen[str]:
    shm, disk = folder / "shm", folder / "disk"
    shm.mkdir()
    disk.mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *args]
    command += ["--shm", str(shm), "--disk", str(disk)]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(script: str, *args: str, folder: Path) -> dict[str, Any]:
    process = start(script, "--quick", "--json", *args, folder=folder)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECS)
    finally:
        kill(process)
    assert process.returncode == 0, err
    assert left_behind(folder) == []
    return json.loads(out)


def left_behind(folder: Path) -> list[Path]:
    return [*(folder / "shm").iterdir(), *(folder / "disk").iterdir()]


def check_head(result: dict[str, Any], name: str) -> None:
    assert result["benchmark"] == name
    assert f"benchmarks/{name}.py --quick --json" in result["command"]
    assert result["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert result["machine"]["memory_bytes"] > 0
    assert os.uname().nodename not in json.dumps(result["machine"])
    assert result["model"]["parameters"] > 0
    assert set(result["software"]) == {"python", "torch", "deepspeed", "reft-ckpt"}
    assert len(result["date"].split("-")) == 3


def check_estimate(found: dict[str, Any]) -> None:
    low, high = found["ci95"]
    assert low <= found["median"] <= high
    assert found["samples"] >= 1


@pytest.mark.integration
def test_host_copies_compares_every_way_of_one_core(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "host_copies.py"), "--quick", "--json"]
    made = subprocess.run(
        [*command, "--shm", str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_SECS, check=True
    )
    assert not list(tmp_path.iterdir())
    found = json.loads(made.stdout)["ways"]
    assert set(found) == {
        *("plain", "past_caches", "hash", "copy_then_hash", "copy_and_hash", "copy_and_hash_sse2"),
        *("mapped_anew", "written_to_file", "over_loopback"),
    }
    for way in found.values():
        check_estimate(way["secs_to_plain"])


@pytest.mark.process
def test_watching_says_what_a_note_and_a_look_cost(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "watching.py"), "--quick", "--json"]
    made = subprocess.run(
        [*command, "--shm", str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_SECS, check=True
    )
    assert not list(tmp_path.iterdir())
    found = json.loads(made.stdout)
    for one in (found["note_secs"], found["step_secs"], *found["look_secs"].values()):
        check_estimate(one)


@pytest.mark.integration
def test_memory_copy_compares_the_same_bytes_in_pairs(tmp_path: Path) -> None:
    result = run("memory_copy.py", "--stages", folder=tmp_path)
    check_head(result, "memory_copy")
    check_estimate(result["plain_step_secs"])
    savers = result["savers"]
    assert {"copy", "reft"} <= set(savers)
    for saver in savers.values():
        for figure in ("extra_secs_per_step", "extra_secs_per_step_with_drain", "core_secs_per_version"):
            check_estimate(saver[figure])
        assert {"MainThread", "daemon", "other"} <= set(saver["core_secs_by_thread"])
    # The host block and paddings are all that reft keeps beside what a plain copy copies.
    state_bytes = 4 * 3 * result["model"]["parameters"]
    assert savers["copy"]["bytes_per_rank"] >= state_bytes
    assert 0 <= savers["reft"]["bytes_per_rank"] - savers["copy"]["bytes_per_rank"] < 3 * 2**20
    assert result["snapshots"]["committed"] > 0
    assert savers["reft"]["stages"]["worker: copy and hash"][1] > 0


@pytest.mark.nightly
def test_save_stall_compares_every_way_within_one_run(tmp_path: Path) -> None:
    result = run("save_stall.py", folder=tmp_path)
    check_head(result, "save_stall")
    expected = {"no_spare_core"} | ({"spare_core"} if result["machine"]["cores"] > 1 else set())
    assert set(result["situations"]) == expected
    state_bytes = 4 * 3 * result["model"]["parameters"]
    for situation in result["situations"].values():
        check_estimate(situation["plain_step_secs"])
        assert set(situation["savers"]) == SAVERS
        for name, saver in situation["savers"].items():
            for key in ("stall_secs", "extra_secs", "fraction_of_a_step"):
                check_estimate(saver[key])
            # Nobody saved less than the state; with two ranks each of them keeps or copies all of it.
            assert saver["bytes"] >= state_bytes, name
        units = situation["savers"]["reft"]["extra_secs"]["samples"]
        snapshots = situation["snapshots"]
        submitted = units * result["steps_per_unit"]
        assert snapshots["committed"] == snapshots["taken"] == submitted - snapshots["skipped"] > 0
        parts = situation["hot_path"]
        assert all(parts[f"worker.{part}"]["wall_secs"] > 0 for part in ("copy", "votes", "commit"))
        assert parts["training.submit"]["wall_secs"] >= parts["training.submit.capture"]["wall_secs"] > 0
    if "spare_core" in expected:
        assert result["situations"]["spare_core"]["cores"]["shared_cores"] == 0
    memory = result["memory"]
    assert memory["own_and_redundant_bytes"] >= 2 * state_bytes
    assert memory["arena_bytes"] >= 2 * memory["own_and_redundant_bytes"]
    within = memory["arena_bytes"] + memory["reft_private_bytes"] <= memory["allowed_bytes"]
    assert result["goals"]["host_memory_within_2x_plus_64_mib"] is within
    assert set(result["goals"]) == {
        "spare_core_step_at_most_3_percent_longer",
        "host_memory_within_2x_plus_64_mib",
    }


@pytest.mark.nightly
def test_restore_compares_memory_with_page_cached_files(tmp_path: Path) -> None:
    result = run("restore.py", folder=tmp_path)
    check_head(result, "restore")
    assert set(result["ways"]) == WAYS
    image_bytes = result["state_bytes_per_rank"]
    for name, way in result["ways"].items():
        check_estimate(way["secs"])
        check_estimate(way["times_faster_than_deepspeed"])
        check_estimate(way["times_faster_than_slow_storage"])
        assert way["stored_bytes"] >= 4 * 3 * result["model"]["parameters"], name
    assert result["ways"]["deepspeed_load_checkpoint"]["times_faster_than_deepspeed"]["ci95"] == [1.0, 1.0]
    for name in REFT_WAYS:
        way = result["ways"][name]
        # Nothing is taken again: what was lost, is completed while it is restored.
        assert set(way["parts_secs"]) == {"inventory_and_plan", "host_state", "transfer_and_verify"}
        # Both ranks restored the whole image and their host state.
        assert sum(way["bytes_from"].values()) > 2 * image_bytes
        check_estimate(way["core_secs_of_deepspeed_over_these"])
        check_estimate(way["core_secs_of_deepspeed_over_these_without_completing"])
        assert way["core_secs_of_completing"]["median"] < way["core_secs_of_all_ranks"]["median"]
    assert len(result["goals"]) == 5
    assert result["ways"]["plain_copy"]["times_of_a_plain_copy"]["ci95"] == [1.0, 1.0]
    local, lost = (result["ways"][n]["bytes_from"] for n in REFT_WAYS)
    assert {kind for kind, n in local.items() if n} == {"local"}
    # The lost node's half of the state and its own host bytes come from copies, all else from owners.
    assert lost["copy"] >= image_bytes // 2
    assert lost["local"] + lost["peer"] + lost["copy"] == local["local"]


@pytest.mark.integration
def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path) -> None:
    process = start("save_stall.py", "--quick", "--steps", "100000", folder=tmp_path)
    try:
        assert process.stderr is not None
        # Progress begins when both ranks train and every file exists.
        line = next((line for line in process.stderr if line.startswith("[no_spare_core]")), None)
        assert line is not None, "no progress was shown"
        assert len(left_behind(tmp_path)) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode != 0
    assert left_behind(tmp_path) == []
    assert processes_mentioning(tmp_path) == []


def processes_mentioning(folder: Path) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in line and int(pid) != os.getpid():
                found.append(line)
    return found


@pytest.mark.integration
def test_control_plane_counts_what_a_rank_has_and_does(tmp_path: Path) -> None:
    sizes = ["--ranks", "4", "9", "--gloo-ranks", "3", "--per-node", "4", "--rounds", "2", "--plans", "0"]
    process = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "control_plane.py"), "--json", *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert [row["ranks"] for row in result["tree"]] == [4, 9]
    for row in (*result["tree"], *result["gloo"]):
        assert "failed" not in row
        assert row["vote_secs"] > 0
        assert row["agree_secs"] > 0
        # Two arenas of about 40 bytes, which every rank tells of, and a verdict of its group.
        assert 80 < row["agree_bytes_per_rank"] < 300
    # Three children on the node, and two ring peers; of three nodes, whoever came first has two children more.
    assert result["tree"][0]["most_connections"] == 5
    assert result["tree"][1]["most_connections"] in (6, 7)
    assert set(result["tree_fits"]) == {"vote_secs", "agree_secs", "connect_secs"}
    largest = result["computed"][-1]
    assert largest["ranks"] == 16384
    assert largest["most_connections_of_the_tree"] <= 64


@pytest.mark.integration
def test_to_resume_at_any_sample_one_batch_is_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "resume_data.py"), "--quick", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_SECS,
    )
    rows = json.loads(done.stdout)["rows"]
    assert {(row["way"], row["sample"]) for row in rows} == {
        (way, at) for way in ("reft.data.loader", "reft.resumable") for at in (10, 10_000)
    }
    assert {row["samples_read"] for row in rows} == {4}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_mttr_kills_the_same_job_under_both_launchers(tmp_path: Path) -> None:
    process = start("mttr.py", "--quick", "--json", folder=tmp_path)
    try:
        out, err = process.communicate(timeout=800)
    finally:
        kill(process)
    assert process.returncode == 0, err
    assert left_behind(tmp_path) == []
    result = json.loads(out)
    check_head(result, "mttr")
    way = result["ways"]["trainer"]
    for system in ("reft", "torchrun"):
        check_estimate(way[system]["failure_to_step_secs"])
        assert result["differing_steps"][system] == 0
    reft = way["reft"]
    assert 0 < sum(reft["parts_secs"].values()) <= reft["most_secs"] + 1.0
    assert reft["lost_steps"] <= 2, "a version is committed behind every step"
    assert set(result["goals"]) == {"trainer_at_most_a_third_of_torchrun"}


@pytest.mark.nightly
def test_smaller_trains_with_two_replicas_with_one_and_with_two_again() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "smaller.py"), "--quick", "--json"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    found = json.loads(made.stdout)
    assert [phase["replicas"] for phase in found["phases"]] == [2, 1, 2]
    for phase in found["phases"]:
        check_estimate(phase["samples_per_sec"])
    assert found["share"] > 0
    assert found["goal_met"] == (found["share"] >= 0.95)
    assert made.returncode == (0 if found["goal_met"] else 1), made.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_hangs_finds_a_stopped_trainer_at_the_default_patience_and_names_it(tmp_path: Path) -> None:
    process = start("hangs.py", "--quick", "--json", folder=tmp_path)
    try:
        out, err = process.communicate(timeout=800)
    finally:
        kill(process)
    assert process.returncode == 0, err
    assert left_behind(tmp_path) == []
    result = json.loads(out)
    way = result["ways"]["trainer_stopped"]
    assert way["all_named_right"], way
    check_estimate(way["named_secs"])
    check_estimate(way["step_secs"])
    assert way["step_secs"]["median"] > way["named_secs"]["median"]
    assert result["differing_steps"] == []
