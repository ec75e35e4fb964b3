"""Real engines on a few ranks: what the template gives against what DeepSpeed writes.

``python format_worker.py <out dir> <world>:<config>,<config> ...``. DeepSpeed is imported once and the
ranks are forked from there, to save time. Every rank writes ``result-<world>-<config>-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from reft.engine.install import avoid_build_at_start
from reft.grid import Coordinate
from reft.naming import Label
from reft.protect.blocks import Section
from reft.state import codec
from reft.state.adapters import adapter_for
from reft.state.catalogue import Manifest
from reft.state.deepspeed_format import (
    Template,
    capture_template,
    host_file_name,
    read_host_file,
    rebuild,
    write_checkpoint,
)
from reft.state.host import capture_host_state
from reft.state.template import same_value
from reft.storage.persist import persist_label
from reft.storage.persisted import job_directory
from tests.old_deepspeed import step_without_autograd
from tests.persist import verify_persisted
from tests.persist.job_memory import Memory, RankImages

WIDTH = 8
PERSISTED_KIND = "bf16_zero1"
TEMPLATE_STEP, SNAPSHOT_STEP, LAST_STEP = 2, 4, 6


class Block(nn.Module):
    """A layer with buffers that every forward pass changes, and with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean += x.detach().to(self.mean.dtype).mean()
        return torch.tanh(self.linear(x) + self.frozen)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def loss_of(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((out.float() - wanted.float()) ** 2).mean()


class Plain(nn.Module):
    """Tied weights and two parameter groups without a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def groups(self) -> list[dict[str, object]]:
        params = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]


def ds_config(kind: str) -> dict[str, object]:
    config: dict[str, object] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1000,
    }
    if kind != "fp32_torch_schedule":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    dtype, _, rest = kind.partition("_")
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32" if "accumulate32" in rest else "bf16"}
    if "zero1" in rest:
        config["zero_optimization"] = {"stage": 1}
    return config


def make_engine(kind: str, world: int) -> object:
    torch.manual_seed(1)
    config = ds_config(kind)
    options: dict[str, object] = {}
    if kind == "fp32_torch_schedule":
        options["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=20
        )
    if world == 4:
        layers = [TiedLayerSpec("e", Embedding), LayerSpec(Block), LayerSpec(Block)]
        layers.append(TiedLayerSpec("e", Embedding, forward_fn=head))
        model = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
        parameters = [p for p in model.parameters() if p.requires_grad]
    else:
        model = Plain()
        parameters = model.groups()
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config, **options)[0]
    return step_without_autograd(engine)


def train_step(engine: object, kind: str, step: int, dp: int, world: int) -> str:
    """One optimizer step on data that depends on the step only; returns the loss, exactly."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind.split("_", maxsplit=1)[0], torch.float32)
    generator = torch.Generator().manual_seed(100 * step + dp)
    # An overflow between template and snapshot: the scale falls, the scheduler stands still.
    factor = float("inf") if kind.startswith("fp16") and step == SNAPSHOT_STEP - 1 else 1.0

    def batches():
        while True:
            x = torch.randn(2, WIDTH, generator=generator)
            yield (x * factor).to(dtype), torch.randn(2, WIDTH, generator=generator).to(dtype)

    if world == 4:
        return float(engine.train_batch(batches())).hex()
    total = 0.0
    data = batches()
    for _ in range(engine.gradient_accumulation_steps()):
        x, wanted = next(data)
        loss = loss_of(engine(x), wanted)
        engine.backward(loss)
        engine.step()
        total += float(loss)
    return total.hex()


def coordinate_of(rank: int, world: int) -> Coordinate:
    return Coordinate(rank // 2, rank % 2, 0) if world == 4 else Coordinate(0, rank, 0)


def run(kind: str, rank: int, world: int, out: Path) -> dict[str, object]:
    at = coordinate_of(rank, world)
    engine = make_engine(kind, world)
    client = {"epoch": 3, "nested": {"list": [1, 2.5, ("a", b"b")]}}

    def host_state() -> dict[str, object]:
        return capture_host_state(engine, adapter_for(engine), {**client, "step": engine.global_steps}, None)

    for step in range(1, TEMPLATE_STEP + 1):
        train_step(engine, kind, step, at.dp, world)
    before = sorted(str(p) for p in out.rglob("*"))
    attributes = set(vars(engine))
    encoded = capture_template(engine, adapter_for(engine).images(), host_state())
    assert set(vars(engine)) == attributes
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
    assert not Path("/nonexistent").exists()
    torch.distributed.barrier()
    assert sorted(str(p) for p in out.rglob("*")) == before

    for step in range(TEMPLATE_STEP + 1, SNAPSHOT_STEP + 1):
        train_step(engine, kind, step, at.dp, world)
    images = [image_bytes(image) for image in adapter_for(engine).images()]
    state_bytes = codec.encode(host_state())
    reference, rebuilt = out / kind / "reference", out / kind / "rebuilt"
    tag = f"global_step{SNAPSHOT_STEP}"
    torch.distributed.barrier()
    (rebuilt / tag).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    engine.save_checkpoint(str(reference), client_state={**client, "step": SNAPSHOT_STEP})
    losses = [train_step(engine, kind, s, at.dp, world) for s in range(SNAPSHOT_STEP + 1, LAST_STEP + 1)]

    def read(section: Section, start: int, nbytes: int) -> memoryview:
        image = images[0 if section is Section.REPLICATED else 1]
        assert start + nbytes <= len(image)
        return memoryview(image)[start : start + nbytes]

    template, state = Template.decode(encoded), codec.decode(state_bytes)
    written = write_checkpoint(template, read, state, rebuilt / tag, at)
    (rebuilt / "latest").write_text(tag)
    torch.distributed.barrier()
    problems = compare(reference / tag, rebuilt / tag, template)
    assert written[host_file_name(at)].nbytes == (rebuilt / tag / host_file_name(at)).stat().st_size
    assert same_value(read_host_file(rebuilt / tag / host_file_name(at)), state)

    if kind == PERSISTED_KIND and world == 4:
        rebuilt = persist(at, images, encoded, state_bytes, out / "memory")
        problems += compare(reference / tag, rebuilt / tag, template)

    sums = [len(bytes(image)) and hash(bytes(image)) for image in images]
    for _ in rebuild(template, read, state):
        pass
    assert sums == [len(bytes(image)) and hash(bytes(image)) for image in images]

    fresh = make_engine(kind, world)
    path, loaded_client = fresh.load_checkpoint(str(rebuilt))
    assert path is not None
    assert {k: loaded_client[k] for k in client} == client
    again = [train_step(fresh, kind, s, at.dp, world) for s in range(SNAPSHOT_STEP + 1, LAST_STEP + 1)]
    reference_files = sorted(p.name for p in (reference / tag).iterdir())
    rebuilt_files = sorted(p.name for p in (rebuilt / tag).iterdir() if not p.name.startswith("reft"))
    return {
        "optimizer": type(engine.optimizer).__name__,
        "problems": problems,
        "losses": losses,
        "again": again,
        "reference_files": reference_files,
        "rebuilt_files": rebuilt_files,
        "own_files": sorted(template.files),
        "skipped_steps": int(engine.skipped_steps),
        "scripts": template.recovery_scripts,
        "template_bytes": len(encoded),
        "lr_moved": state["lr_scheduler"] != {},
    }


def persist(at: Coordinate, images: list[bytearray], template: bytes, state: bytes, root: Path) -> Path:
    """The same version from arenas, by the daemons' code: rank 0 and rank 1 act for their nodes."""
    memory = Memory(root, copies=0)
    blob = codec.encode({"manifest": Manifest((), ()).encode(), "template": template, "state": state})
    mine = RankImages(bytes(images[0]), bytes(images[1]), blob)
    label = Label(1, SNAPSHOT_STEP)
    memory.write_arena(at, label, [mine, mine])
    directory = root / "checkpoints"
    torch.distributed.barrier()
    if at.pp == 0:
        node = memory.node_of(at)
        persist_label(memory.job_dir(node), label, memory.config(directory))
    torch.distributed.barrier()
    directory = job_directory(directory, memory.job_id)
    assert verify_persisted(directory) == []
    if "zero1" in PERSISTED_KIND:
        assert (directory / "zero_to_fp32.py").is_file()
    return directory


def image_bytes(image: object) -> bytearray:
    out = torch.empty(image.nbytes, dtype=torch.uint8)
    image.read_into(0, out)
    return bytearray(out.numpy().tobytes())


def compare(reference: Path, rebuilt: Path, template: Template) -> list[str]:
    """Differences between DeepSpeed's files and the rebuilt ones, of this rank's files."""
    problems: list[str] = []
    for name in template.files:
        a = torch.load(reference / name, weights_only=False)
        b = torch.load(rebuilt / name, weights_only=False)
        differences(a, b, name, problems)
        if (rebuilt / name).stat().st_size > 1.2 * (reference / name).stat().st_size + 4096:
            problems.append(f"{name}: {(rebuilt / name).stat().st_size} bytes")
    return problems


def differences(a: object, b: object, path: str, problems: list[str]) -> None:
    if type(a) is not type(b):
        problems.append(f"{path}: {type(a)} against {type(b)}")
    elif isinstance(a, torch.Tensor):
        same = (a.dtype, a.shape, a.stride(), a.requires_grad) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.requires_grad,
        )
        if not same or codec.encode(a.detach()) != codec.encode(b.detach()):
            problems.append(f"{path}: {a} against {b}")
        differences(a.__dict__, b.__dict__, f"{path}.__dict__", problems)
    elif isinstance(a, dict):
        if list(a) != list(b):
            problems.append(f"{path}: keys {list(a)} against {list(b)}")
            return
        for key in a:
            differences(a[key], b[key], f"{path}[{key!r}]", problems)
        differences(getattr(a, "__dict__", 0), getattr(b, "__dict__", 0), f"{path}.__dict__", problems)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            problems.append(f"{path}: {len(a)} items against {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            differences(x, y, f"{path}[{i}]", problems)
    elif hasattr(a, "__dict__") and not isinstance(a, type) and not type(a).__module__.startswith("enum"):
        if type(a).__eq__ is object.__eq__:
            differences(vars(a), vars(b), f"{path}.__dict__", problems)
        elif a != b:
            problems.append(f"{path}: {a} against {b}")
    elif a != b:
        problems.append(f"{path}: {a!r} against {b!r}")


def rank_main(rank: int, world: int, listener: socket.socket, out: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(listener.getsockname()[1]),
    )
    store = torch.distributed.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world,
        is_master=rank == 0,
        master_listen_fd=listener.detach() if rank == 0 else None,
        use_libuv=False,  # torch 2.4's store on libuv takes no descriptor
    )
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    avoid_build_at_start()
    deepspeed.init_distributed("gloo")
    for kind in kinds:
        result = run(kind, rank, world, out)
        (out / f"result-{kind}-{rank}.json").write_text(json.dumps(result))


def run_world(world: int, out: Path, kinds: list[str]) -> bool:
    """Fork the ranks and wait; one that fails takes the others along, as they would wait for it."""
    out.mkdir()
    # No threads before the fork: rank 0 serves the store on a port that the kernel chose.
    listener = socket.create_server(("127.0.0.1", 0))
    children = set()
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, world, listener, out, kinds)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.add(pid)
    listener.close()
    well = True
    while children:
        pid, status = os.wait()
        children.discard(pid)
        if status:
            well = False
            for other in children:
                os.kill(other, signal.SIGKILL)
    return well


def main() -> int:
    out = Path(sys.argv[1])
    # DeepSpeed would compile a shared-memory all-reduce that nothing here uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for job in sys.argv[2:]:
        world, _, kinds = job.partition(":")
        if not run_world(int(world), out / world, kinds.split(",")):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
