"""The backends under one contract, with what each needs to be fed and read."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from reft.errors import ConfigError
from reft.protect.backend import (
    NAME,
    THREADS,
    Backend,
    CupyBackend,
    NumpyBackend,
    TorchBackend,
    find_launch_shape,
    kernel_source,
)
from reft.protect.codes import Scheme
from reft.protect.rs import CELL_BYTES, PACKETS, Row
from tests.device.simulated import NAME as SIMULATED

_SHIM = """
struct uint4 { unsigned int x, y, z, w; } __attribute__((aligned(16)));
struct Index { unsigned int x; };
static thread_local Index blockIdx, threadIdx, gridDim, blockDim;
#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __forceinline__ inline
"""


class HostKernel(Backend):
    """The device kernels' own source, compiled for the host: every block and thread in turn.

    It proves the arithmetic and the indices of what CuPy will run, not the launch.
    """

    name = "kernel source on the host"

    def zeros(self, nbytes: int, like: np.ndarray) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def _combine(
        self,
        rows: tuple[Row, ...],
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        nbytes: int,
    ) -> None:
        buffers = [*sources, *targets]
        width = gcd(16, *(b.ctypes.data for b in buffers))
        items, numbers = find_launch_shape(rows, width, nbytes)
        arguments = [ctypes.c_ulonglong(n) for n in numbers]
        # Fewer blocks than items, so that the loops over the grid are tried too.
        compile_for_host(kernel_source(rows, width), len(buffers))(
            min(items, 3), THREADS, *arguments, *(ctypes.c_void_p(b.ctypes.data) for b in buffers)
        )


@cache
def compile_for_host(source_text: str, count: int) -> Any:
    """Compile a kernel of ``count`` buffers for the host.

    Returns:
        ``run(grid, block, m, n, *buffers)``, which runs every block and thread in turn.
    """
    names = ", ".join(f"p{i}" for i in range(count))
    driver = (
        f'extern "C" void run(unsigned grid, unsigned block, Count m, Count n, '
        f"{', '.join(f'unsigned char* p{i}' for i in range(count))}) {{\n"
        f"  gridDim.x = grid; blockDim.x = block;\n"
        f"  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)\n"
        f"    for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) {NAME}(m, n, {names});\n}}\n"
    )
    return _compile(_SHIM + source_text + driver)


@cache
def compile_adam_for_host(source_text: str) -> Any:
    """Compile the fused kernel of ExactAdam for the host.

    Returns:
        ``run(grid, block, p, g, m, v, n, *scalars)``, which runs every block and thread in turn.
    """
    scalars = [f"s{i}" for i in range(9)]
    driver = (
        'extern "C" void run(unsigned grid, unsigned block, float* p, float* g, float* m, float* v,'
        f" Count n, {', '.join(f'float {s}' for s in scalars)}) {{\n"
        f"  gridDim.x = grid; blockDim.x = block;\n"
        f"  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)\n"
        f"    for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)\n"
        f"      reft_exact_adam(p, g, m, v, n, {', '.join(scalars)});\n}}\n"
    )
    return _compile("#include <math.h>\n" + _SHIM + source_text + driver)


def _compile(text: str) -> Any:
    with TemporaryDirectory(prefix="reft-kernel-") as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        command = ["g++", "-O0", "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", library]
        subprocess.run(command, check=True)
        # What is mapped stays usable when the file is gone.
        return ctypes.CDLL(str(library)).run


@dataclass(frozen=True)
class Case:
    make: Callable[[], Backend]
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


def _torch_case(device: str) -> Case:
    def put(data: np.ndarray) -> torch.Tensor:
        # Keep the misalignment of what the test made.
        offset = data.ctypes.data % 64
        buffer = torch.empty(len(data) + offset + 64, dtype=torch.uint8, device=device)
        offset += -buffer.data_ptr() % 64
        buffer[offset : offset + len(data)] = torch.from_numpy(data.copy())
        return buffer[offset : offset + len(data)]

    return Case(TorchBackend, put, lambda t: t.cpu().numpy())


def _same(data: np.ndarray) -> np.ndarray:
    return data


CASES = {
    "numpy": Case(NumpyBackend, _same, _same),
    "torch": _torch_case("cpu"),
    "torch-device": _torch_case("cuda" if torch.cuda.is_available() else SIMULATED),
    "kernel": Case(HostKernel, _same, _same),
    "cupy": Case(CupyBackend, _torch_case("cuda").put, _torch_case("cuda").get),
}


def case_or_skip(name: str) -> Case:
    if name == "cupy":
        try:
            CupyBackend()
        except ConfigError as e:
            pytest.skip(str(e))
        if not torch.cuda.is_available():
            pytest.skip("CuPy sees a device, this torch build does not")
    return CASES[name]


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def schemes_for(size: int, most: int) -> Iterator[Scheme]:
    """Every sensible scheme of a group of ``size`` that claims to survive 1 to ``most`` losses."""
    for tolerance in range(1, most + 1):
        for copies in range(tolerance + 1):
            scheme = Scheme(copies, tolerance - copies)
            if scheme.why_no_room(size) is None:
                yield scheme


def slow_multiply(a: int, b: int) -> int:
    """Carry-less product, then the remainder modulo the field's polynomial, bit by bit."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def slow_combine(row: Sequence[int], sources: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of row[j]·source[j]: gather the bits of every field element from the packets, multiply, scatter."""
    nbytes = len(sources[0])
    if max(row) <= 1:
        out = np.zeros(nbytes, np.uint8)
        for c, s in zip(row, sources, strict=True):
            out ^= s if c else np.uint8(0)
        return out
    table = np.array(
        [[slow_multiply(a, b) for b in range(256)] for a in sorted(set(row))], np.uint8
    )
    at = {c: i for i, c in enumerate(sorted(set(row)))}
    out = np.empty(nbytes, np.uint8)
    for start in range(0, nbytes, CELL_BYTES):
        stop = min(start + CELL_BYTES, nbytes)
        total = 0
        for c, source in zip(row, sources, strict=True):
            bits = np.unpackbits(source[start:stop].reshape(PACKETS, -1), axis=1)
            elements = sum(bits[i].astype(np.uint8) << i for i in range(PACKETS))
            total = total ^ table[at[c]][elements]
        scattered = np.stack([total >> i & 1 for i in range(PACKETS)])
        out[start:stop] = np.packbits(scattered, axis=1).reshape(-1)
    return out
