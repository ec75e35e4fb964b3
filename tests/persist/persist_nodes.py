"""Several nodes that persist at once: one thread or one process each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reft.config import ReftConfig
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.storage.persist import PersistProgress, persist_label
from tests.persist.job_memory import JOB, SECRET, Memory
from tests.prefork import Popen

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECS = 200


def persist_on_all(memory: Memory, label: Label, config: ReftConfig, nodes: list[str]) -> dict[str, Any]:
    """Run ``persist_label`` for every node at once; its path, or the exception it raised."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        futures: dict[str, Future[Path]] = {
            node: pool.submit(persist_label, memory.job_dir(node), label, config) for node in nodes
        }
        return {n: f.exception(LIMIT_SECS) or f.result(LIMIT_SECS) for n, f in futures.items()}


def spawn_node(memory: Memory, node: str, label: Label, config: ReftConfig, kill_at: str = "") -> Any:
    """A process that persists on one node and kills itself when it reaches the phase ``kill_at``."""
    request = {
        "path": str(memory.job_dir(node).path),
        "node": node,
        "label": [label.incarnation, label.step],
        "config": config.model_dump_json(),
        "kill_at": kill_at,
    }
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return Popen(
        [sys.executable, __file__, json.dumps(request)], env=environment, stderr=subprocess.PIPE, text=True
    )


def main() -> None:
    request = json.loads(sys.argv[1])

    def progress(at: PersistProgress) -> None:
        if at.phase == request["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    job = JobDir(Path(request["path"]), JOB, request["node"])
    assert job.secret == SECRET
    persist_label(
        job, Label(*request["label"]), ReftConfig.model_validate_json(request["config"]), progress=progress
    )


if __name__ == "__main__":
    main()
