"""P12: a wrong or insufficient set-up is told before its second step, with what to write; in words, not by a
traceback, and with an exit code that says so."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import reft
from tests.engine.ranks import be_a_rank, run_ranks
from tests.unknown_state import Forgetful, Secretive
from tests.versions import Versions

pytestmark = pytest.mark.integration


WIDTH, STEPS = 8, 2
VERSIONS = Versions()


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[int, str]] = []
        self.engine: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        step = 0 if self.engine is None else int(self.engine.global_steps)
        self.lines.append((step, record.getMessage()))


HEARD = Heard()


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Place:
    def __init__(self, root: Path, name: str, strict: bool = False) -> None:
        self.name = name
        self.strict = strict
        self.memory = root / name / f"memory{os.environ['RANK']}"
        self.checkpoints = root / name / "checkpoints"

    def block(self, **options: Any) -> dict[str, Any]:
        where = {"job_id": self.name, "memory_dir": str(self.memory)}
        return {"enabled": True, "strict": self.strict, **where, **options}


def make(block: dict[str, Any] | None, model: nn.Module | None = None, **options: Any) -> Any:
    """An engine; ``options`` are parts of the configuration, or arguments of ``deepspeed.initialize``."""
    torch.manual_seed(7)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
        **{name: value for name, value in options.items() if isinstance(value, dict)},
    }
    arguments = {name: value for name, value in options.items() if not isinstance(value, dict)}
    if "optimizer" in arguments:
        del config["optimizer"]
    if block is not None:
        config["reft"] = block
    model = model or nn.Linear(WIDTH, WIDTH)
    if "optimizer" in config:
        arguments["model_parameters"] = model.parameters()
    engine = reft.initialize(model=model, config=config, **arguments)[0]
    HEARD.engine = engine
    return engine


def pipeline(block: dict[str, Any], stages: int = 2) -> Any:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return make(block, PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss))


def step(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(batch).square().mean())
    engine.step()


def train(
    engine: Any, data: Iterable[torch.Tensor] = itertools.repeat(torch.ones(2, WIDTH))
) -> None:
    for batch in data:
        step(engine, batch)
        VERSIONS.wait(engine.global_steps - 1)
        if engine.global_steps == STEPS:
            break


def resumed(place: Place, model: nn.Module | None = None, **block: Any) -> Any:
    engine = make(place.block(**block), model)
    reft.resume(engine)
    return engine


def pipeline_with(place: Place, data: Any, **block: Any) -> None:
    engine = pipeline(place.block(**block))
    reft.resume(engine)
    while engine.global_steps < STEPS:
        engine.train_batch(data)
        VERSIONS.wait(engine.global_steps - 1)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(64, WIDTH)), batch_size=2, shuffle=True, **options)


def lived(place: Place, **changes: Any) -> None:
    engine = make(place.block(), **changes)
    engine.load_checkpoint(str(place.checkpoints))
    train(engine)
    reft.attach(engine).close()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(2, WIDTH), torch.zeros(2, WIDTH)


def pipeline_restarted(place: Place) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    pipeline_with(place, batches())


def optimizer_with_secrets(place: Place) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    make(place.block(), model, optimizer=Secretive(model.parameters(), lr=0.1))


def experts(place: Place) -> None:
    from deepspeed.moe.layer import MoE

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, k=1)

    make(place.block(), Model())


def two_engines(place: Place) -> None:
    make(place.block())
    first = HEARD.engine
    try:
        make(place.block())
    finally:
        reft.attach(first).close()


def trainer_that_is_not_resumable(place: Place) -> None:
    sys.modules["transformers.trainer"] = ModuleType("transformers.trainer")
    try:
        train(make(place.block()))
    finally:
        del sys.modules["transformers.trainer"]


def without_the_launcher(place: Place) -> None:
    os.environ.pop("REFT_LAUNCHER_PID", None)
    train(resumed(place))


def attached_with_other_settings(place: Place) -> None:
    engine = make(place.block())
    reft.attach(engine, config={"enabled": True, "tolerance": 2})
    reft.resume(engine)
    train(engine)


def only_base_weights(place: Place) -> None:
    engine = make(place.block())
    engine.save_checkpoint(str(place.checkpoints))
    engine.load_checkpoint(str(place.checkpoints), load_module_only=True)
    train(engine)


def always_one_tag(place: Place) -> None:
    engine = make(place.block())
    engine.save_checkpoint(str(place.checkpoints), tag="base")
    engine.load_checkpoint(str(place.checkpoints), tag="base")
    train(engine)


def restarted_without_load(place: Place) -> None:
    lived(place)
    train(make(place.block()))


def other_learning_rate(place: Place) -> None:
    lived(place)
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}
    reft.resume(make(place.block(), optimizer=optimizer))


def other_model(place: Place) -> None:
    lived(place)
    resumed(place, nn.Linear(WIDTH, WIDTH, bias=False))


def other_arguments(place: Place) -> None:
    before = sys.argv
    try:
        sys.argv = [before[0], "--corpus", "english", "--steps", "5"]
        lived(place)
        sys.argv = [before[0], "--corpus", "german", "--steps", "9"]
        resumed(place)
    finally:
        sys.argv = before


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(64, WIDTH))


class Shards:
    """Like webdataset's: no DataLoader, and no end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return batches()


def nodes_may_change_and_the_order_is_a_replicas(place: Place) -> None:
    os.environ["REFT_NODES"] = "1:2"
    engine = resumed(place)
    train(engine, (batch for (batch,) in reft.resumable(loader())))


def resumable_of_a_list(place: Place) -> None:
    make(place.block())
    reft.resumable([torch.ones(2, WIDTH)])


def client_state_that_cannot_be_kept(place: Place) -> None:
    engine = make(place.block())
    reft.attach(engine, client_state=lambda: {"file": object()})
    reft.resume(engine)
    train(engine)


def everybody_on_one_node(place: Place) -> None:
    os.environ["REFT_NODE_ID"], os.environ["LOCAL_RANK"] = "node", os.environ["RANK"]
    shared = place.memory.parent / "memory"
    make({**place.block(), "memory_dir": str(shared)})


NAMED: tuple[Callable[[Place], object], ...] = (
    *(optimizer_with_secrets, two_engines, trainer_that_is_not_resumable, without_the_launcher),
    *(attached_with_other_settings, only_base_weights, always_one_tag, restarted_without_load),
    *(
        other_learning_rate,
        other_model,
        other_arguments,
        nodes_may_change_and_the_order_is_a_replicas,
    ),
    *(resumable_of_a_list, client_state_that_cannot_be_kept, everybody_on_one_node, experts),
)
SETUPS: dict[str, Callable[[Place], object]] = {
    **{setup.__name__: setup for setup in NAMED},
    "zero_3_autocast": lambda at: make(
        at.block(),
        zero_optimization={"stage": 3},
        torch_autocast={"enabled": True, "dtype": "bfloat16"},
    ),
    "scheduler_without_state": lambda at: make(at.block(), lr_scheduler=Forgetful),
    "no_optimizer": lambda at: make(at.block(), optimizer=None),
    "attached_but_not_enabled": lambda at: reft.attach(make(None), config={"enabled": False}),
    "unknown_key": lambda at: make(at.block(protecton="arc")),
    "checkpoints_without_a_place": lambda at: make(at.block(persist={"interval_steps": 5})),
    "no_room_for_parities": lambda at: make(at.block(protection="rs:2")),
    "one_memory_for_two_nodes": lambda at: make(
        {**at.block(), "memory_dir": str(at.memory.parent / "shared")}
    ),
    "two_names": lambda at: make({**at.block(), "job_id": f"name{os.environ['RANK']}"}),
    "no_load": lambda at: train(make(at.block())),
    "loader_with_workers": lambda at: train(resumed(at), (b for (b,) in loader(num_workers=1))),
    "loader_of_a_stream": lambda at: train(resumed(at), DataLoader(Stream(), batch_size=2)),
    "own_order": lambda at: train(
        resumed(at), map(torch.ones(64, WIDTH).__getitem__, torch.randperm(64).split(2))
    ),
    "module_with_extra_state": lambda at: train(resumed(at, Counting(WIDTH, WIDTH))),
    "too_little_memory": lambda at: train(resumed(at, memory_limit_bytes=2**16)),
    "no_place_for_checkpoints": lambda at: make(
        at.block(persist={"dir": str(at.checkpoints / "not" / "there")})
    ),
    "more_losses_than_nodes": lambda at: make(at.block(tolerance=2)),
    "auto_for_more_losses_than_nodes": lambda at: make(at.block(protection="auto", tolerance=2)),
    "no_protection": lambda at: make(at.block(protection="none")),
    # DeepSpeed's groups are a pipeline's from here on.
    "pipeline_over_two_nodes": lambda at: pipeline(at.block()),
    "pipeline_allowed_to_be_unprotected": lambda at: pipeline_with(
        at, batches(), allow_unprotected=True
    ),
    "pipeline_restarted": pipeline_restarted,
    "pipeline_with_a_list": lambda at: pipeline_with(
        at, iter([next(batches())] * STEPS), allow_unprotected=True
    ),
    "pipeline_with_a_generator": lambda at: pipeline_with(at, batches(), allow_unprotected=True),
    "pipeline_with_shards": lambda at: pipeline_with(
        at, RepeatingLoader(Shards()), allow_unprotected=True
    ),
}


def tried(name: str, root: Path, *, strict: bool = False) -> dict[str, Any]:
    HEARD.lines.clear()
    HEARD.engine = None
    environment = dict(os.environ)
    if strict:
        # What no launcher starts is warned of before all others.
        os.environ["REFT_LAUNCHER_PID"] = "1"
    out: dict[str, Any] = {"error": None, "code": 0}
    try:
        SETUPS[name](Place(root, name + "-strict" * strict, strict))
    except reft.ReftError as error:
        out["error"], out["code"] = str(error), exit_code(error)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    out["steps"] = 0 if HEARD.engine is None else int(HEARD.engine.global_steps)
    out["heard"] = list(HEARD.lines)
    if HEARD.engine is not None:
        with contextlib.suppress(reft.ConfigError):  # an engine that reft was never attached to
            reft.attach(HEARD.engine).close()
    if out["error"] is None and not strict:
        out["strict"] = tried(name, root, strict=True)
    return out


def exit_code(error: reft.ReftError) -> int:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 1


def main(root: Path) -> dict[str, Any]:
    os.environ["REFT_EVENTS"] = str(root / "events")
    logging.getLogger("reft").addHandler(HEARD)
    return {name: tried(name, root) for name in SETUPS}


START, STEP_1 = 0, 1

REFUSED = {
    "zero_3_autocast": ('write "stage3_param_persistence_threshold": 0',),
    "experts": ("mixture-of-experts layers", "disable reft for this model"),
    "optimizer_with_secrets": ("Secretive with a state_dict of its own",),
    "scheduler_without_state": ("Forgetful has no state_dict", "add them"),
    "no_optimizer": ("give deepspeed.initialize",),
    "two_engines": ("a second engine asks for reft",),
    "attached_but_not_enabled": ('write "reft": {"enabled": true}',),
    "unknown_key": ('did you mean "protection"?',),
    "checkpoints_without_a_place": ('needs "dir"',),
    "no_room_for_parities": ("rs:2",),
    "two_names": ("name0, name1", "--job-id NAME"),
    "restarted_without_load": ("holds step 2", "reft.resume(engine)", "The memory is kept"),
    "other_learning_rate": ("config.optimizer.params.lr: was 0.01, is 0.5", '"accept_changes"'),
    "other_model": ("2 parameters of 72 numbers", "1 parameters of 64 numbers", "--job-id NAME"),
    "other_arguments": ('arguments.corpus: was "english", is "german"', "--job-id NAME"),
    "resumable_of_a_list": ("expected a torch.utils.data.DataLoader", "client_state"),
    "pipeline_over_two_nodes": ("data-parallel degree of 1", '"allow_unprotected": true'),
    "one_memory_for_two_nodes": ("ranks 0 and 1 have the same memory", "REFT_MEMORY_DIR"),
    "more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
    "auto_for_more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
}
"""Set-ups that are not started, and what their error says."""
WARNED = {
    "no_load": (START, "reft.resume(engine)"),
    "trainer_that_is_not_resumable": (START, "Write trainer = reft.hf.resumable(trainer)"),
    "without_the_launcher": (START, "`reft launch` did not start this job"),
    "attached_with_other_settings": (START, "reft.attach was given a config"),
    "only_base_weights": (START, "loaded base weights only"),
    "always_one_tag": (START, "After every failure the job would go back to that checkpoint"),
    "loader_with_workers": (STEP_1, "RandomSampler, num_workers=1"),
    "loader_of_a_stream": (STEP_1, "__main__.Stream of None"),
    "nodes_may_change_and_the_order_is_a_replicas": (
        STEP_1,
        "the number of nodes may change (--nnodes 1:2), and with another data-parallel degree",
    ),
    "pipeline_with_a_generator": (STEP_1, "(generator batches). After a failure"),
    "pipeline_with_shards": (STEP_1, "(RepeatingLoader over __main__.Shards). After a failure"),
    "own_order": (STEP_1, "the position in the data is not known"),
    "client_state_that_cannot_be_kept": (STEP_1, "the state of step 1 cannot be captured"),
    "module_with_extra_state": (STEP_1, "register it as a buffer, or return it from client_state"),
    "too_little_memory": (STEP_1, "raise the limit"),
    "no_place_for_checkpoints": (START, "checkpoints cannot be written to persist.dir"),
    "pipeline_with_a_list": (STEP_1, "RepeatingLoader"),
    "pipeline_allowed_to_be_unprotected": (
        START,
        "TOLERANCE IS 0: with a data-parallel degree of 1",
    ),
    "pipeline_restarted": (START, "TOLERANCE IS 0: with a data-parallel degree of 1"),
    "no_protection": (START, 'TOLERANCE IS 0: the protection is "none"'),
    "everybody_on_one_node": (START, "TOLERANCE IS 0: all ranks share a node with their copies"),
}
"""Set-ups that train, and what is said until which step."""
STRICT_GOES_ON = {
    "pipeline_allowed_to_be_unprotected": "the user has written that it may be",
    "pipeline_restarted": "a job that restarts by itself goes on",
}
"""Set-ups whose warning stays one under ``"strict": true``."""
STRICT_SAYS = {
    "client_state_that_cannot_be_kept": "the version of step 1 could not be taken: the state could not be captured",
    "module_with_extra_state": "the version of step 1 could not be taken",
    "too_little_memory": "the version of step 1 could not be taken",
}
"""What it says where that is not the warning's own text."""
STRICT_ENDING = 'says "strict": true'


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("setups"))


@pytest.mark.parametrize("name", REFUSED)
def test_p12_refused_on_all_ranks_before_the_first_step(
    results: list[dict[str, Any]], name: str
) -> None:
    for rank in results:
        found = rank[name]
        assert found["error"] is not None, found
        for text in REFUSED[name]:
            assert text in found["error"]
        assert (found["code"], found["steps"]) == (2, 0)


@pytest.mark.parametrize("name", WARNED)
def test_p12_warned_of_in_time(results: list[dict[str, Any]], name: str) -> None:
    found = results[0][name]
    step, text = WARNED[name]
    assert found["error"] is None
    assert [at for at, line in found["heard"] if text in line and at <= step], found["heard"]


@pytest.mark.parametrize("name", WARNED)
def test_p12_strict_makes_an_error_of_every_warning(
    results: list[dict[str, Any]], name: str
) -> None:
    step, text = WARNED[name]
    for rank in results:
        found = rank[name]["strict"]
        error = found["error"] or ""
        if name in STRICT_GOES_ON:
            assert text not in error
            continue
        assert STRICT_SAYS.get(name, text) in error, found
        assert STRICT_ENDING in error
        assert (found["code"], found["steps"]) == (2, step)


def test_every_setup_is_judged(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == {*REFUSED, *WARNED}


if __name__ == "__main__":
    be_a_rank(main)
