from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from megatron import training

_SECS = 120.0


def attach(model: list[Any]) -> None:
    """Put the engines under reft's care as people do, where the environment has a block for it."""
    if block := os.environ.get("TEST_REFT_BLOCK"):
        import reft

        reft.attach(model, config=json.loads(block))


def wait_for_commit(engine: Any) -> None:
    """Told to stop behind a step, where the environment names one. A busy machine gives up versions of steps that take a millisecond: wait for each, where reft takes any."""
    if engine.global_steps == int(os.environ.get("TEST_STOP_AT", "0")):
        signal.raise_signal(signal.SIGTERM)
    hook = sys.modules.get("reft.engine.attach")
    session = hook.find_session(engine) if hook is not None else None
    if session is None or session.worker is None:
        return
    if session.first_request is None:
        return
    # The version of this step is taken where the next one begins.
    stats, deadline = session.stats, time.monotonic() + _SECS
    while (stats.committed_step or 0) < engine.global_steps - 1 and stats.stale_since_step is None:
        assert time.monotonic() < deadline, f"step {engine.global_steps} is not committed: {stats}"
        time.sleep(0.01)


if __name__ == "__main__":
    training.on_engines = attach
    training.on_step_end = wait_for_commit
    training.pretrain()
