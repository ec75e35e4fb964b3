"""Two ranks, each a node of its own, whose newest versions are arenas on storage; as their daemons write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reft.config import PersistConfig, ReftConfig
from reft.grid import Section
from reft.memory.arena import Arena
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.storage.persist import persist_label
from reft.storage.persisted import STORAGE_KEY
from tests.attack import test_p7_disk as disk_job
from tests.attack.jobs import asked, wait_for
from tests.engine.ranks import be_a_rank


class Stored(disk_job.Lives):
    def write(self, engine: Any, job: str = "one") -> None:
        step, nodes = int(engine.global_steps), [self.memory(job, rank).parent for rank in (0, 1)]

        def committed() -> list[dict[str, Any]]:
            found = asked("inspect", nodes, job)["versions"]
            return [v for v in found if v["committed"] and v["whole_ranks"] == 2 and v["step"] == step]

        wait_for(lambda: bool(committed()), f"a commit of step {step}")
        label = Label(committed()[0]["incarnation"], step)
        config = ReftConfig(enabled=True, persist=PersistConfig(dir=self.persist, keep=3))
        persist_label(JobDir.open(self.memory(job)), label, config)
        self.attack(lambda: None)

    def flip(self, step: int) -> None:
        def flip() -> None:
            path = self.persist / "one" / f"global_step{step}" / "pp0.dp1.tp0.arena"
            data = bytearray(path.read_bytes())
            with Arena.open(path, STORAGE_KEY) as arena:
                entries = arena.header().entries
                block = next(e for e in entries if e.key.section is Section.REPLICATED)
                data[data.index(bytes(arena.read_block(block))) + 99] ^= 4
            path.write_bytes(data)

        self.attack(flip)


def main(root: Path) -> dict[str, Any]:
    disk_job.Lives = Stored  # type: ignore[misc]
    lives = Stored(root, "stored")
    stored = str(lives.persist / "one")
    out: dict[str, Any] = {}
    losses = disk_job.first_life(lives)
    out["newest"] = disk_job.goes_on(lives, losses)
    with lives.life() as (engine, (out["memory"], _)):
        path, _ = engine.load_checkpoint(stored, tag="global_step4")
        out["back"] = [path.removeprefix(stored), engine.global_steps]
        out["equal"] = disk_job.train(engine, 10) == losses[4:]
        lives.flip(8)
        weights = [p.detach().clone() for p in engine.module.parameters()]
        for name, options in (("damaged", {"tag": "global_step8"}), ("base", {"load_module_only": True})):
            try:
                engine.load_checkpoint(stored, **options)
            except OSError as error:
                out[name] = [type(error).__name__, str(error), engine.global_steps]
        out["untouched"] = all(map(torch.equal, weights, engine.module.parameters()))
    lives.lose_memory("one")
    with lives.life(load={"tag": None}) as (_, (out["older"], _)):
        pass
    lives.lose_memory("one")
    lives.flip(4)
    with lives.life() as (_, out["all_damaged"]):
        return out


if __name__ == "__main__":
    be_a_rank(main)
