"""Wrong use of any sub-command: a message that says what to change and exit code 2, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reft import cli

FILES = {
    "broken.json": b"{ not json",
    "list.json": b"[1, 2]",
    "null.json": b"null",
    "bytes.json": bytes(range(256)),
    "deep.json": b"[" * 100_000,
    "block.json": json.dumps({"reft": 5}).encode(),
    "key.json": json.dumps({"reft": {"enabledd": True}}).encode(),
    "ds.json": json.dumps({"train_batch_size": 8, "reft": {"enabled": True}}).encode(),
    "plain.json": json.dumps({"train_batch_size": 8}).encode(),
    "script.py": b"raise SystemExit(3)",
}
PLAN = "plan ds.json --model 1.3b --dp 4"
UNREADABLE = ("nofile.json", "broken.json", "list.json", "bytes.json", "deep.json")

CASES = [
    "nonsense",
    "--nonsense",
    "version --nonsense",
    "config",
    *(
        f"config --check {name}"
        for name in (*UNREADABLE, "null.json", "plain.json", "block.json", "key.json", "directory")
    ),
    *(
        f"launch {options} script.py"
        for options in (
            "--nproc-per-node -3",
            "--nproc-per-node 0",
            "--nproc-per-node abc",
            "--nnodes 0",
            "--nnodes -1",
            "--nnodes 0 --rdzv-endpoint localhost:1",
            "--nnodes 3:1",
            "--nnodes a:b",
            "--node-rank -4",
            "--master-port 99999",
            "--master-port -1",
            "--monitor-interval nan",
            "--grace-secs nan",
            "--max-peer-restarts -1",
            "--rdzv-conf nonsense",
            "--rdzv-conf join_timeout=abc",
            "--rdzv-conf timeout=-1",
            "--rdzv-conf keep_alive_interval=0",
            "--local-ranks-filter x",
            "--tee 9",
            "--log-dir file/below",
            "--nonsense",
        )
    ),
    *(f"config --script {name}" for name in ("nofile.py", "broken.json", "bytes.json", "directory")),
    "launch",
    "profile",
    "profile --nproc-per-node -3 script.py",
    "profile --steps -1 script.py",
    *(f"profile --from {name}" for name in (*UNREADABLE, "null.json", "block.json", "directory")),
    "rendezvous --port 99999",
    "rendezvous --port abc",
    "rendezvous --host nonsense.invalid",
    "demo --nodes 0",
    "demo --steps -1",
    "demo --kill abc",
    "demo --kill 99:99",
    "demo --protection nonsense",
    *(
        f"{command} --memory-dir nofile"
        for command in ("inspect", "verify", "clean", "status", "persist --out out", "protect arc")
    ),
    "persist",
    "persist --out out --keep 0",
    "clean --nonsense",
    "plan",
    "plan ds.json",
    *(f"plan {name} --model 34b --dp 4" for name in UNREADABLE),
    *(f"{PLAN} --model {name}" for name in UNREADABLE),
    *(f"{PLAN} --cluster {name}" for name in UNREADABLE),
    *(f"{PLAN} --profile {name}" for name in UNREADABLE),
    *(
        f"{PLAN} {options}"
        for options in (
            "--pp 0",
            "--tp 7",
            "--tolerance -1",
            "--host-memory-gb nan",
            "--host-memory-gb inf",
            "--parameters nan",
            "--parameters 7X",
            "--max-overhead nan",
        )
    ),
    "plan --print-cluster nonsense",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REFT_MEMORY_DIR", str(tmp_path / "memory"))
    return tmp_path


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_wrong_use_is_told_and_ends_with_code_2(
    folder: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(case.split())
    except SystemExit as stop:  # argparse has told
        code = stop.code
    out, err = capfd.readouterr()
    assert code == 2, (out, err)
    assert "Traceback" not in out + err
    assert err.strip()
