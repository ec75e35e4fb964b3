"""What of Megatron-core reft knows how to restore; everything else is refused by name (P12)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reft.errors import ConfigError, UnsupportedStateError
from reft.state.codec import class_path
from reft.state.support import APEX_FUSED_ADAM, check_apex, check_optimizer

DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
FP32 = "megatron.core.optimizer.optimizer.FP32Optimizer"
FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
CHAINED = "megatron.core.optimizer.optimizer.ChainedOptimizer"
_KNOWN = (FP32, FLOAT16, DISTRIBUTED)
_INNER = tuple(
    f"torch.optim.{name}" for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD", "Adam", "AdamW", "SGD")
)
_FUSED = ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", APEX_FUSED_ADAM)
_SCALERS = tuple(
    f"megatron.core.optimizer.grad_scaler.{name}" for name in ("ConstantGradScaler", "DynamicGradScaler")
)
_RELEASES = ("0.16", "0.19")  # Whose classes were read and run
PROGRAM_RELEASES = ("0.16",)  # of Megatron-LM, whose training loop was read and run

Fact = tuple[bool, str, str]


def refuse(found: str, change: str) -> UnsupportedStateError:
    """The error for state that reft does not know."""
    return UnsupportedStateError(
        f"found {found}, whose state reft does not restore; expected DistributedDataParallel chunks with "
        f"FP32Optimizer, Float16OptimizerWithFloat16Params or DistributedOptimizer over Adam, AdamW or "
        f"SGD, chained or not: {change}"
    )


def check_release(releases: Sequence[str] = _RELEASES) -> None:
    """A ConfigError where Megatron-core is not installed, or of a release that was never tried."""
    try:
        # Of what is imported: a checkout of Megatron-LM has its own, whatever is installed.
        from megatron.core import __version__ as found
    except ImportError as error:
        raise ConfigError(
            "megatron-core is not installed; install it: pip install 'reft-ckpt[megatron]'"
        ) from error
    if not found.startswith(tuple(f"{release}." for release in releases)):
        expected = " or ".join(f"{release}.x" for release in releases)
        raise ConfigError(f"found megatron-core {found}; expected {expected}, which reft knows: install it")


def parts_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers that an optimizer consists of, without those that have nothing to do on this rank."""
    path = class_path(optimizer)
    if path == CHAINED:
        for one in optimizer.chained_optimizers:
            yield from parts_of(one)
    elif path not in _KNOWN:
        raise refuse(f"the optimizer {path}", "build it by get_megatron_optimizer")
    elif not optimizer.is_stub_optimizer:
        yield optimizer


def check(chunks: Sequence[Any], optimizer: Any) -> None:
    """Refuse a model or an optimizer that holds more than reft restores, by name, with what to change."""
    for is_so, found, change in _facts(chunks, optimizer):
        if is_so:
            raise refuse(found, change)


def _facts(chunks: Sequence[Any], optimizer: Any) -> Iterator[Fact]:
    for chunk in chunks:
        path = class_path(chunk)
        yield path != DDP, f"a model chunk of class {path}", f"wrap the model in {DDP}"
        yield from _of_model(chunk.config)
        yield from _of_buffers(chunk.ddp_config)
    for part in parts_of(optimizer):
        yield from _of_optimizer(part)


def _of_model(config: Any) -> Iterator[Fact]:
    get = vars(config).get
    yield get("fp8") is not None, f"FP8 ({get('fp8')})", "train in bf16, fp16 or fp32"
    yield get("fp4") is not None, f"FP4 ({get('fp4')})", "train in bf16, fp16 or fp32"
    degree = get("context_parallel_size") or 1
    yield degree > 1, f"context parallel groups of {degree}", "set context_parallel_size to 1"
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):  # since 0.19
        shards = get(name) or 1
        yield shards > 1, f"weights in {shards} shards ({name})", f"set {name} to 1"
    graphs = get("cuda_graph_impl") or "none"
    yield graphs != "none", f"CUDA graphs ({graphs})", "set cuda_graph_impl to none"


def _of_buffers(config: Any) -> Iterator[Fact]:
    get = vars(config).get
    yield bool(get("use_megatron_fsdp")), "Megatron-FSDP", "set use_megatron_fsdp to False"
    instances = get("num_distributed_optimizer_instances") or 1
    what = f"{instances} instances of the distributed optimizer"
    yield instances > 1, what, "set num_distributed_optimizer_instances to 1"
    shared = bool(get("reuse_grad_buf_for_mxfp8_param_ag"))
    yield shared, "parameters gathered into the gradients' buffer", "train in bf16, fp16 or fp32"


def _of_optimizer(part: Any) -> Iterator[Fact]:
    path, inner, get = class_path(part), part.optimizer, vars(part.config).get
    yield bool(get("use_precision_aware_optimizer")), f"{path} aware of precision", "switch it off"
    yield bool(get("optimizer_cpu_offload")), f"{path} with CPU offload", "set optimizer_cpu_offload to False"
    overlaps = bool(get("overlap_param_gather_with_optimizer_step"))
    layers = bool(get("use_layer_wise_distributed_optimizer"))
    what = f"{path} together with a layer-wise optimizer"
    yield layers, what, "set use_layer_wise_distributed_optimizer to False"
    yield bool(get("optimizer_cuda_graph")), f"{path} in a CUDA graph", "set optimizer_cuda_graph to False"
    what = f"{path} that gathers parameters during its own step"
    yield overlaps, what, "set overlap_param_gather_with_optimizer_step to False"
    if class_path(inner) in _FUSED:
        yield from _of_fused_adam(inner)
    else:
        known = class_path(inner) in _INNER
        yield not known, f"{path} over {class_path(inner)}", "set optimizer to adam or sgd"
        check_optimizer(inner)
    scaler = getattr(part, "grad_scaler", None)
    known = scaler is None or class_path(scaler) in _SCALERS
    yield not known, f"the loss scaler {class_path(scaler)}", "use one of Megatron's own"


def _of_fused_adam(inner: Any) -> Iterator[Fact]:
    """With fp32 moments, and masters that Megatron keeps, its state is that of torch's Adam; the step is
    counted in its groups."""
    path, get = class_path(inner), vars(inner).get
    yield bool(get("master_weights")), f"{path} with masters of its own", "let Megatron keep them"
    yield bool(get("capturable")), f"{path} in a CUDA graph", "set capturable to False"
    dtypes = {str(get(name, "torch.float32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    what = f"{path} with moments in {', '.join(sorted(dtypes))}"
    yield dtypes != {"torch.float32"}, what, "keep both moments in fp32"
    check_apex(inner)


def check_scheduler(scheduler: Any) -> None:
    """Refuse one that has no state that could be restored."""
    if scheduler is not None and not all(
        callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        raise UnsupportedStateError(
            f"the scheduler {class_path(scheduler)} has no state_dict and load_state_dict; add them, so that "
            f"a snapshot holds its position"
        )
