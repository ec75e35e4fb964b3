"""A small GPT under Megatron-core, trained step by step as its users write it. The last step's state of every rank is
written down to the byte, so that runs can be compared."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron_core.cpu import compute_on_cpu

SEQUENCE, VOCABULARY, MICRO_BATCHES = 16, 64, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("pp", "vpp", "tp", "ep", "layers", "experts"):
        parser.add_argument(f"--{name}", type=int, default={"layers": 4, "experts": 0}.get(name, 1))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--frozen", nargs="*", default=(), help="parts of parameters' names")
    parser.add_argument("--reft", type=json.loads)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    experts = (
        {"num_moe_experts": args.experts, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
        if args.experts
        else {}
    )
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        expert_model_parallel_size=args.ep,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        add_bias_linear=not args.experts,
        **experts,
    )


def model_chunks(
    args: argparse.Namespace, config: TransformerConfig
) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=args.distributed,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap,
        grad_reduce_in_fp32=True,
        bucket_size=5000,
    )
    chunks = []
    for number in range(args.vpp):
        stage = number if args.vpp > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(args.experts or None, False),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in args.frozen))
        if args.dtype != "fp32":
            from megatron.core.transformer.module import Float16Module

            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=number > 0))
    return chunks


def batches(start: int) -> Iterator[torch.Tensor]:
    """Endless, by consumed micro-batches of this rank."""
    rank, at = groups.get_data_parallel_rank(), start
    while True:
        generator = torch.Generator().manual_seed(1000 * at + rank)
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
        at += 1


def forward_step(iterator: Iterator[torch.Tensor], model: Any, *_: Any) -> Any:
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(SEQUENCE).expand_as(inputs)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(inputs, positions, mask, labels=labels)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
    ).hexdigest()


def state_of(chunks: list[Any], optimizer: Any, scheduler: Any) -> dict[str, str]:
    found: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        found |= {f"chunk{number}.{name}": digest(p) for name, p in chunk.named_parameters()}
    for number, part in enumerate(optimizer.chained_optimizers):
        for g, group in enumerate(part.optimizer.param_groups):
            found |= {f"group{number}.{g}.{k}": str(v) for k, v in group.items() if k != "params"}
            for i, p in enumerate(group["params"]):
                found[f"master{number}.{g}.{i}"] = digest(p)
                found |= {
                    f"moment{number}.{g}.{i}.{k}": digest(v)
                    for k, v in part.optimizer.state[p].items()
                }
        if getattr(part, "grad_scaler", None):
            found[f"scaler{number}"] = str(
                {k: str(v) for k, v in part.grad_scaler.state_dict().items()}
            )
    found["scheduler"] = str(scheduler.state_dict())
    found["python"] = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    found["numpy"] = hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest()
    found["torch"] = digest(torch.get_rng_state())
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return found | {
        f"tracker.{name}": digest(state) for name, state in tracker.get_states().items()
    }


@dataclass
class Training:
    chunks: list[Any]  # model chunks of this rank
    optimizer: Any
    scheduler: Any
    overlap: bool
    iteration: int = 0  # steps made
    consumed: int = 0  # micro-batches of this rank
    losses: list[Any] = field(default_factory=list)  # by step, of what this process has trained

    @property
    def client_state(self) -> dict[str, int]:
        return {"iteration": self.iteration, "consumed": self.consumed}

    def train(self, steps: int) -> None:
        chunks = self.chunks
        iterators = [batches(self.consumed) for _ in chunks]
        run = get_forward_backward_func()
        while self.iteration < steps:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            random.random(), np.random.random()
            shown = run(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=2,
                forward_only=False,
            )
            self.iteration += 1
            self.consumed += MICRO_BATCHES
            done, norm, _ = self.optimizer.step()
            if done:
                self.scheduler.step(increment=MICRO_BATCHES)
            self.losses.append(
                [self.iteration, [float(s["loss"]).hex() for s in shown], float(norm or 0).hex()]
            )

    def state(self) -> dict[str, str]:
        if self.overlap:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        return state_of(self.chunks, self.optimizer, self.scheduler)


def build(args: argparse.Namespace) -> Training:
    config = transformer_config(args)
    chunks = model_chunks(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-4,
            weight_decay=0.01,
            bf16=args.dtype == "bf16",
            fp16=args.dtype == "fp16",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.distributed,
            overlap_param_gather=args.overlap,
            clip_grad=1.0,
            initial_loss_scale=2.0**22,  # overflows in the first steps
            hysteresis=1,
        ),
        chunks,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=8,
        lr_decay_steps=200,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.02,
        wd_incr_steps=100,
        wd_incr_style="linear",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap:
        config.no_sync_func = [c.no_sync for c in chunks] if args.vpp > 1 else chunks[0].no_sync
        config.param_sync_func = (
            [c.start_param_sync for c in chunks] if args.vpp > 1 else chunks[0].start_param_sync
        )
    return Training(chunks, optimizer, scheduler, args.overlap)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(number)


def main() -> None:
    args = arguments()
    compute_on_cpu()
    dist.init_process_group("gloo")
    groups.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        expert_model_parallel_size=args.ep,
    )
    seed(7)
    training = build(args)
    session = None
    if args.reft is not None:
        import reft

        session = reft.attach_megatron(
            training.chunks,
            training.optimizer,
            training.scheduler,
            client_state=lambda: training.client_state,
            config=args.reft,
            micro_batches=MICRO_BATCHES,
        )
        session.session.tracer.traces = deque(maxlen=1)
        resumed = session.load()
        if resumed is not None:
            training.iteration, training.consumed = (
                resumed.iteration,
                resumed.client_state["consumed"],
            )
            assert resumed.client_state["iteration"] == resumed.iteration
    training.train(args.steps)
    if args.out is not None:
        place = f"pp{groups.get_pipeline_model_parallel_rank()}.dp{groups.get_data_parallel_rank()}.tp{groups.get_tensor_model_parallel_rank()}"
        found = {"state": training.state(), "losses": training.losses}
        if session is not None and args.pp > 1:
            # Of the step before the last one: a trace is complete where the next step begins.
            found["instructions"] = [i.name for i in session.session.tracer.traces[-1].instructions]
        (args.out / f"{place}.json").write_text(json.dumps(found))
    dist.barrier()
    if session is not None:
        session.close()


if __name__ == "__main__":
    main()
