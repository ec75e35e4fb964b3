"""What it costs to be watched for hangs, and to watch.

    .venv/bin/python benchmarks/watching.py --json

A trainer notes every instruction of the pipeline's schedule on its page. Rounds of the same empty
instruction, called as the engine calls it, alternate: as it is, and with the note around it; the
difference is the note's cost; likewise for two, one of which computes. Beside it the same for a
step (its beginning and end). A daemon looks at the pages of its node four times a second: the
processor seconds of one look at the pages of so many trainers, whose processes exist.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from results import estimate, machine, run_lines

from reft.node.hangs import ActivityTracker
from reft.node.progress import ProgressPage, at_instruction, open_page, read_pages

LOOKS_PER_SEC = 4
STEP_SECS, MICRO_BATCHES = 0.1, 8
"""Of the step whose share is told: a short one. The middle stage of a pipeline has six instructions
per micro batch, two of which compute, and three at the end."""
TRAINERS = (1, 8)


def instruction(buffer_id: int) -> None:
    """An instruction that does nothing."""


def thread_secs(call: Callable[[], Any], times: int) -> float:
    """Processor seconds of one call."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def step_share(note_secs: float, turn_secs: float, step_secs: float) -> float:
    """The part of a step that its notes take."""
    notes = (4 * MICRO_BATCHES + 3 - 2 * MICRO_BATCHES) * note_secs
    return (notes + 2 * MICRO_BATCHES * turn_secs + step_secs) / STEP_SECS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=40, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--calls", type=int, default=50_000, help="of a round (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few and short rounds: for the tests")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for the pages")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.calls = 3, 200
    notes, turns, steps, looks = [], [], [], {trainers: [] for trainers in TRAINERS}
    with tempfile.TemporaryDirectory(prefix="reft-bench-", dir=options.shm) as folder:
        page = open_page(Path(folder), 0, 0, 10.0, 600.0)
        noted = partial(at_instruction(page, "ForwardPass"), instruction)
        sent = partial(at_instruction(page, "SendActivation"), instruction)
        for _ in range(options.rounds):
            plain = thread_secs(lambda: instruction(buffer_id=0), options.calls)
            notes.append(thread_secs(lambda: noted(buffer_id=0), options.calls) - plain)
            page.begin_step()
            # To computing and back: how long the thread had no core is read as it comes and as it
            # goes.
            both = thread_secs(lambda: (noted(buffer_id=0), sent(buffer_id=0)), options.calls)
            turns.append(both - 2 * plain)
            page.end_step(1)
            steps.append(thread_secs(lambda: (page.begin_step(), page.end_step(1)), options.calls))
            for trainers in TRAINERS:
                pages = [ProgressPage(Path(folder), n, n, 10.0, 600.0) for n in range(1, trainers)]
                watch = ActivityTracker()
                calls = max(1, options.calls // 100)
                look = thread_secs(lambda w=watch: w.poll(read_pages(Path(folder)), 0.25), calls)
                looks[trainers].append(look)
                for other in pages:
                    other.close()
        page.close()
    result = {
        "benchmark": "watching",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/watching.py", *sys.argv[1:]]),
        "machine": machine(),
        "note_secs": estimate(notes).to_json(),
        "to_computing_and_back_secs": estimate(turns).to_json(),
        "step_secs": estimate(steps).to_json(),
        "share_of_a_step": {
            "step_secs": STEP_SECS,
            "micro_batches": MICRO_BATCHES,
            "share": step_share(
                estimate(notes).median, estimate(turns).median, estimate(steps).median
            ),
        },
        "look_secs": {
            str(trainers): estimate(found).to_json() for trainers, found in looks.items()
        },
        "daemon_share_of_a_core": {
            str(trainers): LOOKS_PER_SEC * estimate(found).median
            for trainers, found in looks.items()
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print("\n".join(run_lines(result)))
    print(f"an instruction's note   {result['note_secs']['median'] * 1e9:8.0f} ns")
    print(f"a step's notes          {result['step_secs']['median'] * 1e9:8.0f} ns")
    for trainers, share in result["daemon_share_of_a_core"].items():
        print(f"daemon, {trainers} trainers      {share:8.3%} of a core")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
