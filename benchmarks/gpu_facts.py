"""Facts of one device in about a minute, each on its own: one JSON line as soon as it is known.

    python benchmarks/gpu_facts.py [--device cuda|sim] [--only NAME ...] [--small]

A fact that fails says its error and the rest goes on; what may end the process (a block of a closed
engine, a fork) runs in a process of its own. Times of the simulated device mean nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, os.getcwd())
GIB, MIB = 2**30, 2**20
FACTS: dict[str, Callable[[], dict]] = {}


def fact(call: Callable[[], dict]) -> Callable[[], dict]:
    FACTS[call.__name__] = call
    return call


def said(command: list[str], secs: float = 20, **env: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=secs,
            check=False,
            env={**os.environ, **env},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    text = (done.stdout + done.stderr).strip()
    return text if not done.returncode else f"rc {done.returncode}: {text[-600:]}"


def child(code: str, secs: float = 60, **env: str) -> dict:
    """Run code in a process of its own; its last line is its result."""
    begin = time.monotonic()
    text = said([sys.executable, "-c", PRELUDE + code], secs, **env)
    return {
        "secs": round(time.monotonic() - begin, 2),
        "said": text.splitlines()[-1][-500:] if text else "",
    }


class Mapped:
    """A file in a folder, mapped as arenas are."""

    def __init__(self, nbytes: int, folder: Path, fill: bool = True) -> None:
        import torch

        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- as long as this object
        begin = time.perf_counter()
        os.posix_fallocate(self.file.fileno(), 0, nbytes)
        self.allocate_secs = time.perf_counter() - begin
        self.memory = mmap.mmap(self.file.fileno(), nbytes)
        begin = time.perf_counter()
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        if fill:
            self.tensor[:: mmap.PAGESIZE] = 1  # map the pages
        self.map_secs = time.perf_counter() - begin


# -- the machine -----------------------------------------------------------------------------------


@fact
def machine() -> dict:
    shm = shutil.disk_usage(OPTIONS.shm)
    maps = [
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libcuda.so" in line
    ]
    import resource

    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next(
            (
                x.split(":")[1].strip()
                for x in Path("/proc/cpuinfo").read_text().splitlines()
                if x.startswith("model name")
            ),
            "?",
        ),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE / GIB, 1),
        "shm_gib": [round(shm.total / GIB, 1), round(shm.free / GIB, 1)],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "numa_maps": Path("/proc/self/numa_maps").exists(),
        "shmem_huge": Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip(),
        "libcuda": sorted(set(maps)),
        "nvidia_smi": said(
            [
                "nvidia-smi",
                "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,"
                "clocks.sm,clocks.max.sm,compute_mode",
                "--format=csv,noheader",
            ]
        ),
        "compilers": {n: shutil.which(n) for n in ("nvcc", "g++", "c++", "ninja")},
    }


@fact
def software() -> dict:
    from importlib.metadata import version

    import torch

    found = {}
    for name in (
        "torch",
        "numpy",
        "deepspeed",
        "pydantic",
        "pydantic_core",
        "typing_extensions",
        "cupy-cuda13x",
        "triton",
        "msgpack",
        "xxhash",
        "typer",
        "rich",
        "pytest",
        "hypothesis",
        "nvidia-nccl-cu13",
        "cuda-pathfinder",
    ):
        try:
            found[name] = version(name)
        except Exception as error:
            found[name] = type(error).__name__
    from torch.utils.cpp_extension import CUDA_HOME

    begin = time.perf_counter()
    import deepspeed  # noqa: F401

    secs = time.perf_counter() - begin
    from deepspeed.accelerator import get_accelerator

    return {
        **found,
        "cuda": torch.version.cuda,
        "cuda_home": CUDA_HOME,
        "deepspeed_import_secs": round(secs, 2),
        "accelerator": get_accelerator()._name,
    }


# -- the driver ------------------------------------------------------------------------------------


@fact
def driver() -> dict:
    """What reft/device.py calls: names, argument types, error texts."""
    vendor, device = VENDOR, DEVICE
    begin = time.perf_counter()
    vendor.enter(device)
    torch.zeros(1, device=device)
    out = {"first_use_secs": round(time.perf_counter() - begin, 2)}
    stream = vendor.create_stream(device)
    with vendor.module.stream(stream):
        torch.ones(10, device=device).add_(1)
    stream.synchronize()
    out["own_stream"], out["numa_node"] = type(stream).__name__, vendor.numa_node(device)
    memory = Mapped(4 * MIB, OPTIONS.shm)
    address = memory.tensor.data_ptr()
    vendor.host_register(device, address, 4 * MIB)
    try:
        vendor.host_register(device, address, 4 * MIB)
        out["twice"] = "NOT REFUSED"
    except RuntimeError as error:
        out["twice"] = str(error)
    torch.ones(1, device=device).add_(1)
    vendor.module.synchronize()  # no error is left behind
    vendor.host_unregister(device, address)
    on_disk = Mapped(4 * MIB, OPTIONS.disk)
    try:
        vendor.host_register(device, on_disk.tensor.data_ptr(), 4 * MIB)
        out["on_disk"] = "registered"
        vendor.host_unregister(device, on_disk.tensor.data_ptr())
    except RuntimeError as error:
        out["on_disk"] = str(error)
    return out


@fact
def registering() -> dict:
    """Seconds a GiB: to reserve, map, register, unregister what an arena takes; by four threads.

    Registered in pieces, no call holds the driver for longer than "register_longest_piece_ms".
    """
    nbytes = (64 * MIB) if OPTIONS.small else 8 * GIB
    memory = Mapped(nbytes, OPTIONS.shm)
    address, piece = memory.tensor.data_ptr(), min(256 * MIB, nbytes // 4)
    pieces = [address + at for at in range(0, nbytes, piece)]
    out: dict = {"gib": nbytes / GIB}

    def note(name: str, secs: float) -> None:
        out[f"{name}_secs_per_gib"] = round(secs * GIB / nbytes, 3)

    def timed_call(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def each(call: Callable[[int], float]) -> list[float]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(call, pieces))

    def register(at: int) -> float:
        return timed_call(lambda: VENDOR.host_register(DEVICE, at, piece))

    def unregister(at: int) -> float:
        return timed_call(lambda: VENDOR.host_unregister(DEVICE, at))

    note("reserve", memory.allocate_secs)
    note("map", memory.map_secs)
    note("register", timed_call(lambda: VENDOR.host_register(DEVICE, address, nbytes)))
    note("unregister", timed_call(lambda: VENDOR.host_unregister(DEVICE, address)))
    secs = [register(at) for at in pieces]
    note("register_pieces", sum(secs))
    out["register_longest_piece_ms"] = round(max(secs) * 1e3, 1)
    each(unregister)
    note("register_4_threads", timed_call(lambda: each(register)))
    each(unregister)
    with tempfile.TemporaryFile(dir=OPTIONS.shm) as file:
        fd = file.fileno()
        os.ftruncate(fd, nbytes)
        starts = [at - address for at in pieces]
        with ThreadPoolExecutor(4) as threads:
            note(
                "reserve_4_threads",
                timed_call(
                    lambda: list(threads.map(lambda at: os.posix_fallocate(fd, at, piece), starts))
                ),
            )
    return out


# -- copies ----------------------------------------------------------------------------------------


def timed(call: Callable[[], object], trials: int = 3) -> float:
    """Seconds by the device's clock, the best."""
    best = float("inf")
    for _ in range(trials + 1):
        a, b = (MODULE.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        b.synchronize()
        best = min(best, a.elapsed_time(b) * 1e-3)
    return max(best, 1e-9)


@fact
def copies() -> dict:
    """GB/s of plain copies, both ways: a registered arena, the driver's pinned memory, pageable
    memory."""
    nbytes = (8 * MIB) if OPTIONS.small else GIB
    live = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=DEVICE)
    arena = Mapped(nbytes, OPTIONS.shm)
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    plain = Mapped(nbytes, OPTIONS.shm)
    VENDOR.host_register(DEVICE, arena.tensor.data_ptr(), nbytes)
    out = {}
    for name, host in (
        ("registered", arena.tensor),
        ("pinned", pinned),
        ("pageable", plain.tensor),
    ):
        out[f"d2h_{name}"] = round(
            nbytes / timed(lambda host=host: host.copy_(live, non_blocking=True)) / 1e9, 2
        )
        out[f"h2d_{name}"] = round(
            nbytes / timed(lambda host=host: live.copy_(host, non_blocking=True)) / 1e9, 2
        )
    VENDOR.host_unregister(DEVICE, arena.tensor.data_ptr())
    return out


@fact
def restoring() -> dict:
    """GB/s of blocks of 4 MiB, hashed and copied to the device, by threads and ways.

    "writer" is what reft does: through a small registered buffer of each thread. "pageable": from
    the arena as it is, on the default stream, then hashed. "registered": the same from an arena
    that was registered first, in "register_secs_per_gib".
    """
    from reft.engine.device_writer import DeviceWriter
    from reft.memory.header import checksum

    nbytes = (8 * MIB) if OPTIONS.small else 2 * GIB
    live = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    arena, step = Mapped(nbytes, OPTIONS.shm), min(4 * MIB, nbytes)
    blocks = [slice(at, at + step) for at in range(0, nbytes, step)]
    writer = DeviceWriter(DEVICE, VENDOR)

    def write(block: slice) -> None:
        data = arena.tensor[block]
        writer.write([(live[block], data)], data)

    def copy(block: slice) -> None:
        live[block].copy_(arena.tensor[block])
        checksum(arena.tensor[block].numpy().data)

    def rate(call: Callable[[slice], None], threads: int) -> float:
        best = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(2):
                begin = time.perf_counter()
                list(pool.map(call, blocks))
                MODULE.synchronize()
                best = min(best, time.perf_counter() - begin)
        return round(nbytes / best / 1e9, 2)

    out: dict = {}
    for threads in (1, 2, 4, 8):
        out[f"writer_{threads}"] = rate(write, threads)
        out[f"pageable_{threads}"] = rate(copy, threads)
    writer.close()
    out["equal"] = torch.equal(live.cpu(), arena.tensor)
    begin = time.perf_counter()
    VENDOR.host_register(DEVICE, arena.tensor.data_ptr(), nbytes)
    out["register_secs_per_gib"] = round((time.perf_counter() - begin) * GIB / nbytes, 3)
    out["registered_8"] = rate(copy, 8)
    VENDOR.host_unregister(DEVICE, arena.tensor.data_ptr())
    return out


@fact
def engine_copies() -> dict:
    """reft's own engine: GB/s, microseconds of the host for a batch, and wrong bytes."""
    from reft.snapshot.device_engine import DeviceCopyEngine

    nbytes, batch = ((8 * MIB), MIB) if OPTIONS.small else (2 * GIB, 32 * MIB)
    out = {}
    arena = Mapped(nbytes, OPTIONS.shm)
    engine = DeviceCopyEngine(DEVICE, VENDOR)
    out["registered"] = engine.register(arena.memory)
    for pieces in (1, 16, 64):
        tensors = [
            torch.full((batch // pieces,), n % 251, dtype=torch.uint8, device=DEVICE)
            for n in range(nbytes // batch * pieces)
        ]
        each = batch // pieces
        MODULE.synchronize()
        engine.begin()
        begin = time.perf_counter()
        for n in range(nbytes // batch):
            engine.copy(
                [
                    (
                        tensors[n * pieces + k],
                        arena.tensor[(n * pieces + k) * each : (n * pieces + k + 1) * each],
                    )
                    for k in range(pieces)
                ]
            )
        handed = time.perf_counter()
        engine.fence()
        for t in tensors:
            t.fill_(252)  # the optimizer step: it must not be seen
        engine.synchronize()
        ended = time.perf_counter()
        wrong = sum(
            int((arena.tensor[n * each : (n + 1) * each] != n % 251).sum())
            for n in range(0, len(tensors), max(1, len(tensors) // 64))
        )
        out[f"pieces_{pieces}"] = {
            "gb_per_sec": round(nbytes / (ended - begin) / 1e9, 2),
            "wrong_bytes": wrong,
            "host_us_per_batch": round((handed - begin) / (nbytes // batch) * 1e6, 1),
        }
        del tensors
    engine.unregister(arena.memory)
    engine.close()
    return out


@fact
def beside_training() -> dict:
    """What copies cost matrix products of a full device, and a thread that launches small
    kernels."""
    from reft.snapshot.device_engine import DeviceCopyEngine

    nbytes, batch = ((8 * MIB), MIB) if OPTIONS.small else (4 * GIB, 32 * MIB)
    size = 256 if OPTIONS.small else 8192
    live = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    arena = Mapped(nbytes, OPTIONS.shm)
    engine = DeviceCopyEngine(DEVICE, VENDOR)
    engine.register(arena.memory)
    dtype = torch.float32 if OPTIONS.device == "sim" else torch.bfloat16
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    small = torch.zeros(1000, device=DEVICE)

    def products() -> None:
        for _ in range(2 if OPTIONS.small else 60):
            a @ b

    def launches() -> None:
        for _ in range(200 if OPTIONS.small else 20000):
            small.add_(1)

    def run(work: Callable[[], None], copies: bool) -> float:
        MODULE.synchronize()
        engine.begin()
        done = threading.Event()
        count = [0]

        def copy() -> None:
            while not done.is_set():
                for at in range(0, nbytes, batch):
                    if done.is_set():
                        break
                    engine.copy([(live[at : at + batch], arena.tensor[at : at + batch])])
                    count[0] += batch
                    if count[0] % (8 * batch) == 0:
                        engine._side.synchronize()

        thread = threading.Thread(target=copy)
        begin = time.perf_counter()
        if copies:
            thread.start()
        work()
        MODULE.current_stream().synchronize()
        secs = time.perf_counter() - begin
        done.set()
        if copies:
            thread.join()
        engine.fence()
        engine.synchronize()
        return secs

    out = {}
    for name, work in (("products", products), ("small_launches", launches)):
        run(work, False)
        pairs = [(run(work, False), run(work, True)) for _ in range(2 if OPTIONS.small else 5)]
        out[name] = {
            "alone_ms": round(median(p[0] for p in pairs) * 1e3, 2),
            "with_copies_percent": round(median(100 * (p[1] / p[0] - 1) for p in pairs), 2),
        }
    engine.unregister(arena.memory)
    engine.close()
    return out


@fact
def sealing() -> dict:
    """Checksums with a look for NaN, GB/s, by threads; whether reft's threads keep up with the
    link."""
    from reft.memory.stream import EXPONENTS, choose_loop, find_ranges, hashing_copier
    from reft.snapshot.copier import hashing_threads

    nbytes = (8 * MIB) if OPTIONS.small else 2 * GIB
    arena = Mapped(nbytes, OPTIONS.shm)
    live = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    VENDOR.host_register(DEVICE, arena.tensor.data_ptr(), nbytes)
    link = nbytes / timed(lambda: arena.tensor.copy_(live, non_blocking=True)) / 1e9
    VENDOR.host_unregister(DEVICE, arena.tensor.data_ptr())
    mine = hashing_threads()
    out = {"threads": mine, "link_gb_per_sec": round(link, 2), "piece_bytes": choose_loop()}
    for threads in sorted({1, 2, 4, 8, mine}):
        part = nbytes // threads // 8 * 8

        def hash_(n: int, part: int = part) -> None:
            hasher = hashing_copier()
            hasher.copy(
                find_ranges([(0, arena.tensor.data_ptr() + n * part, part, EXPONENTS["bfloat16"])])
            )
            hasher.take()

        with ThreadPoolExecutor(threads) as pool:
            best = float("inf")
            for _ in range(2):
                begin = time.perf_counter()
                list(pool.map(hash_, range(threads)))
                best = min(best, time.perf_counter() - begin)
        out[f"gb_per_sec_{threads}"] = round(nbytes / best / 1e9, 2)
    out["keeps_up"] = out[f"gb_per_sec_{mine}"] >= link
    return out


# -- arithmetic ------------------------------------------------------------------------------------


@fact
def exact_adam() -> dict:
    """Equal bits on device and host; seconds of 100 million parameters beside torch's fused
    AdamW."""
    from reft.optim import ExactAdam
    from reft.policy.choice import _try_adam

    exact, per_sec = _try_adam(DEVICE)
    out = {"equal": exact, "host_parameters_per_sec": round(per_sec)}
    count = 10_000 if OPTIONS.small else 100_000_000
    for name, made in (
        ("exact", ExactAdam),
        ("fused", lambda p: torch.optim.AdamW(p, fused=OPTIONS.device == "cuda")),
    ):
        param = torch.nn.Parameter(torch.randn(count, device=DEVICE))
        param.grad = torch.randn(count, device=DEVICE)
        optimizer = made([param])
        out[f"{name}_ms"] = round(timed(optimizer.step) * 1e3, 3)
    return out


@fact
def parities() -> dict:
    """CuPy and torch: equal bytes, GB/s of sources, microseconds of the host a call, seconds of the
    first."""
    import numpy as np

    from reft.protect.backend import CupyBackend, NumpyBackend, TorchBackend
    from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, parity_rows

    backends = {"torch": TorchBackend()}
    try:
        begin = time.perf_counter()
        backends["cupy"] = CupyBackend()
        out = {"cupy_import_secs": round(time.perf_counter() - begin, 2)}
    except Exception as error:
        out = {"cupy": f"{type(error).__name__}: {str(error)[:300]}"}
    nbytes = 4 * CELL_BYTES if OPTIONS.small else 16 * MIB // CELL_BYTES * CELL_BYTES
    stream = VENDOR.create_stream(DEVICE)
    for label, rows in (
        ("xor3", [(1, 1, 1)]),
        ("rs_1x3", [parity_rows(2, 3)[1]]),
        ("rs_2x6", list(parity_rows(2, 6))),
    ):
        length = nbytes + GRAIN_BYTES
        host = [
            np.random.default_rng(j).integers(0, 256, length, dtype=np.uint8)
            for j in range(len(rows[0]))
        ]
        wanted = [np.zeros(length, np.uint8) for _ in rows]
        NumpyBackend().combine(rows, host, wanted)
        sources = [torch.from_numpy(h).to(DEVICE) for h in host]
        MODULE.synchronize()
        for name, backend in backends.items():
            targets = [torch.zeros(length, dtype=torch.uint8, device=DEVICE) for _ in rows]
            MODULE.synchronize()
            with MODULE.stream(stream):
                begin = time.perf_counter()
                backend.combine(rows, sources, targets)
                stream.synchronize()
                first = time.perf_counter() - begin
                begin = time.perf_counter()
                for _ in range(20):
                    backend.combine(rows, sources, targets)
                queued = time.perf_counter() - begin
                stream.synchronize()
                ended = time.perf_counter() - begin
            equal = all(
                np.array_equal(t.cpu().numpy(), w) for t, w in zip(targets, wanted, strict=True)
            )
            out[f"{label}_{name}"] = {
                "equal": equal,
                "gb_per_sec": round(20 * length * len(sources) / ended / 1e9, 1),
                "host_us": round(queued / 20 * 1e6, 1),
                "first_secs": round(first, 3),
            }
    stream.synchronize()
    return out


@fact
def peer_sums() -> dict:
    from reft.verify.peers import _on_device

    nbytes = (4 * MIB) if OPTIONS.small else 256 * MIB
    block = 4 * MIB
    live = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=DEVICE)

    def call() -> torch.Tensor:
        return torch.stack([_on_device([live[at : at + block]]) for at in range(0, nbytes, block)])

    return {"gb_per_sec": round(nbytes / timed(call) / 1e9, 1)}


# -- clocks, captures, allocator -------------------------------------------------------------------


@fact
def clock() -> dict:
    """By how much a device's time, told by the host's clock, is wrong; busy and idle."""
    from reft.snapshot.device_engine import DeviceCopyEngine

    engine = DeviceCopyEngine(DEVICE, VENDOR)
    errors = []
    for _ in range(50):
        MODULE.synchronize()
        before = time.perf_counter()
        stamp = engine.stamp()
        stamp.synchronize()
        after = time.perf_counter()
        time.sleep(0.002)
        (told,) = engine.secs_of([stamp])
        errors.append(max(0.0, before - told, told - after))
    begin = time.perf_counter()
    for _ in range(1000):
        engine.stamp()
    stamp_us = (time.perf_counter() - begin) * 1e3
    MODULE.synchronize()
    engine.close()
    return {
        "worst_us": round(max(errors) * 1e6, 1),
        "median_us": round(median(errors) * 1e6, 1),
        "stamp_us": round(stamp_us, 2),
    }


@fact
def pinning_while_busy() -> dict:
    """Whether the host is held up by a busy device where memory is pinned, reserved and looked
    at."""

    def busy() -> None:
        MODULE.sleep(0.4) if OPTIONS.device == "sim" else MODULE._sleep(800_000_000)

    out = {}
    for name, call in (
        ("host_alloc", lambda: torch.zeros(3 * MIB + 77, dtype=torch.uint8, pin_memory=True)),
        (
            "register",
            lambda: VENDOR.host_register(DEVICE, KEPT.tensor.data_ptr(), KEPT.tensor.numel()),
        ),
        ("unregister", lambda: VENDOR.host_unregister(DEVICE, KEPT.tensor.data_ptr())),
        (
            "malloc",
            lambda: torch.empty(
                513 * MIB if not OPTIONS.small else MIB, dtype=torch.uint8, device=DEVICE
            ),
        ),
        ("mem_get_info", lambda: MODULE.mem_get_info(DEVICE)),
        ("stream", lambda: VENDOR.create_stream(DEVICE)),
    ):
        MODULE.synchronize()
        busy()
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        MODULE.synchronize()
        out[name] = {
            "ms": round(took * 1e3, 2),
            "kernel_ms": round((time.perf_counter() - begin) * 1e3, 1),
        }
    return out


@fact
def capture() -> dict:
    """The worker's calls, CuPy's kernels too, while training captures a CUDA graph."""
    if OPTIONS.device == "sim":
        return {"skipped": "tests have it"}
    from reft.protect.backend import backend_for
    from reft.snapshot.device_engine import DeviceCopyEngine

    engine = DeviceCopyEngine(DEVICE, VENDOR)
    state = torch.ones(MIB, dtype=torch.uint8, device=DEVICE)
    arena = Mapped(MIB, OPTIONS.shm)
    x = torch.zeros(1000, device=DEVICE)

    def work() -> str:
        VENDOR.enter(DEVICE)
        engine.register(arena.memory)

        def encode() -> list:
            out = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
            backend_for(out).combine([(1, 1)], [state, state], [out])
            return [(out, arena.tensor)]

        engine.copy([], encode=encode)
        engine.staging_buffer(64 * MIB)
        engine.synchronize()
        return type(backend_for(state)).__name__

    engine.begin()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        x.add_(1)
        name = pool.submit(work).result()
        x.add_(1)
    engine.fence()
    graph.replay()
    MODULE.synchronize()
    engine.close()
    return {
        "backend": name,
        "replayed": float(x[0]) == 2.0,
        "xor_is_zero": int(arena.tensor.sum()) == 0,
    }


@fact
def closed_streams() -> dict:
    """What happens to blocks that outlive a closed engine, in the caching allocator."""
    code = """
from reft.snapshot.device_engine import DeviceCopyEngine
engine = DeviceCopyEngine(DEVICE, VENDOR)
buffer = engine.staging_buffer(256 * 2**20)
engine.begin(); del buffer; engine.fence(); engine.close()
import gc; gc.collect()
MODULE.synchronize()
MODULE.empty_cache() if hasattr(MODULE, "empty_cache") else None
MODULE.synchronize()
print("fine", float(torch.ones(3, device=DEVICE).sum()))
"""
    return {
        "default": child(code),
        "expandable": child(
            code,
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
            PYTORCH_ALLOC_CONF="expandable_segments:True",
        ),
    }


@fact
def forks() -> dict:
    """Registered private memory after a fork: the device must write to the parent's pages."""
    code = """
import os, time
host = torch.zeros(64 * 2**20, dtype=torch.uint8)
VENDOR.host_register(DEVICE, host.data_ptr() // 4096 * 4096, host.numel() // 4096 * 4096)
pid = os.fork()
if not pid:
    time.sleep(2); os._exit(0)
host[:8].fill_(3)  # the parent writes: its page may become another one
live = torch.full((32 * 2**20,), 7, dtype=torch.uint8, device=DEVICE)
host[: live.numel()].copy_(live, non_blocking=True)
MODULE.synchronize()
print("equal", bool((host[: live.numel()] == 7).all()))
os.kill(pid, 9)
"""
    return child(code)


@fact
def warm() -> dict:
    """Whether the process that trainers are forked from has no context, and its fork can use the
    device."""
    code = f"""
import importlib, os
from reft.job import warm
begin = time.monotonic()
for name in warm.DEFAULT_MODULES:
    importlib.import_module(name)
    if why := warm.reason_not_forkable():
        print("UNFIT", name, why); sys.exit()
imported = time.monotonic() - begin
sys.stdout.flush()
pid = os.fork()
if not pid:
    try:
        begin = time.monotonic()
        t = torch.ones(3, device="{"cpu" if OPTIONS.device == "sim" else "cuda"}").sum().item()
        secs = time.monotonic() - begin
        print(f"fork computes {{t}} after {{secs:.2f}} s; imports {{imported:.2f}} s", flush=True)
    finally:
        os._exit(0)
os.waitpid(pid, 0)
"""
    global PRELUDE
    kept, PRELUDE = PRELUDE, "import sys, time, os\nsys.path.insert(0, os.getcwd())\nimport torch\n"
    try:
        return child(code, 120, PYTORCH_NVML_BASED_CUDA_CHECK="1", CUDA_MODULE_LOADING="LAZY")
    finally:
        PRELUDE = kept


@fact
def killed() -> dict:
    """Seconds from SIGKILL to the end of a trainer that has 8 GiB registered."""
    code = f"""
import mmap
file = tempfile.TemporaryFile(dir={str(OPTIONS.shm)!r})
nbytes = {(16 * MIB) if OPTIONS.small else 8 * GIB}
os.posix_fallocate(file.fileno(), 0, nbytes)
memory = mmap.mmap(file.fileno(), nbytes)
host = torch.frombuffer(memory, dtype=torch.uint8)
VENDOR.host_register(DEVICE, host.data_ptr(), nbytes)
live = torch.zeros({MIB if OPTIONS.small else 20 * GIB}, dtype=torch.uint8, device=DEVICE)
print("ready", flush=True); time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    begin = time.monotonic()
    line = process.stdout.readline().strip()
    ready = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return {
        "said": line,
        "start_secs": round(ready - begin, 2),
        "end_secs": round(time.monotonic() - ready, 3),
    }


PRELUDE = ""
_PRELUDE = """
import os, sys, time, tempfile
sys.path.insert(0, os.getcwd())
import torch
from reft.device import VENDORS
if {device!r} == "sim":
    from tests.device.simulated import NAME, SimulatedVendor, simulated
    VENDORS[NAME] = SimulatedVendor(simulated())
VENDOR = VENDORS[{device!r}]; MODULE = VENDOR.module; DEVICE = torch.device({device!r}, 0)
VENDOR.enter(DEVICE)
"""


def main() -> int:
    global OPTIONS, torch, VENDOR, MODULE, DEVICE, PRELUDE, KEPT
    made = argparse.ArgumentParser()
    made.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    made.add_argument("--only", nargs="*", default=[])
    made.add_argument("--small", action="store_true")
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"))
    made.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    made.add_argument("--budget", type=float, default=1e9, help="seconds; no fact begins later")
    OPTIONS = made.parse_args()
    for folder in (OPTIONS.shm, OPTIONS.disk):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    import torch

    PRELUDE = _PRELUDE.format(device=OPTIONS.device)
    space: dict = {}
    exec(PRELUDE, space)
    VENDOR, MODULE, DEVICE = space["VENDOR"], space["MODULE"], space["DEVICE"]
    KEPT = Mapped(16 * MIB, OPTIONS.shm)
    failed = 0
    for name, call in FACTS.items():
        if OPTIONS.only and name not in OPTIONS.only:
            continue
        if time.monotonic() - began > OPTIONS.budget:
            print(json.dumps({"fact": name, "error": "no time left"}), flush=True)
            continue
        begin = time.monotonic()
        try:
            found = {"fact": name, **call()}
        except Exception as error:
            failed += 1
            found = {
                "fact": name,
                "error": f"{type(error).__name__}: {str(error)[:400]}",
                "where": traceback.format_exc()[-700:],
            }
        found["took_secs"] = round(time.monotonic() - begin, 2)
        print(json.dumps(found), flush=True)
        try:
            if hasattr(MODULE, "empty_cache"):
                MODULE.empty_cache()
        except RuntimeError as error:
            print(json.dumps({"fact": name, "error": f"the device is lost: {error}"}), flush=True)
            return 3
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
