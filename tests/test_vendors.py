"""What is said or done for NVIDIA's devices is said or done for AMD's too."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import reft
from reft.store.assemble import NO_DEVICE

ROOT = Path(reft.__file__).parents[1]
PAIRS = {
    r"CUDA_VISIBLE_DEVICES": r"HIP_VISIBLE_DEVICES",
    r"CUDA_HOME": r"ROCM_HOME",
    r"version\.cuda": r"version\.hip",
    r"/dev/nvidia": r"/dev/kfd",
    r"nvidia-smi|nvml|NVML": r"rocm-smi|amdsmi|AMDSMI",
    r"cuda12|cuda13": r"rocm7",
    r"nvcc|NVRTC": r"hipcc|hipRTC",
    r"libcuda\.so": r"/dev/kfd",
    r"\bCUDA\b(?! graph)": r"\b(ROCm|HIP|AMD)\b",
}
"""What a file that has the first must have as well."""
ALLOWED = {
    (
        "tests/elastic/scripts/light.py",
        r"CUDA_VISIBLE_DEVICES",
    ): "the name that DeepSpeed's accelerator sets for both",
    ("reft/tools/simulate/hardware.py", r"\bCUDA\b(?! graph)"): "the title of a publication",
    ("tests/slurm/test_scripts.py", r"CUDA_VISIBLE_DEVICES"): "REFT_BIND=nvidia is for NVIDIA's",
    ("tests/slurm/test_scripts.py", r"nvidia-smi|nvml|NVML"): "REFT_BIND=nvidia is for NVIDIA's",
    ("tests/matrix.py", r"\bCUDA\b(?! graph)"): "what torch's wheels on PyPI bring",
    ("tests/megatron_core/cpu.py", r"\bCUDA\b(?! graph)"): "Megatron's own names, on a CPU",
    ("tests/megatron_core/pretrain_on_cpu.py", r"\bCUDA\b(?! graph)"): "Megatron's own names, on a CPU",
}
ONE_VENDOR = {
    r"\.attributes\b.*Multi|cudaDevAttr|deviceGetAttribute": "CuPy's numbers of attributes are wrong on AMD (7676)",
    r"pynvml|nvidia_ml": "AMD's devices have no NVML: torch.cuda asks either",
    r"libcudart": "torch.cuda.cudart() is either runtime",
    r"get_device_capability": "on AMD's devices that is no compute capability",
    r"warp_?[sS]ize\s*=\s*32|WARP\s*=\s*32": "AMD's wavefront has 64 lanes",
}
"""What must not be in the package at all."""


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__):
                yield path.relative_to(ROOT).as_posix(), path.read_text()


@pytest.mark.parametrize("pattern", PAIRS)
def test_whoever_names_nvidias_names_amds(pattern: str) -> None:
    alone = [
        name
        for name, text in sources("reft", "tests", "benchmarks", "examples")
        if re.search(pattern, text) and not re.search(PAIRS[pattern], text) and (name, pattern) not in ALLOWED
    ]
    assert alone == [], f"these have {pattern} without {PAIRS[pattern]}"


@pytest.mark.parametrize("pattern", ONE_VENDOR)
def test_the_package_has_nothing_that_one_vendor_lacks(pattern: str) -> None:
    found = [name for name, text in sources("reft") if re.search(pattern, text)]
    assert found == [], ONE_VENDOR[pattern]


def test_exceptions_are_still_needed() -> None:
    texts = dict(sources("reft", "tests", "benchmarks", "examples"))
    for name, pattern in ALLOWED:
        assert re.search(pattern, texts[name]), f"{name} has no {pattern} any more"


def test_a_process_without_devices_sees_none_of_either_vendor() -> None:
    """AMD's runtime takes an empty list for a list that was not given: all devices (``rocdevice.cpp``)."""
    assert {name: value for name, value in NO_DEVICE.items() if name.endswith("VISIBLE_DEVICES")} == {
        "CUDA_VISIBLE_DEVICES": "-1",
        "HIP_VISIBLE_DEVICES": "-1",
    }


def test_messages_name_extras_that_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert {"cuda12", "cuda13", "rocm7"} <= extras
    texts = [text for _, text in sources("reft")] + [p.read_text() for p in (ROOT / "docs").glob("*.md")]
    named = {name for text in texts for name in re.findall(r"reft-ckpt\[([a-z0-9]+)\]", text)}
    assert named <= extras, "an extra that pyproject.toml does not have"
