"""What HIP's compiler makes of the operations of ExactAdam, where there is one.

Debian 12 has one: ``apt-get install --no-install-recommends clang-15 libamdhip64-dev rocm-device-libs``.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ARCHITECTURE = "gfx90a"
"""MI250X."""
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
