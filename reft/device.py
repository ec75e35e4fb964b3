"""What a device is to reft: one class for each vendor, and nobody else who knows vendors.

torch's modules for its device types (``torch.cuda``, ``torch.xpu``) offer the same: streams,
events, free memory and random state are asked of :attr:`Vendor.module`. What only a driver does is
a method here. Another vendor is one more class in :data:`VENDORS`, which passes
``tests/device/test_vendors.py``.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


class Vendor(ABC):
    """Devices of one of torch's types. Methods raise RuntimeError, OSError or AttributeError where
    the driver refuses, or is not there."""

    type: str  # torch's word
    name: str  # for messages and results
    module: Any  # torch's module for the type; much of it has no types
    has_cupy = False  # whether CuPy compiles kernels for it

    @abstractmethod
    def enter(self, device: torch.device) -> None:
        """Have the calling thread use the device, such that its calls do not end a graph's capture
        by another thread. A new thread starts on device 0; switching back to it would make a
        context there, some hundred MB of its memory for every rank of the node."""

    @abstractmethod
    def create_stream(self, device: torch.device) -> Any:
        """A stream that nobody else has, of the default stream's priority.

        torch hands those of its pool out in turns, to communicators too: these would wait for
        copies. It is never destroyed: torch's allocator keeps blocks that were allocated on it, and
        asks it again when it gives them back."""

    @abstractmethod
    def host_register(self, device: torch.device, address: int, nbytes: int) -> None:
        """Have a device write straight to host memory: page-lock it for all of the process's
        devices."""

    @abstractmethod
    def host_unregister(self, device: torch.device, address: int) -> None:
        """Undo that for memory registered from ``address`` on."""

    @abstractmethod
    def numa_node(self, device: torch.device) -> int:
        """Of the host, that the device is linked to; -1 where the host does not say."""

    def settings_to_change(self, environment: Mapping[str, str], tensor_parallel: int) -> list[str]:
        """What of the driver's environment has copies hinder training, and what to write
        instead."""
        return []


class Cuda(Vendor):
    """NVIDIA's devices, and AMD's, which torch calls the same; so are the arguments of their
    drivers."""

    type = "cuda"
    name = "rocm" if torch.version.hip else "cuda"
    module: Any = torch.cuda
    has_cupy = True

    # CU_STREAM_NON_BLOCKING and hipStreamNonBlocking, as torch's: others wait for the default
    # stream.
    _NON_BLOCKING = 1
    _PORTABLE = 1  # cudaHostRegisterPortable and hipHostRegisterPortable
    # AMD's default: for training, its communication, and copies on two streams
    _HARDWARE_QUEUES = 4
    _THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, hipStreamCaptureModeThreadLocal

    def __init__(self) -> None:
        self._entered = threading.local()

    def enter(self, device: torch.device) -> None:
        self.module.set_device(device)
        if not hasattr(self._entered, "once"):
            self._entered.once = True
            # By default a thread's cudaMalloc or cudaEventQuery ends any other's capture of
            # torch.cuda.graph.
            with suppress(OSError, AttributeError):
                library = self.library()
                nvidia = hasattr(library, "cuThreadExchangeStreamCaptureMode")
                name = f"{'cu' if nvidia else 'hip'}ThreadExchangeStreamCaptureMode"
                getattr(library, name)(ctypes.byref(ctypes.c_int(self._THREAD_LOCAL)))

    def create_stream(self, device: torch.device) -> Any:
        self.module.set_device(device)
        library = self.library()
        nvidia = hasattr(library, "cuStreamCreateWithPriority")
        name = "cuStreamCreateWithPriority" if nvidia else "hipStreamCreateWithPriority"
        made = ctypes.c_void_p()
        if error := getattr(library, name)(ctypes.byref(made), self._NON_BLOCKING, 0):
            raise RuntimeError(f"{name}: error {error}")
        return self.module.ExternalStream(made.value or 0, device=device)

    def library(self) -> Any:
        """NVIDIA's driver or AMD's runtime, as torch has loaded it."""
        name = "/libamdhip64.so" if torch.version.hip else "/libcuda.so"
        for line in Path("/proc/self/maps").read_text().splitlines():
            if name in line:
                return ctypes.CDLL(line[line.index("/") :])
        raise OSError(f"found no {name[1:]} in this process")

    def host_register(self, device: torch.device, address: int, nbytes: int) -> None:
        self._call(
            device, lambda runtime: runtime.cudaHostRegister(address, nbytes, self._PORTABLE)
        )

    def host_unregister(self, device: torch.device, address: int) -> None:
        self._call(device, lambda runtime: runtime.cudaHostUnregister(address))

    def numa_node(self, device: torch.device) -> int:
        library, address = self.library(), ctypes.create_string_buffer(32)
        name = "cuDeviceGetPCIBusId" if self.name == "cuda" else "hipDeviceGetPCIBusId"
        if error := getattr(library, name)(address, len(address), device.index):
            raise RuntimeError(f"{name}: error {error}")
        node = Path("/sys/bus/pci/devices", address.value.decode().lower(), "numa_node")
        return int(node.read_text()) if node.exists() else -1

    def settings_to_change(self, environment: Mapping[str, str], tensor_parallel: int) -> list[str]:
        if self.name == "cuda":
            # Megatron needs it so, and checks it, where tensor parallelism overlaps with
            # communication.
            if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and tensor_parallel == 1:
                return [
                    "CUDA_DEVICE_MAX_CONNECTIONS=1 has copies and kernels wait for each "
                    "other: unset it"
                ]
            return []
        queues, found = environment.get("GPU_MAX_HW_QUEUES", ""), []
        if environment.get("HSA_ENABLE_SDMA") == "0":
            found.append("HSA_ENABLE_SDMA=0 has copies take compute units from training: unset it")
        if queues.isdecimal() and int(queues) < self._HARDWARE_QUEUES:
            found.append(
                f"GPU_MAX_HW_QUEUES={queues} has copies and kernels wait for each other: unset it"
            )
        return found

    def _call(self, device: torch.device, call: Callable[[Any], Any]) -> None:
        """In a thread of its own: a call that fails leaves its error behind in the thread that made
        it, and torch would report it there at the next kernel it launches."""
        refused: list[str] = []

        def run() -> None:
            try:
                self.enter(device)
                runtime = self.module.cudart()
                error = call(runtime)
                if int(error):
                    refused.append(f"{runtime.cudaGetErrorString(error)} (error {int(error)})")
            except Exception as error:
                refused.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name="reft-pin")
        try:
            thread.start()
        except RuntimeError:
            run()  # the interpreter is shutting down
        else:
            thread.join()
        if refused:
            raise RuntimeError(refused[0])


VENDORS: dict[str, Vendor] = {Cuda.type: Cuda()}  # by torch's device type


def find_vendor(device: torch.device) -> Vendor | None:
    """None for a CPU, whose work is done when a call returns, and for devices that reft does not
    know."""
    return VENDORS.get(device.type)


def find_local_vendor() -> Vendor | None:
    """Of the devices that this process could use; nothing is begun on them."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_available()), None)


def find_used_vendor() -> Vendor | None:
    """Of the device that torch has begun to use."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_initialized()), None)


def compiled(module: str, name: str) -> Any:
    """The C function ``name`` of an extension, its argument types still to be set."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise OSError("it was not built when reft was installed; that takes a C++ compiler")
    try:
        return getattr(ctypes.CDLL(found.origin), name)
    except AttributeError as error:
        raise OSError(f"{found.origin} is of another version of reft: {error}") from error
