"""The device kernels are HIP as they are CUDA: read as text, and compiled for MI250X where a HIP compiler is.

Debian 12 has one: ``apt-get install --no-install-recommends clang-15 libamdhip64-dev rocm-device-libs``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import reft
from reft.protect.backend import NAME, THREADS, kernel_source
from reft.protect.gf256 import Row
from reft.protect.rs import parity_rows

ROOT = Path(reft.__file__).parents[1]
ARCHITECTURE = "gfx90a"  # MI250X
WAVEFRONT = 64
WIDTHS = (16, 8, 4, 2, 1)
KERNEL_FILES = {"reft/protect/backend.py"}
DEBIAN = "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"
COMPILERS = (
    ("hipcc",),
    *(
        (f"clang++-{v}", "--rocm-path=/usr", f"--rocm-device-lib-path={DEBIAN}")
        for v in ("15", "17", "19", "21")
    ),
    ("clang++", "--rocm-path=/usr", f"--rocm-device-lib-path={DEBIAN}"),
)
FLAGS = (
    "-x",
    "hip",
    "-S",
    "-O3",
    f"--offload-arch={ARCHITECTURE}",
    "--cuda-device-only",
    "-Werror",
    "-Wall",
    "-Wno-unused-function",
)
FOREIGN = re.compile(
    r"\basm\b|__shfl|__ballot|__any|__all\b|activemask|__sync|\bwarp|lane|__reduce|__ldg|__byte_perm|\bnv|cuda"
    r"|cooperative|<<<|#include|>> 5|<< 5|& 31|threadIdx.x (/|%) 32|0xffffffff",
    re.I,
)
"""PTX, what assumes 32 lanes, what one of the two languages lacks."""


def cases() -> Iterator[tuple[tuple[Row, ...], int]]:
    """A matrix of every kind that protections have: XOR, a mirror, one row with powers, several."""
    for width in WIDTHS:
        yield ((1, 1, 1),), width
        yield ((1, 0, 1), (0, 1, 1)), width
        for parities in (2, 3):
            yield parity_rows(parities, 7), width
    yield parity_rows(4, 12), 16


CASES = tuple(cases())
COMPILED = (CASES[0], CASES[2], CASES[3], CASES[-1], (CASES[3][0], 1))
"""Few for every run of the suite: the others differ in the types of words only."""


def test_kernels_are_made_in_one_place() -> None:
    """So that what is read and compiled here is all there is."""
    made = re.compile(r"__global__|RawKernel|RawModule|ElementwiseKernel|load_inline|triton")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "reft").rglob("*.py")
        if made.search(path.read_text())
    }
    assert found == KERNEL_FILES
    assert not [*(ROOT / "reft").rglob("*.cu"), *(ROOT / "reft").rglob("*.hip")]


@pytest.mark.parametrize(("rows", "width"), CASES)
def test_no_kernel_has_what_belongs_to_one_vendor(rows: tuple[Row, ...], width: int) -> None:
    source = kernel_source(rows, width)
    assert FOREIGN.findall(source) == []
    # No lane knows of another: nothing is shared, so that it does not matter how many run together.
    assert "__shared__" not in source


def test_blocks_are_whole_wavefronts() -> None:
    assert THREADS % WAVEFRONT == 0


@cache
def compiler() -> tuple[str, ...] | str:
    """The command of the first compiler that can compile an empty HIP kernel; else why there is none."""
    said = []
    for command in COMPILERS:
        if shutil.which(command[0]) is None:
            continue
        empty = (
            '#include <hip/hip_runtime.h>\nextern "C" __global__ void empty(int* p) { p[threadIdx.x] = 0; }'
        )
        tried = subprocess.run(
            [*command, *FLAGS, "-o", "/dev/null", "-"],
            input=empty,
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode == 0:
            return command
        said.append(f"{command[0]}: {tried.stderr.strip().splitlines()[0]}")
    return f"needs a compiler for HIP with its headers and device libraries; found {said or 'none'}"


def compiled(kernels: tuple[tuple[tuple[Row, ...], int], ...], folder: Path) -> list[dict[str, int]]:
    """What the compiler says of each kernel, which it has compiled for the device: registers, scratch memory."""
    command = compiler()
    if isinstance(command, str):
        pytest.skip(command)
    source, assembly = folder / "kernels.hip", folder / "kernels.s"
    texts = [
        f"namespace n{i} {{\n{kernel_source(rows, width).replace(NAME, f'{NAME}_{i}')}}}\n"
        for i, (rows, width) in enumerate(kernels)
    ]
    source.write_text("#include <hip/hip_runtime.h>\n" + "".join(texts))
    done = subprocess.run(
        [*command, *FLAGS, "-o", assembly, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    metadata = assembly.read_text().split(".amdgpu_metadata")[1]
    found = []
    for i in range(len(kernels)):
        (part,) = (p for p in metadata.split("  - .a")[1:] if f"{NAME}_{i}\n" in p)
        found.append({name: int(value) for name, value in re.findall(r"\.(\w+): +(\d+)\n", part)})
    return found


def check(kernels: tuple[tuple[tuple[Row, ...], int], ...], folder: Path) -> None:
    for (rows, width), said in zip(kernels, compiled(kernels, folder), strict=True):
        about = f"{len(rows)} targets of {len(rows[0])} sources, words of {width} bytes: {said}"
        assert said["wavefront_size"] == WAVEFRONT, about
        assert said["max_flat_workgroup_size"] == THREADS, about
        assert said["group_segment_fixed_size"] == 0, about
        # Accumulators stay in registers. Without launch bounds three targets are spilled.
        assert said["vgpr_spill_count"] == said["private_segment_fixed_size"] == 0, about


def test_kernels_compile_for_mi250x(tmp_path: Path) -> None:
    check(COMPILED, tmp_path)


SINGLE = """#include <hip/hip_runtime.h>
extern "C" __global__ void divide(float* c, const float* a) { c[threadIdx.x] = a[threadIdx.x] / c[threadIdx.x]; }
extern "C" __global__ void root(float* c) { c[threadIdx.x] = ::sqrt(c[threadIdx.x]); }
"""


def test_hip_divides_takes_roots_and_keeps_denormals_as_exact_adam_needs(tmp_path: Path) -> None:
    """By its compiler's defaults, which torch is built with. What a device makes of it is ``make gpu``'s to say."""
    command = compiler()
    if isinstance(command, str):
        pytest.skip(command)
    source, assembly = tmp_path / "single.hip", tmp_path / "single.s"
    source.write_text(SINGLE)
    subprocess.run([*command, *FLAGS, "-o", assembly, source], check=True)
    divide, root = assembly.read_text().split("\ndivide:")[1].split("\nroot:")
    assert "v_div_fixup_f32" in divide, "an approximate quotient"
    assert root.count("v_fma_f32") >= 2, "a root without the steps that round it correctly"
    for kernel in (divide, root):
        assert ".amdhsa_float_denorm_mode_32 3" in kernel, "denormals are flushed"


@pytest.mark.nightly
def test_all_kernels_compile_for_mi250x(tmp_path: Path) -> None:
    check(CASES, tmp_path)
