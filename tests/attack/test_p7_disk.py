"""P5, P7, P8 on disk: whose checkpoints they are, whether they are sound, and what they give back."""

from __future__ import annotations

import os
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import reft
from tests.attack.jobs import asked, wait_for
from tests.engine.ranks import Mlp, be_a_rank, run_ranks

pytestmark = pytest.mark.integration


RANK = int(os.environ.get("RANK", "0"))


class Lives:
    def __init__(self, root: Path, name: str) -> None:
        self.root = root / name
        self.persist = self.root / "persist"
        if RANK == 0:
            self.root.mkdir()
        torch.distributed.barrier()

    def memory(self, job: str, rank: int = RANK) -> Path:
        return self.root / f"memory{rank}" / job

    def start(self, job: str, *, asked: bool = True, **client: Any) -> Any:
        block = {
            "enabled": True,
            "job_id": job,
            "memory_dir": str(self.memory(job).parent),
            "persist": {"dir": str(self.persist)},
        }
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "steps_per_print": None,
            "reft": block,
        }
        model = Mlp(16, 32)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        state = lambda: {"step": engine.global_steps, "rank": RANK, **client}  # noqa: E731
        reft.attach(engine, client_state=state if asked else None)
        torch.manual_seed(100 + RANK)
        random.seed(200 + RANK)
        return engine

    @contextmanager
    def life(
        self, job: str = "one", load: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Any]:
        engine = self.start(job, **options)
        yield engine, self.load(engine, **(load or {}))
        reft.attach(engine).close(60)
        torch.distributed.barrier()

    def save(self, engine: Any, where: str = "ckpt", **options: Any) -> None:
        engine.save_checkpoint(str(self.root / where), **options)

    def load(self, engine: Any, **options: Any) -> list[Any]:
        try:
            path, client = engine.load_checkpoint(str(self.root / "ckpt"), **options)
        except reft.ReftError as error:
            return [type(error).__name__, str(error)]
        assert path is None or client is not None
        kept = ("step", "rank", "epoch", "given")
        return [
            int(engine.global_steps),
            {k: client.get(k) for k in kept} if path is not None else None,
        ]

    def write(self, engine: Any, job: str = "one") -> None:
        step, nodes = int(engine.global_steps), [self.memory(job, rank).parent for rank in (0, 1)]

        # The version of the last step is taken where the next one begins.
        reft.attach(engine).flush(60)

        def committed() -> bool:
            found = asked("inspect", nodes, job)["versions"]
            return any(version["committed"] and version["step"] == step for version in found)

        def write() -> None:
            wait_for(committed, f"a commit of step {step}")
            assert asked("persist", nodes, job, "--out", str(self.persist))["step"] == step

        self.attack(write)

    def lose_memory(self, job: str) -> None:
        torch.distributed.barrier()
        shutil.rmtree(self.memory(job))
        torch.distributed.barrier()

    def attack(self, attack: Callable[[], None]) -> None:
        torch.distributed.barrier()
        if RANK == 0:
            attack()
        torch.distributed.barrier()

    def find(self, pattern: str) -> Path:
        return min(self.persist.rglob(pattern))


def train(engine: Any, until: int) -> list[str]:
    """Steps up to ``until``; the loss of each, exactly. The data is a function of the step."""
    losses = []
    while engine.global_steps < until:
        generator = torch.Generator().manual_seed(1000 * engine.global_steps + RANK)
        loss = engine(
            (torch.randn(4, 16, generator=generator) + random.random()).to(torch.bfloat16)
        )
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    return losses


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    for at in range(middle, middle + 64):
        data[at] ^= 64
    path.write_bytes(data)


def first_life(lives: Lives) -> list[str]:
    with lives.life() as (engine, _):
        losses = train(engine, 4)
        lives.write(engine)
        losses += train(engine, 8)
        lives.write(engine)
        losses += train(engine, 10)
    return losses


def goes_on(lives: Lives, losses: list[str]) -> dict[str, Any]:
    lives.lose_memory("one")
    with lives.life() as (engine, (step, client)):
        equal = train(engine, len(losses)) == losses[step:]
    return {"step": step, "client": client, "equal": equal}


def damaged(root: Path) -> dict[str, Any]:
    lives = Lives(root, "damaged")
    losses = first_life(lives)
    lives.attack(lambda: flip(lives.find("global_step8/*pp_rank_1_*optim_states.pt")))
    out = goes_on(lives, losses)
    lives.lose_memory("one")
    # The host state of one rank alone is damaged: its peers must hear of it.
    lives.attack(lambda: flip(lives.find("global_step4/reft_host-pp0.dp1.tp0.msgpack")))
    with lives.life() as (_, out["all_damaged"]):
        return out


def shared(root: Path) -> dict[str, Any]:
    lives = Lives(root, "shared")
    losses = first_life(lives)
    with lives.life("two") as (other, fresh):
        train(other, 8)
        lives.write(other, "two")
    return {"fresh": fresh, **goes_on(lives, losses)}


def went_back(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    lives = Lives(root, "back")
    with lives.life() as (engine, _):
        train(engine, 4)
        lives.save(engine)
        train(engine, 8)
        lives.write(engine)
        out["back"] = lives.load(engine, tag="global_step4")[0]
        train(engine, 6)
    with lives.life() as (_, (out["resumed"], _)):
        pass
    # The user's own checkpoint of the future that was given up.
    with lives.life() as (engine, _):
        train(engine, 9)
        lives.save(engine)
        out["back again"] = lives.load(engine, tag="global_step4")[0]
        train(engine, 7)
    with lives.life() as (_, (out["resumed again"], _)):
        return out


def outlived(root: Path) -> dict[str, Any]:
    """The memory is lost, and with it the count of incarnations; the script's own checkpoint has it."""
    out: dict[str, Any] = {}
    lives = Lives(root, "outlived")
    for until in (2, 3, 5):
        with lives.life() as (engine, _):
            train(engine, until)
            if until == 5:
                lives.save(engine)
    for name, options in (("found", {}), ("by tag", {"tag": "global_step5"})):
        lives.lose_memory("one")
        with lives.life(load=options) as (engine, (first, _)):
            train(engine, 9)
        with lives.life() as (_, (second, _)):
            out[name] = [first, second]
    return out


def own(root: Path) -> dict[str, Any]:
    lives = Lives(root, "own")
    with lives.life(epoch=3) as (engine, _):
        losses = train(engine, 4)
        lives.save(engine, client_state={"given": 5})
        losses += train(engine, 6)
    out = goes_on(lives, losses)
    for name, content in (
        ("torn", b"global_st\xff\xfe"),
        ("empty", b""),
        ("outside", b"../own/ckpt"),
    ):
        lives.lose_memory("one")
        lives.attack(lambda content=content: (lives.root / "ckpt" / "latest").write_bytes(content))
        with lives.life() as (_, out[name]):
            pass
    return out


def arguments(root: Path) -> dict[str, Any]:
    lives = Lives(root, "arguments")
    with lives.life(asked=False) as (engine, _):
        losses = train(engine, 4)
        lives.save(engine, client_state={"given": Namespace(hidden=16)})
        losses += train(engine, 6)
    lives.lose_memory("one")
    with lives.life(asked=False) as (engine, (step, client)):
        return {
            "step": step,
            "given": vars(client["given"]),
            "equal": train(engine, 6) == losses[4:],
        }


def main(root: Path) -> dict[str, Any]:
    runs = (damaged, shared, went_back, outlived, own, arguments)
    return {run.__name__: run(root) for run in runs}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("disk"))


def test_p5_a_damaged_checkpoint_is_refused_and_an_older_one_loaded(results: list[dict]) -> None:
    for r in results:
        assert (r["damaged"]["step"], r["damaged"]["equal"]) == (4, True)


def test_p5_where_all_are_damaged_every_rank_refuses(results: list[dict]) -> None:
    for r in results:
        kind, text = r["damaged"]["all_damaged"]
        assert kind == "UnrecoverableError"
        assert "global_step8: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: checksum" in text
        assert "global_step4: reft_host-pp0.dp1.tp0.msgpack: checksum" in text


def test_p7_jobs_that_share_a_persist_directory_share_nothing(results: list[dict]) -> None:
    for r in results:
        assert r["shared"]["fresh"] == [0, None]
        assert (r["shared"]["step"], r["shared"]["equal"]) == (8, True)


def test_p3_a_checkpoint_that_the_job_went_back_behind_is_not_newer(results: list[dict]) -> None:
    for r in results:
        assert r["went_back"] == {"back": 4, "resumed": 6, "back again": 4, "resumed again": 7}


def test_p3_what_was_committed_after_an_older_checkpoint_is_newer(results: list[dict]) -> None:
    for r in results:
        assert r["outlived"] == {"found": [5, 9], "by tag": [5, 9]}


def test_p8_client_state_comes_back_from_disk(results: list[dict]) -> None:
    for rank, r in enumerate(results):
        assert r["damaged"]["client"] == {"step": 4, "rank": rank, "epoch": None, "given": None}
        assert r["own"]["client"] == {"step": 4, "rank": rank, "epoch": 3, "given": 5}
        assert (r["own"]["step"], r["own"]["equal"]) == (4, True)


def test_p8_random_state_is_saved_beside_client_state_that_only_deepspeed_can_hold(
    results: list[dict],
) -> None:
    for r in results:
        assert r["arguments"] == {"step": 4, "given": {"hidden": 16}, "equal": True}


@pytest.mark.parametrize("how", ["torn", "empty", "outside"])
def test_p6_a_torn_latest_is_an_error_on_every_rank(results: list[dict], how: str) -> None:
    for r in results:
        kind, text = r["own"][how]
        assert kind == "UnrecoverableError"
        assert "is torn or names no checkpoint" in text


if __name__ == "__main__":
    be_a_rank(main)
