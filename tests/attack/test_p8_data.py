"""Data and random states come back: every micro-step behind a resumption is the undisturbed run's (P8), and
what cannot come back is said at the first step (P12)."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import reft
from tests.attack.test_p3_loads import Heard
from tests.commands import command
from tests.engine.ranks import be_a_rank, run_ranks

pytestmark = pytest.mark.integration


WIDTH, SAMPLES, MICRO_BATCH, GAS = 8, 40, 4, 2
BATCHES = SAMPLES // MICRO_BATCH  # Batches of a pass: five steps
STOPS = (7, 10)  # steps after which a life ends: within the second pass, and with it
STEPS = 13
Losses = list[str]


class Samples(Dataset):  # type: ignore[type-arg]
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
    def __init__(
        self, block: dict[str, Any] | None, until: int, save_dir: Path, save_at: int | None = None
    ) -> None:
        self.block, self.until, self.save_dir, self.save_at = block, until, save_dir, save_at
        self.losses: Losses = []
        self.loaded = 0
        self.samples: Samples | None = None

    def plain(self) -> Any:
        return self._make(nn.Sequential, nn.Linear, nn.Dropout)

    def pipeline(self, stages: int = 1, **options: Any) -> Any:
        def staged(*layers: LayerSpec) -> PipelineModule:
            loss = nn.functional.mse_loss
            return PipelineModule(
                [*layers], num_stages=stages, loss_fn=loss, partition_method="uniform"
            )

        return self._make(
            staged, partial(LayerSpec, nn.Linear), partial(LayerSpec, nn.Dropout), **options
        )

    def _make(self, whole: Any, linear: Any, dropout: Any, **options: Any) -> Any:
        torch.manual_seed(5)
        random.seed(5)
        model = whole(linear(WIDTH, 16), dropout(0.2), linear(16, WIDTH))
        config = dict(CONFIG) if self.block is None else {**CONFIG, "reft": self.block}
        make = deepspeed.initialize if self.block is None else reft.initialize
        given = {"model": model, "model_parameters": model.parameters(), "config": config}
        self.engine = make(**given, **options)[0]
        return self.engine

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

    def read(self, data: Any) -> None:
        while not self.over:
            if hasattr(self.engine, "grid"):
                self._note(self.engine.train_batch(*([] if data is None else [data])))
            else:
                self.micro_step(next(data))

    def passes(
        self, loader: Any, *, skip: int = 0, early: Any = None, evaluation: Any = ()
    ) -> None:
        """Train pass by pass. ``skip``: batches of the first pass that are read and not trained on. ``early``: an
        iterator for the first pass that was made before the engine loaded. ``evaluation``: a loader that is
        read between passes; it draws, and is no training data."""
        while not self.over:
            for index, batch in enumerate(early or loader):
                if index >= skip:
                    self.micro_step(batch)
                if self.over:
                    return
            self.engine.eval()
            for x, _ in evaluation:
                self.engine(x)
            self.engine.train()
            early, skip = None, 0

    def _note(self, loss: Any) -> None:
        self.losses.append(float(loss).hex())
        if self.samples is not None:
            self.loaded = self.loaded or self.samples.loaded
        if self.save_at == self.engine.global_steps and len(self.losses) % GAS == 0:
            self.engine.save_checkpoint(str(self.save_dir))


Script = Callable[[Life], None]


# -- plain engine: the script goes to where it was by itself -------------------------------------------


def torchs(
    samples: Dataset[Any] | None = None, batch_size: int = MICRO_BATCH, **options: Any
) -> Any:
    return DataLoader(samples or Samples(), batch_size=batch_size, **{"shuffle": True, **options})


def skips(life: Life, *, iterate_first: bool = False, **options: Any) -> None:
    engine = life.plain()
    loader = torchs(**options)
    early = iter(loader) if iterate_first else None
    life.load()
    life.passes(loader, skip=int(engine.global_steps) * GAS % BATCHES, early=early)


def skips_all(life: Life) -> None:
    """An endless loader, wound forward from the very beginning, in the script's own terms."""
    engine = life.plain()
    life.load()
    data = iter(RepeatingLoader(torchs()))
    for _ in range(int(engine.global_steps) * GAS):
        next(data)
    life.read(data)


def prepared_skips(life: Life) -> None:
    engine = life.plain()
    loader = prepare(longer(noise=False))
    life.load()
    passes, skip = divmod(int(engine.global_steps) * GAS, len(loader))
    for _ in range(passes):
        for _ in loader:
            pass
    life.passes(loader, skip=skip)


def draws_without_a_loader(life: Life) -> None:
    engine = life.plain()
    life.load()
    while not life.over:
        x = torch.randn(MICRO_BATCH, WIDTH) + random.random()
        life.micro_step((x, x.flip(0)))
    assert engine.global_steps == life.until


# -- plain engine: reft goes there ------------------------------------------------------------------------


def resumable(life: Life) -> None:
    life.plain()
    life.samples = Samples()
    made = reft.resumable(torchs(life.samples))
    life.load()
    life.passes(made, evaluation=torchs(batch_size=2 * MICRO_BATCH))


def loader(life: Life) -> None:
    life.plain()
    made = reft.data.loader(Samples(), MICRO_BATCH, shuffle=True, seed=2, num_workers=2)
    life.load()
    evaluation = reft.data.loader(Samples(), 2 * MICRO_BATCH, shuffle=True, name="evaluation")
    life.passes(made, evaluation=evaluation)


def longer(**options: Any) -> Dataset[Any]:
    """15 batches: the first life ends before the last one of a pass, which is read already."""
    return Subset(Samples(**options), [*range(SAMPLES), *range(SAMPLES // 2)])


def prepare(samples: Dataset[Any], **options: Any) -> Any:
    """What Accelerate's prepare() makes of a loader: it reads a batch ahead."""
    from accelerate.data_loader import prepare_data_loader

    alone = {"num_processes": 1, "process_index": 0, "put_on_device": False}
    return prepare_data_loader(torchs(samples), **alone, **options)


def prepared(life: Life, *, seedable: bool) -> None:
    life.plain()
    loader = reft.resumable(prepare(longer(), use_seedable_sampler=seedable))
    life.load()
    life.passes(loader)


# -- pipelines ------------------------------------------------------------------------------------------


def repeating(life: Life, *, before: bool = False, reft_s: bool = False, workers: int = 0) -> None:
    life.samples = Samples(noise=not workers)

    def make() -> Any:
        if reft_s:
            return iter(RepeatingLoader(reft.data.loader(life.samples, MICRO_BATCH, shuffle=True)))
        return iter(RepeatingLoader(torchs(life.samples, num_workers=workers)))

    torch.manual_seed(11)
    data = make() if before else None
    life.pipeline()
    data = data or make()
    life.load()
    life.read(data)


def own_loader(life: Life) -> None:
    life.pipeline(training_data=Samples(noise=False))  # DeepSpeed reads in worker processes
    life.load()
    life.read(None)


SCRIPTS: dict[str, Script] = {
    "skips": skips,
    "skips_unshuffled": partial(skips, shuffle=False),
    "iterates_before_it_loads": partial(skips, iterate_first=True),
    "skips_all": skips_all,
    "draws_without_a_loader": draws_without_a_loader,
    "resumable": resumable,
    "loader": loader,
    "loader_repeating": partial(repeating, before=True, reft_s=True),
    "repeating": repeating,
    "repeating_workers": partial(repeating, workers=2),
    "repeating_made_before_the_engine": partial(repeating, before=True),
    "own_loader": own_loader,
}
if importlib.util.find_spec("accelerate") is not None:
    SCRIPTS |= {
        "prepared": partial(prepared, seedable=False),
        "prepared_seedable": partial(prepared, seedable=True),
        "prepared_skips": prepared_skips,
    }

# -- scripts that do not go back -----------------------------------------------------------------------


def starts_anew(life: Life) -> None:
    life.plain()
    life.load()
    life.passes(torchs())


def reads_ahead(life: Life, make: Callable[[], Any] = lambda: reft.resumable(torchs())) -> None:
    life.plain()
    loader = make()
    life.load()
    data = iter(RepeatingLoader(loader))
    batch = next(data)
    while not life.over:
        following = next(data)
        life.micro_step(batch)
        batch = following


UNKNOWN: dict[str, Script] = {
    "starts_anew": starts_anew,
    "reads_ahead": reads_ahead,
    "loader_read_ahead": partial(
        reads_ahead, make=lambda: reft.data.loader(Samples(), MICRO_BATCH)
    ),
}


def live(
    script: Script, block: dict[str, Any] | None, until: int, save_dir: Path, heard: Heard
) -> dict[str, Any]:
    heard.lines.clear()
    one = Life(block, until, save_dir)
    script(one)
    resumed = until - len(one.losses) // (1 if hasattr(one.engine, "grid") else GAS)
    if block is not None:
        reft.attach(one.engine).close(60)
    out = {"losses": one.losses, "from": resumed, "heard": list(heard.lines), "loaded": one.loaded}
    del one
    gc.collect()
    return out


def goes_back(root: Path, heard: Heard) -> dict[str, Any]:
    block = {"enabled": True, "job_id": "back", "memory_dir": str(root / "memory")}
    life = Life(block, 9, root / "back", save_at=4)
    life.pipeline()
    data = iter(RepeatingLoader(torchs()))
    life.load()
    life.read(data)
    first, life.losses, life.save_at = life.losses, [], None
    life.engine.load_checkpoint(str(root / "back"), tag="global_step4")
    life.read(data)
    reft.attach(life.engine).close()
    return {"first": first, "again": life.losses}


def goes_back_by_its_directory(root: Path) -> list[int]:
    """Steps to which loads without a tag take a training job whose newest version is on storage, too: from a
    directory with a checkpoint, as a Trainer loads its best model, and from one without."""
    memory, saved = root / "memory", root / "directory"
    block = {"enabled": True, "job_id": "directory", "memory_dir": str(memory)}
    first = Life(block, 9, saved, save_at=4)
    first.pipeline()
    data = iter(RepeatingLoader(torchs()))
    first.load()
    first.read(data)
    reft.attach(first.engine).close(60)
    store = root / "store"
    answer = command("persist", "--memory-dir", memory, "--job", "directory", "--out", store)
    assert answer.code == 0, answer
    again = Life({**block, "persist": {"dir": str(store)}}, 10, saved)
    engine = again.pipeline()
    again.load()
    assert int(engine.global_steps) == 9
    again.read(data)
    steps = []
    for directory in (saved, root / "empty"):
        engine.load_checkpoint(str(directory))
        steps.append(int(engine.global_steps))
    reft.attach(engine).close()
    return steps


def client_state(root: Path) -> dict[str, Any]:
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
        out[life] = [
            str(path).split(":", maxsplit=1)[0] if path else None,
            (client or {}).get("epoch"),
        ]
        mine |= {"epoch": 7}
        while not one.over:
            one.micro_step((torch.ones(MICRO_BATCH, WIDTH), torch.ones(MICRO_BATCH, WIDTH)))
        if life == "first":
            engine.save_checkpoint(str(root / "client"))
        reft.attach(engine).close(60)
        if life == "first":
            for arena in (memory / "client").glob("*.arena"):
                arena.unlink()
    return out


def main(root: Path) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger("reft").addHandler(heard)
    logging.getLogger("reft").setLevel(logging.INFO)
    out: dict[str, Any] = {}
    for name, script in (SCRIPTS | UNKNOWN).items():
        block = {"enabled": True, "job_id": name, "memory_dir": str(root / "memory")}
        undisturbed = live(script, None, STEPS, root / "none", heard)
        lives = [live(script, block, until, root / "none", heard) for until in (*STOPS, STEPS)]
        out[name] = {"undisturbed": undisturbed["losses"], "lives": lives}
    out["goes_back"] = goes_back(root, heard)
    out["goes_back_by_its_directory"] = goes_back_by_its_directory(root)
    out["client_state"] = client_state(root)
    return out


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("data"), world=1)[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_p8_every_micro_step_is_the_undisturbed_runs(result: dict, script: str) -> None:
    found = result[script]
    losses = [loss for life in found["lives"] for loss in life["losses"]]
    wrong = [
        at for at, (a, b) in enumerate(zip(losses, found["undisturbed"], strict=True)) if a != b
    ]
    assert wrong == [], f"{len(wrong)} of {len(losses)} differ"
    assert [life["from"] for life in found["lives"]] == [0, *STOPS]


@pytest.mark.parametrize("script", ["resumable", "repeating", "loader_repeating"])
def test_p8_nothing_that_was_taken_is_loaded_again(result: dict, script: str) -> None:
    lives = result[script]["lives"]
    assert lives[1]["loaded"] <= GAS * MICRO_BATCH, (
        "seven steps had been taken, four samples are a batch"
    )


@pytest.mark.parametrize(
    "script",
    ["resumable", "loader", "loader_repeating", "repeating", "repeating_workers", "own_loader"],
)
def test_p12_nothing_is_said_of_data_that_comes_back(result: dict, script: str) -> None:
    assert not [
        line for life in result[script]["lives"] for line in life["heard"] if "the data" in line
    ]


def test_p12_a_loop_over_a_loader_is_told_at_the_first_step_and_at_the_resumption(
    result: dict,
) -> None:
    first, second, _ = result["starts_anew"]["lives"]
    assert any("reft.resumable(loader)" in line for line in first["heard"])
    assert any("batch 4 of a pass" in line and "after batch 0" in line for line in second["heard"])


@pytest.mark.parametrize("script", ["reads_ahead", "loader_read_ahead"])
def test_p12_a_resumable_loader_that_is_read_ahead_is_told(result: dict, script: str) -> None:
    assert any("ahead of training" in line for line in result[script]["lives"][0]["heard"])


def test_a_script_that_went_there_by_itself_is_not_warned_when_it_resumes(result: dict) -> None:
    for life in result["skips"]["lives"][1:]:
        assert [line for line in life["heard"] if "of the undisturbed run" in line] == []


def test_p8_going_back_takes_the_data_back(result: dict) -> None:
    found = result["goes_back"]
    assert found["again"] == found["first"][4:]


def test_p3_a_training_job_goes_back_to_the_directory_that_the_script_names(result: dict) -> None:
    assert result["goes_back_by_its_directory"] == [4, 9]


def test_p8_attached_client_state_comes_back_from_disk_and_survives_a_death_before_the_next_commit(
    result: dict,
) -> None:
    found = result["client_state"]
    assert found["first"] == [None, None]
    assert found["from_disk"][1] == 7
    assert found["from_memory"] == ["memory", 7]


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    be_a_rank(main)
