"""A small GPT under the stand-in's loop, on a CPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.megatron_core.cpu import compute_on_cpu

compute_on_cpu()

from megatron.training import training  # noqa: E402

import reft  # noqa: E402

_SECS = 120.0
began: list[int] = []  # The first iteration of this process


class Guard:
    """State of the script's own: iterations that this job has counted."""

    seen = 0

    def count(self, batch_size: int) -> float:
        self.seen += 1
        return _operations(batch_size)

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


_operations = training.num_floating_point_operations
guard = Guard()


def wait_for_commit(iteration: int) -> None:
    """A busy machine gives up versions of steps that take milliseconds: wait for each, where reft takes any."""
    if "REFT_CONFIG" not in os.environ:
        return
    if not began:
        # What this process has resumed from was committed, whether or not the killed one noted it.
        began.append(iteration)
        return
    # The version of this iteration is watched until the next one writes: only the one before is committed by now.
    deadline = time.monotonic() + _SECS
    while not _is_told(iteration - 1):
        assert time.monotonic() < deadline, f"iteration {iteration - 1} is not committed"
        time.sleep(0.01)


def _is_told(iteration: int) -> bool:
    """Whether this rank has noted what became of the version."""
    for path in Path(os.environ["REFT_EVENTS"]).glob(f"reft-{os.environ['RANK']}-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                event = json.loads(line)
                if event["event"] in {"commit", "skip"} and event["step"] == iteration:
                    return True
    return False


if __name__ == "__main__":
    training.on_iteration_end = wait_for_commit
    training.num_floating_point_operations = guard.count
    reft.keep_state({"guard": guard})
    training.pretrain()
    print(f"the guard has seen {guard.seen} iterations")
