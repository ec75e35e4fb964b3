"""The device kernels are HIP as they are CUDA: read as text, run on the host, compiled for V100, H100 and MI250X.

``make compilers`` puts NVRTC and Debian 12's clang into .venv. Tests skip a compiler that is not there; one that is
there has to compile.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import reft
from reft.optim import KERNEL, KERNEL_NAME
from reft.protect.backend import NAME, THREADS, TorchBackend, backend_for, kernel_source
from reft.protect.rs import Row, parity_rows
from tests.protect.test_backends import OnDevice

ROOT = Path(reft.__file__).parents[1]
ARCHITECTURE = "gfx90a"  # MI250X
WAVEFRONT = 64
WIDTHS = (16, 8, 4, 2, 1)
CLANGS = ("15", "17", "19", "21")
NVRTC = ((12, "sm_70"), (12, "sm_90"), (13, "sm_90"))
"""V100 and H100: version 13 knows no V100."""
FLAGS = f"-x hip -S -O3 --offload-arch={ARCHITECTURE} --cuda-device-only -Werror -Wall -Wno-unused-function".split()
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


@pytest.mark.parametrize(("rows", "width"), CASES)
def test_no_kernel_has_what_belongs_to_one_vendor(rows: tuple[Row, ...], width: int) -> None:
    source = kernel_source(rows, width)
    assert FOREIGN.findall(source) == []
    # No lane knows of another: nothing is shared, so that it does not matter how many run together.
    assert "__shared__" not in source
    assert THREADS % WAVEFRONT == 0


def compiler() -> tuple[str, ...]:
    """The command of a compiler for HIP."""
    for root in (Path(sys.prefix, "clang"), Path("/")):
        libraries = root / "usr/lib/x86_64-linux-gnu"
        bitcode = libraries / "amdgcn/bitcode"
        for clang in (root / f"usr/bin/clang++-{version}" for version in CLANGS):
            if clang.exists() and bitcode.is_dir():
                rocm = f"--rocm-path={root / 'usr'}", f"--rocm-device-lib-path={bitcode}"
                return "env", f"LD_LIBRARY_PATH={libraries}", str(clang), *rocm
    if shutil.which("hipcc") is None:
        pytest.skip("no compiler for HIP: make compilers unpacks Debian's into .venv")
    return ("hipcc",)


def compiled(
    kernels: tuple[tuple[tuple[Row, ...], int], ...], folder: Path
) -> list[dict[str, int]]:
    """What the compiler says of each kernel, which it has compiled for the device: registers, scratch memory."""
    command = compiler()
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


@pytest.mark.process
@pytest.mark.parametrize("kernels", [COMPILED, pytest.param(CASES, marks=pytest.mark.nightly)])
def test_kernels_compile_for_mi250x(
    kernels: tuple[tuple[tuple[Row, ...], int], ...], tmp_path: Path
) -> None:
    for (rows, width), said in zip(kernels, compiled(kernels, tmp_path), strict=True):
        about = f"{len(rows)} targets of {len(rows[0])} sources, words of {width} bytes: {said}"
        assert said["wavefront_size"] == WAVEFRONT, about
        assert said["max_flat_workgroup_size"] == THREADS, about
        assert said["group_segment_fixed_size"] == 0, about
        # Accumulators stay in registers. Without launch bounds three targets are spilled.
        assert said["vgpr_spill_count"] == said["private_segment_fixed_size"] == 0, about


SINGLE = """#include <hip/hip_runtime.h>
extern "C" __global__ void divide(float* c, const float* a) { c[threadIdx.x] = a[threadIdx.x] / c[threadIdx.x]; }
extern "C" __global__ void root(float* c) { c[threadIdx.x] = ::sqrt(c[threadIdx.x]); }
"""


@pytest.mark.process
def test_hip_divides_takes_roots_and_keeps_denormals_as_exact_adam_needs(tmp_path: Path) -> None:
    """By its compiler's defaults, which torch is built with. What a device makes of it is ``make gpu``'s to say."""
    command = compiler()
    source, assembly = tmp_path / "single.hip", tmp_path / "single.s"
    source.write_text(SINGLE)
    subprocess.run([*command, *FLAGS, "-o", assembly, source], check=True)
    divide, root = assembly.read_text().split("\ndivide:")[1].split("\nroot:")
    assert "v_div_fixup_f32" in divide, "an approximate quotient"
    assert root.count("v_fma_f32") >= 2, "a root without the steps that round it correctly"
    for kernel in (divide, root):
        assert ".amdhsa_float_denorm_mode_32 3" in kernel, "denormals are flushed"


@pytest.mark.process
def test_hip_contracts_nothing_in_the_fused_step_of_exact_adam(tmp_path: Path) -> None:
    """A quotient and a root take fused operations to be rounded correctly; each product of the step is one of its own."""
    command = compiler()
    source, assembly = tmp_path / "adam.hip", tmp_path / "adam.s"
    source.write_text(f"#include <hip/hip_runtime.h>\n{KERNEL}")
    subprocess.run([*command, *FLAGS, "-o", assembly, source], check=True)
    text = assembly.read_text()
    assert len(re.findall(r"v_(?:pk_)?mul_f32", text)) >= 8
    assert "v_div_fixup_f32" in text, "an approximate quotient"
    assert ".amdhsa_float_denorm_mode_32 3" in text, "denormals are flushed"
    source.write_text(source.read_text().replace("#pragma clang fp contract(off)", ""))
    subprocess.run([*command, *FLAGS, "-o", assembly, source], check=True)
    contracted = r"v_(?:pk_)?fma(?:c|k|ak|mk)?_f32"
    assert len(re.findall(contracted, assembly.read_text())) > len(re.findall(contracted, text))


@cache
def nvrtc(major: int) -> ctypes.CDLL:
    """NVIDIA's compiler for kernels that are made while a program runs: the one that CuPy calls."""
    found = sorted(Path(sys.prefix, "nvrtc").glob(f"*/nvidia/*/lib/libnvrtc.so.{major}"))
    if not found:
        pytest.skip(f"no NVRTC {major}: make compilers puts it into .venv")
    return ctypes.CDLL(str(found[-1]))


def ptx_of(source: str, major: int, architecture: str) -> str:
    """Compile to PTX, and on to the device's own instructions. Raises RuntimeError: what the compiler said."""
    library, program, size = nvrtc(major), ctypes.c_void_p(), ctypes.c_size_t()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    refused = library.nvrtcCompileProgram(program, 1, options)
    text = "ProgramLog" if refused else "PTX"
    assert not getattr(library, f"nvrtcGet{text}Size")(program, ctypes.byref(size))
    said = ctypes.create_string_buffer(size.value)
    assert not getattr(library, f"nvrtcGet{text}")(program, said)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if refused:
        raise RuntimeError(said.value.decode())
    return said.value.decode()


@pytest.mark.parametrize(("major", "architecture"), NVRTC)
def test_all_kernels_compile_for_nvidias_devices(major: int, architecture: str) -> None:
    for rows, width in CASES:
        ptx = ptx_of(kernel_source(rows, width), major, architecture)
        assert f".target {architecture}" in ptx
        assert f".entry {NAME}(" in ptx


@pytest.mark.parametrize(("major", "architecture"), NVRTC)
def test_nvidias_compiler_contracts_nothing_in_the_fused_step_of_exact_adam(
    major: int, architecture: str
) -> None:
    ptx = ptx_of(KERNEL, major, architecture)
    assert f".entry {KERNEL_NAME}(" in ptx
    assert not re.findall(r"\bfma\.", ptx)
    assert not re.findall(r"\bmul\.f32|\badd\.f32|\.ftz|\.approx", ptx), "may be contracted later"
    for operation in ("mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32"):
        assert operation in ptx


def test_p6_where_cuda_13_refuses_a_v100_the_message_names_the_extra_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Cuda13(TorchBackend):
        def combine(
            self, rows: Sequence[Row], sources: Sequence[Any], targets: Sequence[Any]
        ) -> None:
            ptx_of(kernel_source(tuple(rows), 16), 13, "sm_70")

    nvrtc(13)
    monkeypatch.setattr("reft.protect.backend.CupyBackend", Cuda13)
    assert backend_for(OnDevice(103)).name == "torch"
    assert "invalid value for --gpu-architecture" in caplog.text
    assert "reft-ckpt[cuda12], reft-ckpt[cuda13] (no V100)" in caplog.text
