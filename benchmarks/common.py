"""What the benchmarks share: their options, scratch space, and a process per rank.

A benchmark is a script that runs itself once per rank (``launch``). Every rank is its own node with
its own memory directory; all scratch lies below two folders that are removed at the end, also after
Ctrl-C, and after a SIGKILL by the next run. The launching process imports neither torch nor
DeepSpeed: it only samples memory while the ranks work.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster import free_port
from memory_sampler import MemorySampler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # some train the Llama of examples/

MIB = 2**20
_PREFIX = "reft-bench-"
_PR_SET_PDEATHSIG = 1


def progress(text: str) -> None:
    """One line for whoever waits, on standard error."""
    print(text, file=sys.stderr, flush=True)


# --- command line ---------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument(
        "--params", type=float, default=100e6, help="model parameters (default 100e6)"
    )
    made.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    made.add_argument(
        "--dp", type=int, default=2, help="replicas, each a node of its own (default 2)"
    )
    made.add_argument("--zero", type=int, choices=(0, 1), default=0, help="ZeRO stage (default 0)")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(default fp32)")
    made.add_argument("--seq", type=int, default=128, help="tokens of a sample (default 128)")
    made.add_argument(
        "--micro-batch", type=int, default=1, help="samples of a micro-batch (default 1)"
    )
    made.add_argument(
        "--micro-batches", type=int, default=2, help="micro-batches of a step (default 2)"
    )
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for snapshots")
    made.add_argument(
        "--disk", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")), help="for files"
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument(
        "--quick", action="store_true", help="a tiny model and few trials: for the tests"
    )
    made.add_argument(
        "--verbose", action="store_true", help="let DeepSpeed talk, on standard error"
    )
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return made


def add_device(made: argparse.ArgumentParser) -> None:
    """For benchmarks whose ranks may train on a device, which they share."""
    made.add_argument(
        "--device", choices=("cuda", "sim"), help="train on it (default: as DeepSpeed finds)"
    )


def quicken(options: argparse.Namespace) -> None:
    """What ``--quick`` means for the model."""
    options.params, options.seq, options.micro_batch, options.micro_batches = (
        2e5,
        16,
        1,
        2 * options.pp - 1,
    )


# --- scratch and processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scratch:
    """Folders of one run: ``shm`` in memory, ``disk`` on a file system."""

    shm: Path
    disk: Path

    def memory_dir(self, rank: int) -> Path:
        """Memory of the node that is rank ``rank``."""
        return self.shm / f"node{rank}"

    def result(self, rank: int) -> Path:
        return self.disk / f"rank{rank}.json"


@contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Scratch]:
    """Two folders, removed at the end whatever ends the run; those of dead runs are removed too."""
    name = f"{_PREFIX}{os.getpid()}"
    made = Scratch(options.shm / name, options.disk / name)
    for parent in (options.shm, options.disk):
        for stale in parent.glob(f"{_PREFIX}*"):
            if not Path("/proc", stale.name.removeprefix(_PREFIX)).exists():
                shutil.rmtree(stale, ignore_errors=True)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        made.shm.mkdir(parents=True)
        made.disk.mkdir(parents=True)
        yield made
    finally:
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(made.shm, ignore_errors=True)
        shutil.rmtree(made.disk, ignore_errors=True)


def _rank_environment(rank: int, world: int, port: int, space: Scratch) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("REFT_", "TORCHELASTIC_"))}
    return {
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "REFT_NODE_ID": f"node{rank}",
        "REFT_MEMORY_DIR": str(space.memory_dir(rank)),
        "REFT_JOB_ID": "bench",
    }


def launch(
    options: argparse.Namespace, space: Scratch
) -> tuple[list[dict[str, Any]], MemorySampler]:
    """Run this script once per rank and wait.

    Returns:
        What every rank wrote with :func:`write_result`, and the memory seen meanwhile.

    Raises:
        SystemExit: a rank failed; its standard error has been shown.
    """
    world, port = options.dp * options.pp, free_port()
    command = [sys.executable, *sys.argv, "--worker", str(space.disk)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            ranks.append(
                subprocess.Popen(
                    command,
                    env=_rank_environment(rank, world, port, space),
                    stdout=sys.stderr.fileno() if options.verbose else subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        sampler = MemorySampler([r.pid for r in ranks], space.shm)
        with sampler:
            _wait(ranks)
    finally:
        for process in ranks:
            # The number of one that has ended may be another group's by now.
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [json.loads(space.result(rank).read_text()) for rank in range(world)], sampler


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        if any(codes):
            failed = next(r for r, code in enumerate(codes) if code)
            raise SystemExit(
                f"rank {failed} ended with status {codes[failed]}; its messages are above"
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)


def enter_worker(folder: Path) -> Scratch:
    """First thing in a rank: die with the launcher, know the folders."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return Scratch(Path(os.environ["REFT_MEMORY_DIR"]).parent, folder)


def write_result(space: Scratch, result: Mapping[str, Any]) -> None:
    space.result(int(os.environ["RANK"])).write_text(json.dumps(result))


def leave_worker() -> None:
    """End a rank without the minutes that interpreters and gloo may take to say good-bye."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
