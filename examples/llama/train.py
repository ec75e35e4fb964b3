"""The training script: plain DeepSpeed, as anyone would write it.

It initialises an engine, loads the newest checkpoint, trains and saves. It knows nothing of
snapshots: ``reft launch`` installs them around ``deepspeed.initialize`` before it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.llama.corpus import default_cache_dir
from examples.llama.model import LlamaBlock, layer_specs, loss_function
from examples.llama.model_config import LlamaConfig, check_model, degrees_for
from examples.llama.options import Options, deepspeed_config
from examples.llama.progress import ByteProgress, StepDisplay
from examples.llama.samples import MicroBatchIterator, SampleDataset, open_samples
from examples.llama.tensor_parallel import TensorParallel, mark_norm_owners, sharded_parameters
from examples.llama.tokenizer import load_tokenizer
from reft.errors import ConfigError
from reft.log import EventLog
from reft.tools.planning.job import JobLayout, choose_order, parse_order

logger = logging.getLogger(__name__)

Engine = Any
"""A ``deepspeed.runtime.pipe.engine.PipelineEngine``; DeepSpeed has no types."""


class _Phases:
    """Seconds of the parts of start-up."""

    def __init__(self) -> None:
        self.secs: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self.secs[f"{name}_secs"] = round(now - self._since, 3)
        self._since = now


def train(options: Options) -> None:
    """Run a whole job in this process, one of ``WORLD_SIZE``.

    Raises:
        ConfigError: the model, the layout or the data cannot be used as asked.
    """
    _default_environment()
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    config = options.model_config()
    degrees = degrees_for(world_size, options.pp, options.tp, options.dp)
    check_model(config, degrees)
    phases = _Phases()
    samples = training_samples(options, config)
    phases.done("data")
    import_deepspeed(options.verbose)
    phases.done("import")
    events = EventLog(rank, writer="rank")
    init_processes(options, samples)
    layout = choose_layout(options, degrees_for(world_size, options.pp, options.tp, options.dp))
    phases.done("processes")
    engine = build_engine(options, config, layout)
    phases.done("engine")
    data = micro_batch_iterator(engine, options, config, layout, samples)
    engine.load_checkpoint(str(options.load_dir or options.save_dir))
    # The engine counts consumed samples on every rank, also where no data is read.
    data.consumed = engine.global_samples
    phases.done("load")
    at = layout.coordinate(rank)
    events.write(
        "ready",
        step=engine.global_steps,
        pp=at.pp,
        dp=at.dp,
        tp=at.tp,
        layout=str(layout),
        **phases.secs,
    )
    tokens = engine.train_batch_size() * config.seq_length
    with StepDisplay(
        rank == 0, engine.global_steps, options.steps, tokens, options.log_interval
    ) as display:
        display.say(f"{config.describe()}\n{layout}; {type(engine.optimizer).__name__}")
        if engine.global_steps:
            display.say(f"resumed at step {engine.global_steps}")
        _train_steps(engine, data, options, events, display)
    dist.barrier()
    dist.destroy_process_group()


def _default_environment() -> None:
    """Stand in for a launcher where there is none: one process, its own store."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def training_samples(options: Options, config: LlamaConfig) -> SampleDataset:
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but model {config.name} has "
            f"{config.vocab_size} embeddings; pass --vocab {-(-tokenizer.vocab_size // 64) * 64}"
        )
    cache = options.cache_dir or default_cache_dir()
    with ByteProgress("tokenising") as progress:
        return open_samples(options.data, tokenizer, cache, config.seq_length, progress)


def import_deepspeed(verbose: bool) -> None:
    if not verbose:
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    import deepspeed  # noqa: F401

    from reft.engine.on_import import avoid_build_at_start

    avoid_build_at_start()


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """DeepSpeed prints its plans; hide them unless asked for."""
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        yield


def init_processes(options: Options, samples: SampleDataset) -> None:
    import deepspeed

    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
    else:
        # Denormals would make a CPU's backward pass several times slower.
        torch.set_flush_denormal(True)
    with _quiet(options.verbose):
        deepspeed.init_distributed()
    digests = _gather_ids(samples.digest())
    if len(set(digests)) > 1:
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise ConfigError(
            f"the ranks hold different data: ranks {odd} differ from rank 0; copy the same files "
            "to every node"
        )


def _gather_ids(text: str) -> list[int]:
    """A 63-bit hash of every rank's ``text``, by rank."""
    from deepspeed.accelerator import get_accelerator

    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    device = torch.device(get_accelerator().current_device_name())
    mine = torch.tensor([int.from_bytes(digest, "little") >> 1], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(value.item()) for value in everyone]


def choose_layout(options: Options, degrees: Any) -> JobLayout:
    if options.rank_order != "auto":
        return JobLayout(degrees, parse_order(options.rank_order))
    # GROUP_RANK numbers the launchers of TorchElastic; each is one node, also on a shared host.
    node = os.environ.get("GROUP_RANK") or socket.gethostname()
    return JobLayout(degrees, choose_order(degrees, _gather_ids(node)))


def build_engine(options: Options, config: LlamaConfig, layout: JobLayout) -> Engine:
    """The model as a pipeline module over ``layout``, and DeepSpeed's engine around it."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology

    ds_config = deepspeed_config(options, layout.degrees.dp, torch_adam=_needs_torch_adam())
    if ds_config.get("fp16", {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise ConfigError("this processor cannot compute in fp16; use --dtype bf16 or fp32")
    at = layout.coordinate(dist.get_rank())
    # Equal on tensor ranks: dropout must fall on the same places of replicated activations.
    seed = (options.seed * 1_000_003 + at.dp * 1009 + at.pp) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tp = _tensor_parallel(layout, options.seed)
    with _quiet(options.verbose):
        module = PipelineModule(
            layers=layer_specs(config, tp),
            topology=ProcessTopology(axes=list(layout.order), dims=list(layout.dims)),
            loss_fn=loss_function(tp),
            partition_method=f"type:{LlamaBlock.__name__}",
            activation_checkpoint_interval=int(options.checkpoint_activations),
            # Not the embedding: its input needs no gradient, and recomputing would cut the graph
            # there.
            checkpointable_layers=[LlamaBlock.__name__],
        )
        mark_norm_owners(module, sharded_parameters(module), tp)
        engine, _, _, _ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=ds_config,
        )
    return engine


def _needs_torch_adam() -> bool:
    """DeepSpeed's fused Adam is compiled at first use; torch's own works everywhere."""
    if not torch.cuda.is_available():
        return True
    from torch.utils.cpp_extension import CUDA_HOME, ROCM_HOME

    return (ROCM_HOME if torch.version.hip else CUDA_HOME) is None


def _tensor_parallel(layout: JobLayout, seed: int) -> TensorParallel:
    rank = dist.get_rank()
    if layout.degrees.tp == 1:
        return TensorParallel(seed=seed)
    mine = None
    for ranks in layout.groups("model"):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = TensorParallel(group, ranks.index(rank), len(ranks), seed)
    if mine is None:
        raise ConfigError(
            f"rank {rank} is in no tensor group of {layout}; the layout does not cover the job"
        )
    return mine


def micro_batch_iterator(
    engine: Engine, options: Options, config: LlamaConfig, layout: JobLayout, samples: SampleDataset
) -> MicroBatchIterator:
    return MicroBatchIterator(
        samples,
        config.vocab_size,
        seed=options.seed,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        dp_rank=layout.coordinate(dist.get_rank()).dp,
        dp_size=layout.degrees.dp,
    )


def _train_steps(
    engine: Engine,
    data: MicroBatchIterator,
    options: Options,
    events: EventLog,
    display: StepDisplay,
) -> None:
    # The loss is equal everywhere; a device is made to wait for it on as few ranks as possible.
    grid = engine.grid
    last_stage = (
        engine.is_last_stage()
        and grid.data_parallel_id == 0
        and grid.get_slice_parallel_rank() == 0
    )
    reports = events.enabled and (dist.get_rank() == 0 or last_stage)
    while engine.global_steps < options.steps:
        loss = engine.train_batch(data)
        step = engine.global_steps
        value = float(loss) if reports or display.needs(step) else None
        if reports and value is not None:
            events.write("step", step=step, loss=value, loss_hex=value.hex())
        else:
            events.write("step", step=step)
        display.step(step, value, engine.get_lr()[0])
        if options.save_interval and (step % options.save_interval == 0 or step == options.steps):
            save_checkpoint(engine, data, options.save_dir)


def save_checkpoint(engine: Engine, data: MicroBatchIterator, folder: Path) -> None:
    engine.save_checkpoint(str(folder), client_state={"data": data.state_dict()})
