"""A device in every run of the tests: torch tensors on ``"sim"``, by an extension on torch's PrivateUse1.

Streams are threads with queues, events have times, and the host runs ahead. Kernels are the CPU's, on the thread of
their stream. Copies over the link are asynchronous, with a bandwidth and a delay that a test sets
(:data:`settings`), into registered memory alone. The allocator gives a freed block out again at once, on its
stream, and poisons it there; it records no stream by itself. :data:`sim` is to it what ``torch.cuda`` is to CUDA.

With a seed (:meth:`Simulated.by_hand`) streams have no threads: whoever waits, or calls
:meth:`Simulated.progress`, runs what the events allow, in an order drawn from it.

The arithmetic is the CPU's, but operators are put together otherwise: compare simulated with simulated.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from reft.device import Vendor

NAME = "sim"
SOURCE = Path(__file__).with_name("simulated.cpp")
BUILDS = Path(__file__).resolve().parents[2] / "build" / "simulated"
POISON = 0xA5


class Settings(ctypes.Structure):
    """What tests set, then what they read; the same in ``simulated.cpp``."""

    _fields_ = (
        ("bytes_per_sec", ctypes.c_double),  # of the link, in each direction
        ("delay_secs", ctypes.c_double),  # of each copy over it
        ("register_secs_per_gib", ctypes.c_double),  # of host memory, on the thread that calls
        (
            "launch_queue",
            ctypes.c_int64,
        ),  # launches that a stream takes before the host waits for it
        ("malloc_waits", ctypes.c_int64),  # whether memory that is new waits for the device
        ("total_bytes", ctypes.c_int64),
        ("others_bytes", ctypes.c_int64),  # of other processes
        ("refuse_registering", ctypes.c_int64),
        ("refuse_mallocs", ctypes.c_int64),  # the next ones, whatever is free
        ("pool", ctypes.c_int64),  # streams that torch hands out in turns
        ("seed", ctypes.c_int64),
        ("allocated_bytes", ctypes.c_int64),
        ("peak_bytes", ctypes.c_int64),
        ("reserved_bytes", ctypes.c_int64),
        ("own_streams", ctypes.c_int64),  # made by the driver, and not destroyed yet
        ("synchronised", ctypes.c_int64),  # kernels that the host had to wait for
        ("captures_ended", ctypes.c_int64),  # by calls of other threads
        # Calls of the driver: events, waits of a stream, copies over the link.
        ("recorded", ctypes.c_int64),
        ("waits", ctypes.c_int64),
        ("transfers", ctypes.c_int64),
        ("pageable", ctypes.c_int64),  # copies over the link that held the host up
        ("malloc_retries", ctypes.c_int64),  # after everything cached was given back
        ("host_waits", ctypes.c_int64),  # of the host for the device, for a value or an event
        ("rng_seed", ctypes.c_uint64),
        ("rng_offset", ctypes.c_uint64),
    )
    DEFAULTS = (float("inf"), 0.0, 0.0, 1024, 0, 8 * 2**30, 0, 0, 0, 3)


def library() -> Path:
    torch_dir = Path(torch.__file__).parent
    flags = [
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{torch_dir / 'include'}",
    ]
    content = SOURCE.read_bytes() + repr((torch.__version__, flags)).encode()
    built = BUILDS / f"simulated-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not built.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with open(BUILDS / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                part = built.with_suffix(".part")
                command = [os.environ.get("CXX", "c++"), *flags, str(SOURCE), "-o", str(part)]
                command += [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
                subprocess.run(command, check=True)
                part.replace(built)
    return built


def missing() -> str | None:
    """Why there is no simulated device here; None: there is."""
    if torch.cuda.is_available():
        return "there is a device, and torch has one kind of them in a process"
    if TorchVersion(torch.__version__) < (2, 13):
        return (
            "the simulated device takes torch 2.13: with 2.11 a backward pass may end the process"
        )
    library()
    return None


def device_or_skip() -> str:
    """For other processes: torch's type of a real device where there is one, else of the simulated one."""
    if torch.cuda.is_available():
        return "cuda"
    if why := missing():
        pytest.skip(why)
    return NAME


class MemoryPool:
    """A pool of the allocator: what it has cached goes back to the driver when the pool ends."""

    _numbers = count(1)

    def __init__(self, calls: ctypes.CDLL) -> None:
        self.id = next(self._numbers)
        self._calls = calls

    def __del__(self) -> None:
        self._calls.sim_empty_cache(self.id)


class Simulated:
    """The module ``torch.sim``: the part of ``torch.cuda`` that torch, DeepSpeed and reft use, and more."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._calls = calls
        calls.sim_settings.restype = ctypes.POINTER(Settings)
        calls.sim_synchronise.restype = ctypes.c_char_p
        for name in ("sim_registered", "sim_create_stream", "sim_hold", "sim_use_pool"):
            getattr(calls, name).restype = ctypes.c_int64
        calls.sim_host_register.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        calls.sim_host_unregister.argtypes = (ctypes.c_size_t,)
        for name in (
            *("destroy_stream", "hold", "release", "set_seed", "progress", "capture"),
            *("use_pool", "empty_cache"),
        ):
            getattr(calls, f"sim_{name}").argtypes = (ctypes.c_int64,)
        calls.sim_sleep.argtypes = (ctypes.c_double,)
        calls.sim_fail.argtypes = (ctypes.c_char_p,)
        self.settings: Settings = calls.sim_settings().contents
        self._launched: list[Any] = []  # Python functions that a stream may still call
        self.sleep, self.look_away = calls.sim_sleep, calls.sim_look_away
        # 0, or the code of the driver's error.
        self.host_register, self.host_unregister = (
            calls.sim_host_register,
            calls.sim_host_unregister,
        )
        # Streams outside of torch's pool.
        self.create_stream, self.destroy_stream = calls.sim_create_stream, calls.sim_destroy_stream

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "simulated"

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802
        return torch.Stream(NAME, priority=priority)

    def ExternalStream(self, address: int, device: Any = None) -> torch.Stream:  # noqa: N802
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return torch.Stream(stream_id=address, device_index=0, device_type=kind)

    def default_stream(self, device: Any = None) -> torch.Stream:
        return self.ExternalStream(0)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        if said := self._calls.sim_synchronise():
            raise RuntimeError(said.decode())

    def empty_cache(self) -> None:
        self._calls.sim_empty_cache(-1)

    def MemPool(self) -> MemoryPool:  # noqa: N802
        return MemoryPool(self._calls)

    @contextmanager
    def use_mem_pool(self, pool: MemoryPool, device: Any = None) -> Iterator[None]:
        before = self._calls.sim_use_pool(pool.id)
        try:
            yield
        finally:
            self._calls.sim_use_pool(before)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        s = self.settings
        return s.total_bytes - s.others_bytes - s.reserved_bytes, s.total_bytes

    def memory_stats_as_nested_dict(self, device: Any = None) -> Mapping[str, Any]:
        s = self.settings
        return {
            "allocated_bytes": {"all": {"current": s.allocated_bytes, "peak": s.peak_bytes}},
            "reserved_bytes": {"all": {"current": s.reserved_bytes}},
        }

    def manual_seed_all(self, seed: int) -> None:
        self.settings.rng_seed, self.settings.rng_offset = seed % 2**64, 0

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        state = (ctypes.c_uint64 * 2)(self.settings.rng_seed, self.settings.rng_offset)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        seed, offset = state.view(torch.uint64).tolist()
        self.settings.rng_seed, self.settings.rng_offset = seed, offset

    @property
    def registrations(self) -> int:
        return int(self._calls.sim_registered())

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._calls.sim_capture(1)
        try:
            yield
        finally:
            self._calls.sim_capture(0)

    def launch(self, call: Callable[[], object]) -> None:
        self._launched.append(made := ctypes.CFUNCTYPE(None)(lambda: [call(), None][1]))
        self._calls.sim_launch(made)

    def hold(self, stream: torch.Stream | None = None) -> Callable[[], None]:
        number = self._calls.sim_hold((stream or self.current_stream()).stream_id)
        return lambda: self._calls.sim_release(number)

    @contextmanager
    def by_hand(self, seed: int) -> Iterator[None]:
        self.synchronize()
        self._calls.sim_set_seed(seed)
        try:
            yield
        finally:
            self._calls.sim_set_seed(-1)

    def progress(self, most: int = 8) -> None:
        self._calls.sim_progress(most)

    def fail(self, error: str) -> None:
        """An asynchronous error, as of an illegal address: from here on every call fails."""
        self._calls.sim_fail(error.encode())

    def reset(self) -> None:
        self._calls.sim_recover()
        self._calls.sim_release(0)
        self._calls.sim_set_seed(-1)
        for (name, _), value in zip(Settings._fields_, Settings.DEFAULTS, strict=False):
            setattr(self.settings, name, value)
        self.synchronize()
        self._launched.clear()
        self._calls.sim_forget_registered()
        self.empty_cache()
        for name in (
            "synchronised",
            "own_streams",
            "captures_ended",
            "recorded",
            "waits",
            "transfers",
            "pageable",
            "malloc_retries",
            "host_waits",
        ):
            setattr(self.settings, name, 0)
        self.settings.peak_bytes = self.settings.allocated_bytes


class SimulatedVendor(Vendor):
    type = name = NAME
    node = -1

    def __init__(self, sim: Simulated) -> None:
        self.module = sim

    def enter(self, device: torch.device) -> None:
        self.module.look_away()

    def create_stream(self, device: torch.device) -> Any:
        return self.module.ExternalStream(self.module.create_stream())

    def host_register(self, device: torch.device, address: int, nbytes: int) -> None:
        self.enter(device)
        if error := self.module.host_register(address, nbytes):
            raise RuntimeError(f"simulated error {error}")

    def host_unregister(self, device: torch.device, address: int) -> None:
        self.enter(device)
        if error := self.module.host_unregister(address):
            raise RuntimeError(f"simulated error {error}")

    def numa_node(self, device: torch.device) -> int:
        return self.node


@cache
def simulated() -> Simulated:
    """The device, from the first call on for as long as the process lives."""
    path = library()
    torch.ops.load_library(path)
    calls = ctypes.CDLL(str(path))
    atexit.register(calls.sim_stop)
    torch.utils.rename_privateuse1_backend(NAME)
    made = Simulated(calls)
    torch._register_device_module(NAME, made)
    return made
