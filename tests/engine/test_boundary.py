"""P2, P8: which host state a step begins with, whatever the script does between two steps.

Each script is run undisturbed, and again from every version that was taken of it. All that it reads and draws from
there on has to be the same.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import reft
from reft.data.position import DataPosition
from reft.data.resumable import LOADERS
from reft.engine.boundary import StepBoundary
from reft.state.blob import capture_rng, restore_rng

STEPS, SAMPLES, BATCH = 13, 12, 3


class Engine:
    training = True
    micro_batches = 1

    def gradient_accumulation_steps(self) -> int:
        return self.micro_batches


class EndedError(Exception):
    pass


class Job:
    """A plain engine under reft's care, without tensors: what a session does where a step begins and ends."""

    def __init__(self, version: dict[str, Any] | None = None, micro_batches: int = 1) -> None:
        torch.manual_seed(3)
        self.engine = Engine()
        self.engine.micro_batches = micro_batches
        self.step = 0 if version is None else version["step"]
        self.counted = 0  # by the script, after each step
        self.versions: list[dict[str, Any]] = []
        self.seen: list[tuple[int, Any, float]] = []
        self.client_state: Callable[[], Any] = lambda: None
        self.restored_client = None if version is None else version["client"]
        self._version = version
        self._stepped = False
        self._micro = 0

    def start(self) -> None:
        """``reft.resume(engine)``."""
        self.data = DataPosition(self.engine)
        self.data.boundary = self._boundary = StepBoundary(self._capture, repeats_draws=True)
        if self._version is not None:
            self.counted = self._version["counted"]
            restore_rng(self._version["rng"])
            self.data.restore(self._version["data"], self._version["rng"])

    def _capture(self, rng: dict[str, Any] | None) -> Any:
        state: dict[str, Any] = {
            "rng": rng or capture_rng(),
            "data": self.data.state(),
            "counted": self.counted,
        }
        state["client"] = copy.deepcopy(self.client_state())
        return lambda: state

    def train(self, batch: Any) -> None:
        if self._stepped:
            self._stepped = False
            self.versions.append(
                {"step": self.step, **self._boundary.take(self.data.read_to_train())()}
            )
        self.data.forward(training=True)
        self.data.trains()
        self.seen.append((self.step, batch.tolist(), float(torch.rand(()))))  # dropout
        self._micro += 1
        if self._micro % self.engine.micro_batches:
            return
        self.step += 1
        self._stepped = True
        self._boundary.step_ended()
        if self.step == STEPS:
            raise EndedError

    def begin_step(self) -> None:
        if self.seen:
            self.data.mark()
        elif self._version is not None:
            restore_rng(self._version["rng"])

    def evaluate(self, loader: Any, *, module: bool = False) -> None:
        self.engine.training = False
        for batch in loader:
            if not module:
                self.data.forward(training=False)
            self.seen.append((-self.step, batch.tolist(), float(torch.rand(()))))
        self.engine.training = True
        self.data.mode_set()


class Noisy(Dataset[Any]):
    """Reading a sample draws from the generator that training uses, as augmentations do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float(torch.rand(()))])


def loader_of(kind: str = "", data: Any = None) -> DataLoader[Any]:
    data = range(SAMPLES) if data is None else data
    if kind == "own generator":
        return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "sampler's generator":
        return DataLoader(
            data, BATCH, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5))
        )
    return DataLoader(data, BATCH, shuffle=True)


def epochs(job: Job, kind: str = "") -> None:
    loader = reft.resumable(loader_of(kind, Noisy() if kind == "noisy" else None))
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.train(batch)


def epochs_with_evaluation(job: Job, *, module: bool = False) -> None:
    loader, held_out = reft.resumable(loader_of()), DataLoader(range(4), 2, shuffle=True)
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.train(batch)
        job.evaluate(held_out, module=module)
        torch.rand(2)


def evaluation_after_steps(job: Job) -> None:
    loader, held_out = reft.resumable(loader_of()), DataLoader(range(4), 2, shuffle=True)
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.train(batch)
            job.counted += 1
            if job.step % 2 == 0:
                job.evaluate(held_out)
            assert job.counted == job.step


def evaluation_of_training_data(job: Job) -> None:
    """After each epoch, in a pass of the loader that training reads."""
    made = loader_of()
    loader = reft.resumable(made)
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.train(batch)
        job.evaluate(made)


def evaluation_before_steps(job: Job) -> None:
    """After the batch was read: a resumed script makes this evaluation again."""
    loader, held_out = reft.resumable(loader_of()), DataLoader(range(4), 2, shuffle=True)
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            if job.step % 3 == 1:
                job.evaluate(held_out)
            job.train(batch)


def mode_set_after_reading(job: Job) -> None:
    """The engine is still in evaluation mode when the next batch is read."""
    loader, held_out = reft.resumable(loader_of()), DataLoader(range(4), 2, shuffle=True)
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.engine.training = True
            job.data.mode_set()
            job.train(batch)
            job.evaluate(held_out)
            job.engine.training = False


def epochs_cut_off(job: Job) -> None:
    loader = reft.resumable(loader_of("sampler's generator"))
    job.start()
    while True:
        for number, batch in enumerate(loader):
            if number == 2:
                break
            job.train(batch)


def one_batch_of_each_pass(job: Job) -> None:
    loader = reft.resumable(loader_of())
    job.start()
    while True:
        job.train(next(iter(loader)))


def looks_between_steps(job: Job) -> None:
    loader = reft.resumable(loader_of())
    job.start()
    for _ in range(loader.epoch, 99):
        for batch in loader:
            job.train(batch)
            if job.step % 4 == 2:
                next(iter(loader))


def micro_batches_at_once(job: Job) -> None:
    """As Hugging Face's Trainer does: all micro-batches of a step are read before the first is trained on."""
    loader = reft.resumable(loader_of())
    job.start()
    for _ in range(loader.epoch, 99):
        batches = iter(loader)
        while group := [batch for _, batch in zip(range(2), batches, strict=False)]:
            for batch in group:
                job.train(batch)


def no_loader(job: Job) -> None:
    job.start()
    while True:
        job.train(torch.rand(2))
        job.counted += 1
        assert job.counted == job.step


def no_loader_and_evaluation(job: Job) -> None:
    held_out = DataLoader(range(4), 2, shuffle=True)
    job.start()
    while True:
        job.train(torch.rand(2))
        if job.step % 3 == 0:
            job.evaluate(held_out)


def marked(job: Job) -> None:
    """A stream whose position moves before the forward pass; what the script draws while it sets up is undone."""
    job.start()
    torch.rand(job.step + 1)
    while True:
        job.begin_step()
        batch = torch.rand(2) + job.counted
        job.counted += 1
        job.evaluate(DataLoader(range(2), 1, shuffle=True))
        job.train(batch)


def stateful(job: Job) -> None:
    """torchdata's loader, whose state the script keeps itself."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(range(SAMPLES), BATCH, shuffle=True)  # type: ignore[arg-type]
    job.start()
    job.client_state = loader.state_dict
    if job.restored_client is not None:
        loader.load_state_dict(job.restored_client)
    while True:
        for batch in loader:
            job.train(batch)


SCRIPTS: dict[str, Callable[[Job], None]] = {
    "epochs": epochs,
    "epochs, own generator": lambda job: epochs(job, "own generator"),
    "epochs, generator of the sampler": lambda job: epochs(job, "sampler's generator"),
    "epochs, reading draws": lambda job: epochs(job, "noisy"),
    "evaluation after epochs": epochs_with_evaluation,
    "evaluation after epochs, by the module": lambda job: epochs_with_evaluation(job, module=True),
    "evaluation after steps": evaluation_after_steps,
    "evaluation before steps": evaluation_before_steps,
    "evaluation of the training data": evaluation_of_training_data,
    "mode set after reading": mode_set_after_reading,
    "one batch of each pass": one_batch_of_each_pass,
    "looks between steps": looks_between_steps,
    "micro-batches read at once": micro_batches_at_once,
    "no loader": no_loader,
    "no loader, and evaluation": no_loader_and_evaluation,
    "no loader, and the script says where steps begin": marked,
}
if importlib.util.find_spec("torchdata") is not None:
    SCRIPTS["stateful loader"] = stateful
MICRO_BATCHES = {"micro-batches read at once": 2}


@pytest.fixture(autouse=True)
def fresh_loaders() -> Iterator[None]:
    yield
    LOADERS._named.clear()
    LOADERS._waiting.clear()


def lived(script: Callable[[Job], None], job: Job) -> Job:
    LOADERS._named.clear()
    LOADERS._waiting.clear()
    with pytest.raises(EndedError):
        script(job)
    job.data.close()
    return job


@pytest.mark.parametrize("name", SCRIPTS)
def test_p2_p8_a_script_goes_on_as_undisturbed_from_every_version(name: str) -> None:
    script, micro_batches = SCRIPTS[name], MICRO_BATCHES.get(name, 1)
    whole = lived(script, Job(micro_batches=micro_batches))
    assert [version["step"] for version in whole.versions] == [*range(1, STEPS)]
    for version in whole.versions:
        resumed = lived(script, Job(version, micro_batches))
        rest = _from(whole, version["step"])
        found = _from(resumed, version["step"])
        assert found == rest, f"from the version of step {version['step']}"


def _from(job: Job, step: int) -> list[Any]:
    """What training saw from that step on, with the evaluations among it."""
    return job.seen[next(i for i, seen in enumerate(job.seen) if seen[0] == step) :]


def test_p8_p12_epochs_that_the_script_cuts_off_by_a_count_of_its_own_are_reported() -> None:
    whole = lived(epochs_cut_off, Job())
    assert "3 of 4 batches" in (whole.data.found_on_the_way() or "")
    for version in whole.versions[1::2]:  # between two passes nothing is counted
        assert _from(lived(epochs_cut_off, Job(version)), version["step"]) == _from(
            whole, version["step"]
        )


def test_p12_a_script_that_keeps_its_batches_is_told_when_it_no_longer_reads() -> None:
    job = Job()
    told: list[int] = []

    def cycle(job: Job) -> None:
        loader = reft.resumable(loader_of())
        job.start()
        for batch in itertools.cycle(loader):
            job.train(batch)
            if job.data.found_on_the_way() is not None:
                told.append(job.step)

    lived(cycle, job)
    assert told == [SAMPLES // BATCH + 1]


def test_a_state_that_cannot_be_taken_aside_is_captured_where_the_step_begins() -> None:
    calls: list[Any] = []

    def capture(rng: dict[str, Any] | None) -> Any:
        calls.append(rng)
        if len(calls) == 1:
            raise RuntimeError("no")
        return lambda: b"captured"

    boundary = StepBoundary(capture, repeats_draws=True)
    boundary.step_ended()
    boundary.begins_pass()
    assert boundary.take(None)() == b"captured"
    assert calls == [None, None]  # the draws of the loader are in it, as far as they can be


def test_p2_an_evaluation_is_not_where_a_step_without_a_loader_begins() -> None:
    """A version of before the evaluation would repeat its random draws in the step."""
    captured = iter([b"before the evaluation", b"after the evaluation"])

    def capture(rng: dict[str, Any] | None) -> Any:
        state = next(captured)
        return lambda: state

    boundary, held_out = StepBoundary(capture, repeats_draws=False), SimpleNamespace()
    boundary.step_ended()
    boundary.before_read(held_out)  # type: ignore[arg-type]
    boundary.evaluated(held_out)  # type: ignore[arg-type]
    assert boundary.take(None)() == b"after the evaluation"
