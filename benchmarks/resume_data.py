"""What it takes to resume a loader at a sample: the time to its first batch, against the position.

One process, a data set of numbers, no worker processes. A resumption makes the loader, loads the
position and takes one batch; positions and ways take turns within one run. Beside reft.data.loader
stands the way of reft.resumable, which keeps the order of torch's RandomSampler: it draws the whole
permutation again and passes over the indices that were taken. What the data set was asked for is
counted: one batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from results import estimate, machine
from torch.utils.data import DataLoader

import reft.data
from reft.data.passes import Position
from reft.data.watch import LoaderHook

BATCH = 4
Resume = Callable[[], Any]


class Numbers:
    """A data set that says how often it was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def of_reft(data: Numbers, at: int) -> Any:
    loader = reft.data.loader(data, BATCH, shuffle=True, seed=1)
    loader.load_state_dict({**loader.state_dict(), "consumed": at})
    return next(iter(loader))


def of_resumable(data: Numbers, at: int) -> Any:
    loader: DataLoader[Any] = DataLoader(data, BATCH, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(1)
    start = LoaderHook().begin(loader).position()
    position = Position(start.start, None, at // BATCH, start.length, start.source)
    return next(LoaderHook().begin_at(loader, position))


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--samples", type=int, default=20_000_000, help="of the data set (default 20e6)"
    )
    made.add_argument(
        "--trials", type=int, default=30, help="of reft.data.loader at each position (default 30)"
    )
    made.add_argument("--slow-trials", type=int, default=3, help="of the other ways (default 3)")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--quick", action="store_true", help="few samples and trials: for the tests")
    options = made.parse_args()
    if options.quick:
        options.samples, options.trials, options.slow_trials = 20_000, 3, 1
    result = {**measure(options), "machine": machine()}
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    ways = {"reft.data.loader": of_reft, "reft.resumable": of_resumable}
    positions = [10, options.samples // 2]
    secs: dict[tuple[str, int], list[float]] = {}
    reads: dict[tuple[str, int], int] = {}
    for trial in range(options.trials + 1):
        for name, resume in ways.items():
            if name != "reft.data.loader" and trial > options.slow_trials:
                continue
            for at in positions:
                data = Numbers(options.samples)
                began = time.perf_counter()
                resume(data, at)
                if trial:  # the first is warm-up
                    secs.setdefault((name, at), []).append(time.perf_counter() - began)
                reads[name, at] = data.read
    rows = [
        {
            "way": name,
            "sample": at,
            "samples_read": reads[name, at],
            "secs": estimate(found).to_json(),
        }
        for (name, at), found in secs.items()
    ]
    return {"samples": options.samples, "batch": BATCH, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'way':20}{'at sample':>12}{'read':>6}{'ms':>12}{'95 %':>22}"]
    for row in result["rows"]:
        low, high = row["secs"]["ci95"]
        lines.append(
            f"{row['way']:20}{row['sample']:12}{row['samples_read']:6}"
            f"{1e3 * row['secs']['median']:12.2f}"
            f"{1e3 * low:11.2f}{1e3 * high:11.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
