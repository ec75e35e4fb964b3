"""Access to devices: one class for each vendor. No other module depends on vendors.

Torch's modules for its device types (``torch.cuda``, ``torch.xpu``) have a common interface for
streams, events, free memory and random state; callers use this interface by :attr:`Vendor.module`.
Functions that only the driver offers are methods of :class:`Vendor`. To support another vendor, add
a class to :data:`VENDORS` that passes ``tests/device/test_vendors.py``.
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

    type: str  # Torch's name of the device type
    name: str  # Name for messages and results
    module: Any  # Torch's module for the device type, which is largely untyped
    has_cupy = False  # Whether CuPy supports the device type

    @abstractmethod
    def enter(self, device: torch.device) -> None:
        """Make the calling thread use the device.

        A graph capture that another thread is making is not disturbed. The thread stays on the
        device: a new thread starts on device 0, and switching back to device 0 would create a
        context of a few hundred MB there for every rank of the node.
        """

    @abstractmethod
    def create_stream(self, device: torch.device) -> Any:
        """Create a stream for this caller alone, with the default stream's priority.

        A stream of torch's pool could be shared with communicators, which would then wait for
        copies. The stream must never be destroyed: when torch's allocator releases a block of
        memory, it uses the streams on which the block was used.
        """

    @abstractmethod
    def host_register(self, device: torch.device, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that all devices of the process can write to it directly."""

    @abstractmethod
    def host_unregister(self, device: torch.device, address: int) -> None:
        """Undo :meth:`host_register` for the memory at ``address``."""

    @abstractmethod
    def numa_node(self, device: torch.device) -> int:
        """Return the host's NUMA node to which the device is connected; -1 if unknown."""

    def settings_to_change(self, environment: Mapping[str, str], tensor_parallel: int) -> list[str]:
        """Describe environment variables of the driver that make copies slow down training.

        Args:
            environment: the environment variables.
            tensor_parallel: tensor-parallel degree of the job.

        Returns:
            A text with advice for each such variable.
        """
        return []


class Cuda(Vendor):
    """Devices of NVIDIA and AMD.

    Torch uses the same device type for both, and their drivers' functions have the same arguments.
    """

    type = "cuda"
    name = "rocm" if torch.version.hip else "cuda"
    module: Any = torch.cuda
    has_cupy = True

    # CU_STREAM_NON_BLOCKING and hipStreamNonBlocking: the stream does not wait for the default
    # stream. Torch's own streams are created in the same way.
    _NON_BLOCKING = 1
    _PORTABLE = 1  # cudaHostRegisterPortable and hipHostRegisterPortable
    # AMD's default number of hardware queues: enough for training, its communication, and copies on
    # two streams
    _HARDWARE_QUEUES = 4
    _THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, hipStreamCaptureModeThreadLocal

    def __init__(self) -> None:
        self._entered = threading.local()

    def enter(self, device: torch.device) -> None:
        self.module.set_device(device)
        if not hasattr(self._entered, "once"):
            self._entered.once = True
            # Without this, cudaMalloc or cudaEventQuery in this thread would invalidate a graph
            # capture (torch.cuda.graph) in another thread.
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
        """Return NVIDIA's driver or AMD's runtime, the library that torch has loaded."""
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
            # With tensor parallelism Megatron requires the value 1, to overlap communication.
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
        """Call a function of the runtime in a separate thread; raise RuntimeError if it fails.

        A failed call leaves an error in its thread's state. In the caller's own thread, torch would
        report that error at the next kernel launch.
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


VENDORS: dict[str, Vendor] = {Cuda.type: Cuda()}  # Supported vendors, by torch's device type


def find_vendor(device: torch.device) -> Vendor | None:
    """Return the vendor of a device; None for CPUs and for unknown devices."""
    return VENDORS.get(device.type)


def find_local_vendor() -> Vendor | None:
    """Return the vendor of the available devices, without initialising them; None without any."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_available()), None)


def find_used_vendor() -> Vendor | None:
    """Return the vendor of the devices that torch has initialised; None if it has not."""
    return next((vendor for vendor in VENDORS.values() if vendor.module.is_initialized()), None)


def compiled(module: str, name: str) -> Any:
    """Return the C function ``name`` of an extension module; the caller sets its argument types.

    Raises:
        OSError: the extension was not compiled, or belongs to a different version of reft.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        raise OSError("it was not built when reft was installed; that takes a C++ compiler")
    try:
        return getattr(ctypes.CDLL(found.origin), name)
    except AttributeError as error:
        raise OSError(f"{found.origin} is of another version of reft: {error}") from error
