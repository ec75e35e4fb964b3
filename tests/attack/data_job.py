"""One rank that trains from ordinary ``DataLoader``\\ s, is stopped anywhere in its data, and resumes.

Every script runs undisturbed and without reft first; then in lives that share their memory. The model has
dropout, the data set draws random numbers of its own: losses are equal only if every random state is.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import reft
from reft.engine.deepspeed import session_of
from reft.engine.install import avoid_build_at_start
from tests.attack.loads_job import Heard
from tests.engine.ranks import be_a_rank

avoid_build_at_start()

WIDTH, SAMPLES, MICRO_BATCH, GAS = 8, 40, 4, 2
BATCHES = SAMPLES // MICRO_BATCH  # Batches of a pass: five steps
STOPS = (7, 10)  # steps behind which a life ends: within the second pass, and with it
STEPS = 13
Losses = list[str]


class Samples(Dataset):  # type: ignore[type-arg]
    """Samples with noise from the global generator."""

    def __init__(self, noise: bool = True) -> None:
        self.values = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self.noise = noise
        self.loaded = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded += 1
        x = self.values[index]
        if self.noise:
            x = x + 0.1 * torch.randn(WIDTH) + 0.1 * random.random()
        return x, x.flip(0)


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": GAS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": None,
}


class Life:
    """What one process does: it starts, loads, trains up to a step, and is gone."""

    def __init__(
        self, block: dict[str, Any] | None, until: int, save_dir: Path, save_at: int | None = None
    ) -> None:
        self.block, self.until, self.save_dir, self.save_at = block, until, save_dir, save_at
        self.losses: Losses = []
        self.loaded = 0

    def initialize(self, model: nn.Module, **options: Any) -> Any:
        config = dict(CONFIG) if self.block is None else {**CONFIG, "reft": self.block}
        make = deepspeed.initialize if self.block is None else reft.initialize
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.engine = make(model=model, model_parameters=parameters, config=config, **options)[0]
        return self.engine

    def plain(self, **options: Any) -> Any:
        torch.manual_seed(5)
        random.seed(5)
        return self.initialize(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH)), **options
        )

    def pipeline(self, **options: Any) -> Any:
        torch.manual_seed(5)
        random.seed(5)
        layers = [
            LayerSpec(nn.Linear, WIDTH, 16),
            LayerSpec(nn.Dropout, 0.2),
            LayerSpec(nn.Linear, 16, WIDTH),
        ]
        return self.initialize(
            PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss), **options
        )

    def load(self) -> tuple[Any, Any]:
        return self.engine.load_checkpoint(str(self.save_dir))

    @property
    def over(self) -> bool:
        return int(self.engine.global_steps) >= self.until

    def micro_step(self, batch: Any) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.engine(x), y)
        self.engine.backward(loss)
        self.engine.step()
        self._note(loss)

    def batch(self, *iterator: Any) -> None:
        self._note(self.engine.train_batch(*iterator))

    def _note(self, loss: Any) -> None:
        self.losses.append(float(loss).hex())
        if self.save_at == self.engine.global_steps and len(self.losses) % GAS == 0:
            self.engine.save_checkpoint(str(self.save_dir))


Script = Callable[[Life], None]


# -- plain engine: the script goes to where it was by itself -------------------------------------------


def skips(life: Life, *, iterate_first: bool = False, shuffle: bool = True) -> None:
    engine = life.plain()
    loader = DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=shuffle)
    early = iter(loader) if iterate_first else None
    life.load()
    _, skip = divmod(int(engine.global_steps) * GAS, BATCHES)
    while not life.over:
        for index, batch in enumerate(early or loader):
            if index < skip:
                continue
            life.micro_step(batch)
            if life.over:
                return
        early, skip = None, 0


def skips_unshuffled(life: Life) -> None:
    skips(life, shuffle=False)


def iterates_before_it_loads(life: Life) -> None:
    skips(life, iterate_first=True)


def skips_all(life: Life) -> None:
    """An endless loader, wound forward from the very beginning, in the script's own terms."""
    engine = life.plain()
    life.load()
    data = iter(RepeatingLoader(DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=True)))
    for _ in range(int(engine.global_steps) * GAS):
        next(data)
    while not life.over:
        life.micro_step(next(data))


def draws_without_a_loader(life: Life) -> None:
    engine = life.plain()
    life.load()
    while not life.over:
        x = torch.randn(MICRO_BATCH, WIDTH) + random.random()
        life.micro_step((x, x.flip(0)))
    assert engine.global_steps == life.until


# -- plain engine: reft goes there ------------------------------------------------------------------------


def resumable(life: Life) -> None:
    engine = life.plain()
    samples = Samples()
    loader = reft.resumable(DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True))
    life.load()
    evaluation = DataLoader(Samples(), batch_size=2 * MICRO_BATCH, shuffle=True)
    for _ in range(loader.epoch, 100):
        for batch in loader:
            life.loaded = life.loaded or samples.loaded
            life.micro_step(batch)
            if life.over:
                return
        engine.eval()
        for x, _ in evaluation:  # draws, and is no training data
            engine(x)
        engine.train()


def loader(life: Life) -> None:
    """reft's own, with worker processes that draw numbers."""
    engine = life.plain()
    made = reft.data.loader(Samples(), MICRO_BATCH, shuffle=True, seed=2, num_workers=2)
    life.load()
    evaluation = reft.data.loader(Samples(), 2 * MICRO_BATCH, shuffle=True, name="evaluation")
    for _ in range(made.epoch, 100):
        for batch in made:
            life.micro_step(batch)
            if life.over:
                return
        engine.eval()
        for x, _ in evaluation:
            engine(x)
        engine.train()


def loader_repeating(life: Life) -> None:
    samples = Samples()
    data = iter(RepeatingLoader(reft.data.loader(samples, MICRO_BATCH, shuffle=True)))
    life.pipeline()
    life.load()
    while not life.over:
        life.batch(data)
        life.loaded = life.loaded or samples.loaded


# -- pipelines ------------------------------------------------------------------------------------------


def prepared(life: Life, *, seedable: bool = False) -> None:
    """What Accelerate's prepare() makes of a loader: it reads a batch ahead."""
    from accelerate.data_loader import prepare_data_loader

    life.plain()
    # 15 batches: the first life ends before the last one of a pass, which is read already.
    samples = Subset(Samples(), [*range(SAMPLES), *range(SAMPLES // 2)])
    made = DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True)
    options = {"num_processes": 1, "process_index": 0, "put_on_device": False}
    loader = reft.resumable(prepare_data_loader(made, use_seedable_sampler=seedable, **options))
    life.load()
    for _ in range(loader.epoch, 100):
        for batch in loader:
            life.micro_step(batch)
            if life.over:
                return


def prepared_seedable(life: Life) -> None:
    prepared(life, seedable=True)


def prepared_skips(life: Life) -> None:
    """The script goes to where it was by itself."""
    from accelerate.data_loader import prepare_data_loader

    engine = life.plain()
    samples = Subset(Samples(noise=False), [*range(SAMPLES), *range(SAMPLES // 2)])
    made = DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True)
    loader = prepare_data_loader(made, num_processes=1, process_index=0, put_on_device=False)
    life.load()
    passes, skip = divmod(int(engine.global_steps) * GAS, len(loader))
    for _ in range(passes):
        for _ in loader:
            pass
    while not life.over:
        for index, batch in enumerate(loader):
            if index < skip:
                continue
            life.micro_step(batch)
            if life.over:
                return
        skip = 0


def repeating(life: Life, *, workers: int = 0, before: bool = False) -> None:
    samples = Samples(noise=not workers)
    data = None
    if before:
        torch.manual_seed(11)
        data = iter(RepeatingLoader(DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True)))
    life.pipeline()
    if data is None:
        loader = DataLoader(samples, batch_size=MICRO_BATCH, shuffle=True, num_workers=workers)
        data = iter(RepeatingLoader(loader))
    life.load()
    while not life.over:
        life.batch(data)
        life.loaded = life.loaded or samples.loaded


def repeating_workers(life: Life) -> None:
    repeating(life, workers=2)


def repeating_made_before_the_engine(life: Life) -> None:
    repeating(life, before=True)


def own_loader(life: Life) -> None:
    samples = Samples(noise=False)  # DeepSpeed reads in worker processes
    life.pipeline(training_data=samples)
    life.load()
    while not life.over:
        life.batch()


SCRIPTS: tuple[Script, ...] = (
    skips,
    skips_unshuffled,
    iterates_before_it_loads,
    skips_all,
    draws_without_a_loader,
    resumable,
    loader,
    loader_repeating,
    repeating,
    repeating_workers,
    repeating_made_before_the_engine,
    own_loader,
)


if importlib.util.find_spec("accelerate") is not None:
    SCRIPTS += (prepared, prepared_seedable, prepared_skips)

# -- scripts that do not go back -----------------------------------------------------------------------


def starts_anew(life: Life) -> None:
    life.plain()
    life.load()
    loader = DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=True)
    while not life.over:
        for batch in loader:
            life.micro_step(batch)
            if life.over:
                return


def loader_read_ahead(life: Life) -> None:
    reads_ahead(life, lambda: reft.data.loader(Samples(), MICRO_BATCH, shuffle=True))


def reads_ahead(life: Life, make: Callable[[], Any] | None = None) -> None:
    """A resumable loader of which a batch is taken before the last one is trained on."""
    life.plain()
    torchs = DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=True)
    loader = reft.resumable(torchs) if make is None else make()
    life.load()
    data = iter(RepeatingLoader(loader))
    batch = next(data)
    while not life.over:
        following = next(data)
        life.micro_step(batch)
        batch = following


def mixes(life: Life) -> None:
    """Several loaders behind a generator: nobody can tell the position."""
    life.pipeline()
    life.load()
    loaders = [RepeatingLoader(DataLoader(Samples(), batch_size=MICRO_BATCH)) for _ in range(2)]

    def generate() -> Iterator[Any]:
        while True:
            yield from (next(loader) for loader in loaders)

    data = generate()
    while not life.over:
        life.batch(data)


def live(
    script: Script, block: dict[str, Any] | None, until: int, save_dir: Path, heard: Heard
) -> dict[str, Any]:
    heard.lines.clear()
    one = Life(block, until, save_dir)
    script(one)
    resumed = until - len(one.losses) // (1 if hasattr(one.engine, "grid") else GAS)
    if block is not None:
        session = session_of(one.engine)
        session.worker.drain(60)
        session.close()
    out = {"losses": one.losses, "from": resumed, "heard": list(heard.lines), "loaded": one.loaded}
    del one
    gc.collect()
    return out


def goes_back(root: Path, heard: Heard) -> dict[str, Any]:
    """A running pipeline job goes back to a checkpoint of its own: its data goes back with it."""
    block = {"enabled": True, "job_id": "back", "memory_dir": str(root / "memory")}
    life = Life(block, 9, root / "back", save_at=4)
    life.pipeline()
    data = iter(RepeatingLoader(DataLoader(Samples(), batch_size=MICRO_BATCH, shuffle=True)))
    life.load()
    while not life.over:
        life.batch(data)
    first, life.losses, life.save_at = life.losses, [], None
    life.engine.load_checkpoint(str(root / "back"), tag="global_step4")
    while not life.over:
        life.batch(data)
    session_of(life.engine).close()
    return {"first": first, "again": life.losses}


def client_state(root: Path) -> dict[str, Any]:
    """Attached client state goes through a checkpoint on disk, and through a death before the next commit."""
    memory = root / "memory"
    block = {"enabled": True, "job_id": "client", "memory_dir": str(memory)}
    out: dict[str, Any] = {}
    for life, until in (("first", 2), ("from_disk", 2), ("from_memory", 3)):
        torch.manual_seed(5)
        one = Life(block, until, root / "client")
        engine = one.plain()
        mine = {"epoch": 0}
        reft.attach(engine, client_state=lambda mine=mine: mine)
        path, client = one.load()
        out[life] = [str(path).split(":", maxsplit=1)[0] if path else None, (client or {}).get("epoch")]
        mine |= {"epoch": 7}
        while not one.over:
            one.micro_step((torch.ones(MICRO_BATCH, WIDTH), torch.ones(MICRO_BATCH, WIDTH)))
        if life == "first":
            engine.save_checkpoint(str(root / "client"))
        session_of(engine).worker.drain(60)
        session_of(engine).close()
        if life == "first":
            for arena in (memory / "client").glob("*.arena"):
                arena.unlink()
    return out


def main(root: Path) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger("reft").addHandler(heard)
    logging.getLogger("reft").setLevel(logging.INFO)
    out: dict[str, Any] = {}
    for script in (*SCRIPTS, starts_anew, reads_ahead, loader_read_ahead, mixes):
        name = script.__name__
        block = {"enabled": True, "job_id": name, "memory_dir": str(root / "memory")}
        undisturbed = live(script, None, STEPS, root / "none", heard)
        lives = [live(script, block, until, root / "none", heard) for until in (*STOPS, STEPS)]
        out[name] = {"undisturbed": undisturbed["losses"], "lives": lives}
    out["goes_back"] = goes_back(root, heard)
    out["client_state"] = client_state(root)
    out["not_patched"] = DataLoader.__iter__.__module__
    return out


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    be_a_rank(main)
