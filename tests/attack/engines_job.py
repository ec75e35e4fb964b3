"""One process that makes several engines with the block, as scripts with two models do."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import reft
from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start
from reft.env import ENV_LAUNCHER_PID
from reft.memory.joblock import JobLock
from tests.engine.engine_job import make, train
from tests.engine.ranks import be_a_rank

avoid_build_at_start()


def second_of(block: dict[str, Any], first: Any) -> dict[str, Any]:
    """Another engine of the same job, while the first one lives; what became of both."""
    arenas = {path.name: path.stat().st_ino for path in arenas_of(block)}
    try:
        engine = make(block, reft.initialize)
    except reft.ConfigError as error:
        refusal, kind = str(error), type(error).__name__
    else:
        refusal = kind = ""
        engine.load_checkpoint(str(Path(block["memory_dir"]) / "none"))
        train(engine, engine.global_steps + 2)
        session_of(engine).close()
    session = session_of(first)
    train(first, first.global_steps + 2)
    assert session.worker.drain(60)
    return {
        "refusal": refusal,
        "kind": kind,
        "untouched": {path.name: path.stat().st_ino for path in arenas_of(block)} == arenas,
        "committed": session.stats.committed_step == first.global_steps,
    }


def arenas_of(block: dict[str, Any]) -> list[Path]:
    return sorted((Path(block["memory_dir"]) / block["job_id"]).glob("*.arena"))


def main(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    none = str(root / "none")
    for name in ("torchrun", "launcher"):
        block = {"enabled": True, "job_id": name, "memory_dir": str(root / "memory")}
        lock = None
        if name == "launcher":
            (root / "memory" / name).mkdir(mode=0o700)
            lock = JobLock(root / "memory" / name, name)
            os.environ[ENV_LAUNCHER_PID] = str(os.getpid())
        first = make(block, reft.initialize)
        first.load_checkpoint(none)
        train(first, 3)
        out[name] = second_of(block, first)

        # Another job, another memory and an engine without reft live beside it.
        others = [
            make({**block, "job_id": f"{name}-other"}, reft.initialize),
            make({**block, "memory_dir": str(root / f"other-{name}")}, reft.initialize),
        ]
        make({**block, "enabled": False}, reft.initialize)
        for other in others:
            other.load_checkpoint(none)
            train(other, 2)
            session_of(other).close()

        # A closed one is in nobody's way.
        session_of(first).close()
        del first, other, others
        gc.collect()
        again = make(block, reft.initialize)
        again.load_checkpoint(none)
        out[name]["again"] = again.global_steps
        session_of(again).close()
        if lock is not None:
            lock.close()
    return out


if __name__ == "__main__":
    be_a_rank(main)
