"""What the benchmarks share: ranks of a real DeepSpeed engine, scratch space, statistics, cores.

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
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
_PREFIX = "reft-bench-"
_PR_SET_PDEATHSIG = 1
_SAMPLE_SECS = 0.05
_BOOTSTRAPS = 4000


def progress(text: str) -> None:
    """One line for whoever waits, on standard error."""
    print(text, file=sys.stderr, flush=True)


# --- command line ----------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--params", type=float, default=100e6, help="model parameters (default 100e6)")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    made.add_argument("--dp", type=int, default=2, help="replicas, each a node of its own (default 2)")
    made.add_argument("--zero", type=int, choices=(0, 1), default=0, help="ZeRO stage (default 0)")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(default fp32)")
    made.add_argument("--seq", type=int, default=128, help="tokens of a sample (default 128)")
    made.add_argument("--micro-batch", type=int, default=1, help="samples of a micro-batch (default 1)")
    made.add_argument("--micro-batches", type=int, default=2, help="micro-batches of a step (default 2)")
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for snapshots")
    made.add_argument("--disk", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")), help="for files")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--quick", action="store_true", help="a tiny model and few trials: for the tests")
    made.add_argument("--verbose", action="store_true", help="let DeepSpeed talk, on standard error")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return made


def quicken(options: argparse.Namespace) -> None:
    """What ``--quick`` means for the model."""
    options.params, options.seq, options.micro_batch, options.micro_batches = 2e5, 16, 1, 2 * options.pp - 1


@dataclass(frozen=True)
class Shape:
    """A Llama-2 shape near a wanted number of parameters."""

    hidden: int
    layers: int
    vocab: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def ffn(self) -> int:
        return -(-self.hidden * 8 // 3 // 64) * 64

    @property
    def parameters(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    @classmethod
    def near(cls, parameters: float, stages: int) -> Shape:
        """The shape closest to ``parameters``; among near ones the one with natural proportions."""

        def distance(shape: Shape) -> float:
            natural = abs(shape.layers - max(2, shape.hidden // 64)) / shape.layers
            return abs(shape.parameters - parameters) / parameters + 0.1 * natural

        made = [
            cls(hidden, layers, 8192 if hidden > 128 else 512)
            for hidden in (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
            for layers in range(max(2, stages), 49)
        ]
        return min(made, key=distance)


# --- scratch and processes -------------------------------------------------------------------------


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def launch(options: argparse.Namespace, space: Scratch) -> tuple[list[dict[str, Any]], MemorySampler]:
    """Run this script once per rank and wait.

    Returns:
        What every rank wrote with :func:`write_result`, and the memory seen meanwhile.

    Raises:
        SystemExit: a rank failed; its standard error has been shown.
    """
    world, port = options.dp * options.pp, _free_port()
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
            raise SystemExit(f"rank {failed} ended with status {codes[failed]}; its messages are above")
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


# --- memory -------------------------------------------------------------------------------------------


class MemorySampler:
    """Samples, from outside, the private memory of the ranks and the files they keep in tmpfs.

    Args:
        pids: process per rank.
        shm: folder whose files count as shared memory, by first folder below it.
    """

    def __init__(self, pids: Sequence[int], shm: Path) -> None:
        self._pids = pids
        self._shm = shm
        self._samples: list[tuple[float, list[int], dict[str, int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECS):
            now = time.monotonic()
            private = [_private_bytes(pid) for pid in self._pids]
            self._samples.append((now, private, _files_by_folder(self._shm)))

    def peak_private(self, begin: float, end: float) -> int | None:
        """Most private (anonymous) memory of all ranks together between two ``time.monotonic()``."""
        seen = [sum(private) for at, private, _ in self._samples if begin <= at <= end]
        return max(seen, default=None)

    def peak_files(self, prefix: str) -> int:
        """Most bytes of tmpfs seen in folders whose name begins with ``prefix``."""
        return max(
            (sum(n for name, n in files.items() if name.startswith(prefix)) for _, _, files in self._samples),
            default=0,
        )


def _private_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _files_by_folder(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(OSError):
        for folder in os.scandir(root):
            total = 0
            for base, _, names in os.walk(folder.path):
                for name in names:
                    with suppress(OSError):
                        total += os.stat(os.path.join(base, name)).st_blocks * 512
            found[folder.name] = total
    return found


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


# --- statistics ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "ci95": [self.low, self.high], "samples": self.samples}


def estimate(values: Sequence[float]) -> Estimate:
    """The median of ``values`` and its 95 % confidence interval, by resampling."""
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(data, size=(_BOOTSTRAPS, len(data)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


# --- facts -------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures were measured on; no names."""
    model = platform.processor() or platform.machine()
    memory = 0
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
        first = Path("/proc/meminfo").read_text().splitlines()[0]
        memory = int(first.split()[1]) * 1024
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def facts(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Head of every result."""
    shape = Shape.near(options.params, options.pp)
    return {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": machine(),
        "software": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "deepspeed", "reft-ckpt")},
        },
        "model": {
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": shape.vocab,
            "dtype": options.dtype,
            "zero": options.zero,
            "tokens_per_step": options.seq * options.micro_batch * options.micro_batches * options.dp,
        },
        "layout": {"pp": options.pp, "dp": options.dp, "ranks": options.pp * options.dp, "backend": "gloo"},
    }


def head_lines(result: Mapping[str, Any]) -> list[str]:
    """Head of a table for people: what was run, on what."""
    model, layout, host = result["model"], result["layout"], result["machine"]
    software = ", ".join(f"{name} {number}" for name, number in result["software"].items())
    return [
        f"$ {result['command']}",
        f"{result['date']}, {host['cores']} cores of {host['cpu']}, {host['memory_bytes'] / 2**30:.0f} GiB, "
        f"CPU and {layout['backend']} only, load average {host['load_average_at_start']} before the start",
        software,
        f"{model['parameters'] / 1e6:.1f}M parameters, {result['optimizer']} (ZeRO-{model['zero']}), "
        f"{model['dtype']}, PP{layout['pp']} x DP{layout['dp']}, {model['tokens_per_step']} tokens a step",
    ]


# --- the engine, in a rank -------------------------------------------------------------------------


def build_engine(options: argparse.Namespace) -> tuple[Any, Iterator[Any]]:
    """DeepSpeed's pipeline engine around the benchmark's model, and endless data for it."""
    import itertools

    import torch

    from reft.pretrain import train
    from reft.pretrain.layout import Layout, degrees_for
    from reft.pretrain.options import parse

    shape = Shape.near(options.params, options.pp)
    wanted = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv-heads": shape.heads,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "seq": options.seq,
        "micro-batch": options.micro_batch,
        "micro-batches": options.micro_batches,
        "pp": options.pp,
        "zero": options.zero,
        "dtype": options.dtype,
        "steps": 1_000_000,
    }
    argv = [text for name, value in wanted.items() for text in (f"--{name}", str(value))]
    job = parse(argv)
    # Denormals would make a CPU's backward pass several times slower (trap 19).
    torch.set_flush_denormal(True)
    train._import_deepspeed(options.verbose)
    with train._quiet(options.verbose):
        import deepspeed

        deepspeed.init_distributed()
    layout = Layout(degrees_for(options.pp * options.dp, options.pp, 1, options.dp))
    engine = train.build_engine(job, job.model_config(), layout)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(
        0, shape.vocab, (8, options.micro_batch, options.seq + 1), dtype=torch.int64, generator=generator
    )
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    return engine, itertools.cycle(batches)


def inner_optimizer(engine: Any) -> Any:
    """The torch optimizer below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def masters(engine: Any) -> dict[str, Any]:
    """What the optimizer updates, where that is not the model itself: ZeRO's fp32 partitions."""
    model = {id(p) for p in engine.module.parameters()}
    return {
        f"{g}.{i}": param.data
        for g, group in enumerate(inner_optimizer(engine).param_groups)
        for i, param in enumerate(group["params"])
        if id(param) not in model
    }


# --- cores, in a rank ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """Which cores training threads and helper threads (those that save) may use."""

    name: str
    training: tuple[int, ...]
    helpers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        shared = sorted(set(self.training) & set(self.helpers))
        return {
            "training_cores": len(self.training),
            "helper_cores": len(self.helpers),
            "shared_cores": len(shared),
        }


def situations(world: int) -> list[Cores]:
    """Without a spare core, and with exactly one for the helpers of all ranks.

    With as many cores as ranks, a spare core exists only if the ranks' training threads share the
    others: their steps take longer, the helpers have one core for themselves.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    busy = cores[: min(world, len(cores))]
    made = [Cores("no_spare_core", busy, busy)]
    if len(cores) > 1:
        training = cores[: min(world, len(cores) - 1)]
        made.append(Cores("spare_core", training, cores[len(training) : len(training) + 1]))
    return made


@dataclass
class ThreadPlacement:
    """Puts the threads of this process where a situation wants them.

    Threads that existed when this was made belong to training; later ones were started by savers.
    """

    _training: frozenset[int] = field(default_factory=lambda: frozenset(_threads()))
    _placed: set[int] = field(default_factory=set)
    _cores: Cores | None = None

    def apply(self, cores: Cores) -> None:
        """Place every thread."""
        self._cores = cores
        self._placed.clear()
        for thread in self._training:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores.training)
        self.place_new()

    def place_new(self) -> None:
        """Place the threads that savers have started since the last call."""
        assert self._cores is not None
        for thread in _threads() - self._training - self._placed:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, self._cores.helpers)
            self._placed.add(thread)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


# --- stopwatch, in a rank --------------------------------------------------------------------------


class Stopwatch:
    """Wall and CPU seconds of named calls, by wrapping attributes of objects, classes or modules."""

    def __init__(self) -> None:
        self._wall: dict[str, float] = {}
        self._cpu: dict[str, float] = {}

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Count every later call of ``owner.attribute`` under ``name``."""
        original = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._wall[name] = self._wall.get(name, 0.0) + time.perf_counter() - wall
                self._cpu[name] = self._cpu.get(name, 0.0) + time.thread_time() - cpu

        setattr(owner, attribute, timed)

    def take(self) -> dict[str, tuple[float, float]]:
        """``(wall, cpu)`` seconds per name since the last call."""
        taken = {name: (self._wall[name], self._cpu[name]) for name in list(self._wall)}
        self._wall.clear()
        self._cpu.clear()
        return taken
