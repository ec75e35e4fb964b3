"""The hook on DeepSpeed's plain engine, in real processes: P1, P8, P10, and what users are told."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import reft
from reft.engine.attach import find_session
from reft.engine.on_import import install
from reft.memory.arena import Arena
from reft.memory.job_secret import read_secret
from tests.device.simulated import device_or_skip
from tests.engine.ranks import be_a_rank, block_of, mse, run_ranks

pytestmark = pytest.mark.integration


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(32)  # buffers that change in the forward pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mse(self.second(self.dropout(self.norm(self.first(x)).relu())), x)


def config(block: dict[str, Any] | None) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
    }
    return base if block is None else {**base, "reft": block}


def make(block: dict[str, Any] | None, init: Any = None) -> Any:
    model = Model()
    initialize = init or deepspeed.initialize
    return initialize(model=model, model_parameters=model.parameters(), config=config(block))[0]


def train(engine: Any, until: int) -> list[str]:
    """Steps up to ``until``; the loss of each, exactly. The data is a function of the step."""
    losses = []
    while engine.global_steps < until:
        generator = torch.Generator().manual_seed(
            1000 * engine.global_steps + int(os.environ["RANK"])
        )
        for _ in range(2):
            x = torch.randn(4, 16, generator=generator) + random.random()
            loss = engine(x.to(engine.device))
            engine.backward(loss)
            engine.step()
        losses.append(float(loss).hex())
    return losses


def seed() -> None:
    torch.manual_seed(100 + int(os.environ["RANK"]))
    random.seed(200 + int(os.environ["RANK"]))


def main(root: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    block = block_of(root, "hook")
    out: dict[str, Any] = {"deepspeed": deepspeed.__version__}

    # P10: without the block the engine is as DeepSpeed made it, also after install().
    plain = make(None)
    before = set(vars(plain))
    install()
    untouched = make(None)
    out["inert"] = set(vars(untouched)) == before and find_session(untouched) is None
    out["off"] = find_session(make({"enabled": False})) is None
    seed()
    reference = train(plain, 12)

    # A fresh job: nothing to load.
    seen = {"epoch": 0}
    first = make(block)
    out["installed"] = find_session(first) is not None
    reft.attach(first, client_state=lambda: {"epoch": seen["epoch"], "step": first.global_steps})
    seed()
    out["fresh"] = first.load_checkpoint(str(root / "ckpt"))
    seen["epoch"] = 3
    losses = train(first, 5)
    first.save_checkpoint(str(root / "ckpt"))
    losses += train(first, 8)
    session = find_session(first)
    assert session is not None
    session.flush(30)
    out["committed"] = session.stats.committed_step
    session.close()

    # A later incarnation: the newest state is in memory, newer than the checkpoint of step 5.
    second = make(block, init=reft.initialize)
    path, client = second.load_checkpoint(str(root / "ckpt"))
    out["resumed"] = [
        path,
        dict(client),
        second.global_steps,
        find_session(second).memory.incarnation,
    ]
    try:
        client["lr_of_mine"]
    except reft.ConfigError as error:
        out["missing_key"] = str(error)
    losses += train(second, 12)
    out["equal_after_memory"] = losses == reference

    # Back to the checkpoint on purpose: an explicit tag is that checkpoint, bit for bit.
    path, _ = second.load_checkpoint(str(root / "ckpt"), tag="global_step5")
    out["rolled_back"] = [
        Path(path).parent.name,
        second.global_steps,
        find_session(second).memory.incarnation,
    ]
    out["equal_after_disk"] = train(second, 12) == reference[5:]
    find_session(second).flush(30)
    find_session(second).close()

    # The checkpoint is DeepSpeed's own: it loads without reft.
    foreign = make(None)
    path, _ = foreign.load_checkpoint(str(root / "ckpt"))
    out["without_reft"] = [Path(path).parent.name, foreign.global_steps]

    # A script that forgets to load must not train over what is in memory.
    careless = make(block)
    try:
        train(careless, 1)
    except reft.UnrecoverableError as error:
        out["careless"] = str(error)
    find_session(careless).close()

    # Progress was made, memory is gone, nothing on disk: refused, not started from scratch.
    job_dir = root / f"memory{rank}" / "hook"
    for file in sorted(job_dir.glob("*.arena")):
        if rank == 0:
            file.unlink()
        else:  # every byte of what the survivor has is damaged, the headers are not
            with Arena.open(file, read_secret(job_dir), writable=True) as arena:
                arena.data[:] = bytes(arena.data_bytes)
    torch.distributed.barrier()
    lost = make(block)
    try:
        lost.load_checkpoint(str(root / "empty"))
    except reft.UnrecoverableError as error:
        out["lost"] = str(error)
    find_session(lost).close()
    out["mpi"] = sorted(
        name for name in sys.modules if "mpi" in name.split(".") or "mpi4py" in name
    )
    return out


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("device", marks=pytest.mark.gpu)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    device = "cpu" if request.param == "cpu" else device_or_skip()
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("hook"), device=device)


def test_p10_without_the_block_nothing_is_touched(results: Ranks) -> None:
    assert all(r["inert"] and r["off"] and r["installed"] for r in results)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("mpi", []),
        ("fresh", [None, None]),
        ("committed", 8),  # every step of a fresh job
        ("without_reft", ["global_step5", 5]),
    ],
)
def test_p10_p12_checkpoints_and_imports_are_as_deepspeed_has_them(
    results: Ranks, what: str, told: Any
) -> None:
    assert all(r[what] == told for r in results)


def test_p8_memory_gives_back_the_newest_state_bit_for_bit(results: Ranks) -> None:
    for r in results:
        path, client, step, incarnation = r["resumed"]
        assert path == "memory:hook/8"
        assert client == {"epoch": 3, "step": 8}
        assert (step, incarnation) == (8, 2)
        assert r["equal_after_memory"]


def test_an_explicit_tag_goes_back_and_starts_a_new_incarnation(results: Ranks) -> None:
    for r in results:
        assert r["rolled_back"] == ["global_step5", 5, 3]
        assert r["equal_after_disk"], "random states come back from the file beside the checkpoint"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing_key", ["pass client_state=lambda: {"]),
        ("careless", ["without calling engine.load_checkpoint"]),
        (
            "lost",
            ["cannot be recovered and no checkpoint is on disk", "reft clean --job hook --force"],
        ),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(results: Ranks, what: str, words: list[str]) -> None:
    for r in results:
        assert all(word in r[what] for word in words)


if __name__ == "__main__":
    be_a_rank(main)
