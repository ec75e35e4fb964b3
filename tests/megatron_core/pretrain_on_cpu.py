"""Runs a program of NVIDIA's Megatron-LM where there is no device: ``pretrain_on_cpu.py PROGRAM ARGUMENTS...``.

The program and its checkout are not changed; what they ask of CUDA is answered here."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from contextlib import nullcontext
from copy import copy
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.megatron_core.cpu import compute_on_cpu


class _Stream:
    """Everything is done when it is asked for."""

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _answer() -> None:
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.memory_stats = lambda *_, **__: {}
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=8, minor=0, total_memory=0)
    cuda.Stream, cuda.stream = _Stream, lambda _: nullcontext()
    cuda.current_stream = lambda *_: _Stream()
    torch.compiler.set_stance("force_eager")


def _leave_out_kernels() -> None:
    """Those in Triton are imported and not used; those in CUDA are built."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    module: Any = ModuleType(name)
    module.enable_batch_invariant_mode = module.is_batch_invariant_mode_enabled = lambda: False
    sys.modules[name] = module
    from megatron.legacy import fused_kernels

    vars(fused_kernels)["load"] = lambda _: None


def _take_plain_norms() -> None:
    """With sequence parallelism the program wants apex's or TransformerEngine's: torch's compute the same, where
    their parameters are marked as those are, so that their gradients are summed over the tensor-parallel group."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make: Any = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy(config)
        alone.sequence_parallel = False
        norm = make(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    vars_of: Any = WrappedTorchNorm
    vars_of.__new__ = made


def _take_index_builder() -> None:
    """The datasets' compiled part, from the package on PyPI: a checkout has it only after its own build."""
    name = "megatron.core.datasets.helpers_cpp"
    (built,) = (
        f
        for f in distribution("megatron-core").files or ()
        if Path(f).name.startswith("helpers_cpp")
    )
    spec = importlib.util.spec_from_file_location(name, built.locate())
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    from megatron.core.datasets import utils

    vars(utils)["compile_helpers"] = lambda: None


def main() -> None:
    program = sys.argv[1]
    sys.path.insert(0, str(Path(program).resolve().parent))
    compute_on_cpu()
    _answer()
    _leave_out_kernels()
    _take_plain_norms()
    _take_index_builder()
    sys.argv = sys.argv[1:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
