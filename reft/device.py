"""Access to devices: one class for each vendor. No other module depends on vendors.

Torch's modules for its device types (``torch.cuda``, ``torch.xpu``) have a common interface for
streams, events, free memory and random state; callers use :attr:`Vendor.module`. Functions that
only a driver has are methods here. To support another vendor, add a class to :data:`VENDORS` that
passes ``tests/device/test_vendors.py``.
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
    """Devices of one torch device type.

    Methods raise RuntimeError, OSError or AttributeError if the driver fails or is missing.
    """

    type: str  # Torch's name of the type
    name: str  # Name for messages and results
    module: Any  # Torch's module for the type, which is largely untyped
    has_cupy = False  # Whether CuPy supports it

    @abstractmethod
    def enter(self, device: torch.device) -> None:
        """Make the calling thread use the device, without ending a graph capture by other threads.

        A new thread starts on device 0. Switching back to that would create a context there, which
        takes a few hundred MB for every rank of the node.
        """

    @abstractmethod
    def create_stream(self, device: torch.device) -> Any:
        """Create an exclusive stream with the default stream's priority.

        A stream of torch's pool would be shared, also with communicators, which would then wait for
        copies. The stream is never destroyed, because torch's allocator uses the stream of a block
        again when it releases the block.
        """

    @abstractmethod
    def host_register(self, device: torch.device, address: int, nbytes: int) -> None:
        """Page-lock host memory for all devices of the process, so that they can write directly to
        it."""

    @abstractmethod
    def host_unregister(self, device: torch.device, address: int) -> None:
        """Undo :meth:`host_register` for the memory at ``address``."""

    @abstractmethod
    def numa_node(self, device: torch.device) -> int:
        """NUMA node of the host to which the device is connected; -1 if unknown."""

    def settings_to_change(self, environment: Mapping[str, str], tensor_parallel: int) -> list[str]:
        """Environment settings of the driver with which copies slow down training, with advice."""
        return []


class Cuda(Vendor):
    """Devices of NVIDIA and AMD. Torch uses one name for both, and their drivers have the same
    arguments."""

    type = "cuda"
    name = "rocm" if torch.version.hip else "cuda"
    module: Any = torch.cuda
    has_cupy = True

    # CU_STREAM_NON_BLOCKING and hipStreamNonBlocking, as for torch's streams. Without it, the
    # stream would wait for the default stream.
    _NON_BLOCKING = 1
    _PORTABLE = 1  # cudaHostRegisterPortable and hipHostRegisterPortable
    # AMD's default, enough for training, its communication, and copies on two streams
    _HARDWARE_QUEUES = 4
    _THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, hipStreamCaptureModeThreadLocal

    def __init__(self) -> None:
        self._entered = threading.local()

    def enter(self, device: torch.device) -> None:
        self.module.set_device(device)
        if not hasattr(self._entered, "once"):
            self._entered.once = True
            # By default, cudaMalloc or cudaEventQuery in one thread invalidates a capture of
            # torch.cuda.graph in another.
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
        """NVIDIA's driver or AMD's runtime, the library that torch has loaded."""
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
            # With tensor parallelism, Megatron requires this value, to overlap communication.
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
        """Call the runtime in a separate thread.

        A failed call leaves its error in the calling thread's state, where torch would report it at
        the next kernel launch.
        """
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
            run()  # No thread can be started while the interpreter shuts down
        else:
            thread.join()
        if refused:
            raise RuntimeError(refused[0])


VENDORS: dict[str, Vendor] = {Cuda.type: Cuda()}  # by torch's device type


def find_vendor(device: torch.device) -> Vendor | None:
    """The vendor of a device; None for CPUs and for unknown devices."""
    return VENDORS.get(device.type)


def find_local_vendor() -> Vendor | None:
    """The vendor of the available devices; does not initialise them."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_available()), None)


def find_used_vendor() -> Vendor | None:
    """The vendor of the devices that torch has initialised."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_initialized()), None)


def compiled(module: str, name: str) -> Any:
    """The C function ``name`` of an extension; the caller sets its argument types.

    Raises:
        OSError: the extension was not compiled, or is of another version.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        raise OSError("it was not built when reft was installed; that takes a C++ compiler")
    try:
        return getattr(ctypes.CDLL(found.origin), name)
    except AttributeError as error:
        raise OSError(f"{found.origin} is of another version of reft: {error}") from error
