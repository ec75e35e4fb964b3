"""One rank that asks for what reft refuses; prints what it was told, as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core import tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

import reft
from megatron_patches.core.support import check_release
from tests.megatron_core.cpu import compute_on_cpu
from tests.megatron_core.job import model_chunks, transformer_config


class WithMore(LayerWiseDistributedOptimizer):
    """One of a class that reft does not know, whatever it holds."""

    def __init__(self, chained: Any) -> None:
        vars(self).update(vars(chained))


def main() -> None:
    compute_on_cpu()
    directory = tempfile.TemporaryDirectory()
    dist.init_process_group("gloo", init_method=f"file://{directory.name}/store", rank=0, world_size=1)
    groups.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    args = argparse.Namespace(
        pp=1, vpp=1, tp=1, ep=1, layers=1, experts=0, dtype="bf16", distributed=True, overlap=False, frozen=()
    )
    config = transformer_config(args)
    chunks = model_chunks(args, config)
    settings = OptimizerConfig(
        lr=1e-3, bf16=True, params_dtype=config.params_dtype, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    told: dict[str, str] = {}

    def ask(name: str, attach: Callable[[], Any]) -> None:
        try:
            attach()
            told[name] = "attached"
        except reft.ReftError as error:
            told[name] = f"{type(error).__name__}: {error}"

    def with_setting(name: str, of: Any, value: Any) -> None:
        before = dict(vars(of))
        setattr(of, name, value)  # 0.16 has not all of them
        ask(name, lambda: reft.attach_megatron(chunks, optimizer, micro_batches=1))
        delattr(of, name)
        vars(of).update(before)

    with_setting("fp8", config, "hybrid")
    with_setting("context_parallel_size", config, 2)
    with_setting("cuda_graph_impl", config, "local")
    with_setting("gtp_weight_remat_size", config, 2)
    with_setting("expert_gtp_weight_remat_size", config, 2)
    with_setting("num_distributed_optimizer_instances", chunks[0].ddp_config, 2)
    with_setting("reuse_grad_buf_for_mxfp8_param_ag", chunks[0].ddp_config, True)
    with_setting("use_precision_aware_optimizer", settings, True)
    with_setting("optimizer_cpu_offload", settings, True)
    with_setting("overlap_param_gather_with_optimizer_step", settings, True)
    with_setting("use_layer_wise_distributed_optimizer", settings, True)
    with_setting("optimizer_cuda_graph", settings, True)
    ask("release", lambda: check_release(("0.15",)))
    ask("chunk", lambda: reft.attach_megatron([chunks[0].module], optimizer, micro_batches=1))
    ask("layerwise", lambda: reft.attach_megatron(chunks, WithMore(optimizer), micro_batches=1))
    ask("scheduler", lambda: reft.attach_megatron(chunks, optimizer, object(), micro_batches=1))
    ask("micro_batches", lambda: reft.attach_megatron(chunks, optimizer))
    for block in ({"protection": "arc+aor"}, {"persist": {"dir": "/tmp"}}, {"enabled": False}):
        ask(
            json.dumps(block),
            lambda block=block: reft.attach_megatron(chunks, optimizer, micro_batches=1, config=block),  # type: ignore[misc]
        )
    protected = reft.attach_megatron(chunks, optimizer, micro_batches=1, config={"allow_unprotected": True})
    told["otherwise"] = str(protected.load(lambda: 5))
    ask("again", protected.load)
    ask("no beginning", optimizer.step)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    told["steps"] = str(protected.session.engine.global_steps)
    protected.close()
    print(json.dumps(told), flush=True)
    directory.cleanup()


if __name__ == "__main__":
    main()
