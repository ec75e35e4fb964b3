"""One life of a job whose ranks want intervals that the test chose, killed behind a step of the test's.

``root/life.json`` has ``wants``: interval by the step from which on it is wanted; ``until``: the step;
``faults``; and whether the life is ``killed`` there. It says where it has gone on.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import reft
from reft.engine.deepspeed import session_of
from tests.engine.engine_job import make, train
from tests.engine.ranks import be_a_rank
from tests.engine.shared import block_of


def main(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    options = {"interval_steps": "auto", "max_lost_steps": 100, "faults": life["faults"]}
    engine = make(block_of(root, "due", **options), init=reft.initialize)
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = session_of(engine)
    assert session is not None
    assert session.worker is not None
    while engine.global_steps < life["until"]:
        wanted = max(int(step) for step in life["wants"] if int(step) <= engine.global_steps)
        session.worker.watchers.wanted_interval = lambda windows, k=life["wants"][str(wanted)]: k
        train(engine, engine.global_steps + 1)
        assert session.worker.drain(60)  # every vote is known, whatever the machine does
    if life.get("killed"):
        (root / f"killed-{os.environ['RANK']}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"path": path}


if __name__ == "__main__":
    be_a_rank(main)
