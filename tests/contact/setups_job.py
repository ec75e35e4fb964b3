"""Two ranks that try one wrong or insufficient set-up after the other, each up to its second step.

A set-up is a function of this module: it is given where to write, makes an engine and trains as its user would.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import reft
from reft.elastic.exits import EX_REFUSED, is_refusal
from reft.hook.cpu import avoid_build_at_start
from reft.hook.deepspeed import session_of
from tests.hook.ranks import be_a_rank

avoid_build_at_start()

WIDTH, STEPS = 8, 2


class Heard(logging.Handler):
    """Warnings of reft, and the step that the engine was at."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[int, str]] = []
        self.engine: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        step = 0 if self.engine is None else int(self.engine.global_steps)
        self.lines.append((step, record.getMessage()))


HEARD = Heard()


class Place:
    """Where a set-up keeps what."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.memory = root / name / f"memory{os.environ['RANK']}"
        self.checkpoints = root / name / "checkpoints"

    def block(self, **options: Any) -> dict[str, Any]:
        return {"enabled": True, "job_id": self.name, "memory_dir": str(self.memory), **options}


def make(block: dict[str, Any] | None, model: nn.Module | None = None, **options: Any) -> Any:
    """An engine; ``options`` take the place of the configuration's."""
    torch.manual_seed(7)
    arguments = {name: options.pop(name) for name in ("optimizer", "lr_scheduler") if name in options}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": None,
        **options,
    }
    config = {key: value for key, value in config.items() if value is not None} | {"steps_per_print": None}
    if block is not None:
        config["reft"] = block
    model = model or nn.Linear(WIDTH, WIDTH)
    if "optimizer" in config and not isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
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


def train(engine: Any) -> None:
    while engine.global_steps < STEPS:
        step(engine, torch.ones(2, WIDTH))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(2, WIDTH), torch.zeros(2, WIDTH)


# -- where the ranks are ---------------------------------------------------------------------------------


def pipeline_over_two_nodes(place: Place) -> None:
    pipeline(place.block())


def pipeline_allowed_to_be_unprotected(place: Place) -> None:
    engine = pipeline(place.block(allow_unprotected=True))
    engine.load_checkpoint(str(place.checkpoints))
    while engine.global_steps < STEPS:
        engine.train_batch(batches())


def more_losses_than_nodes(place: Place) -> None:
    make(place.block(tolerance=2))


def auto_for_more_losses_than_nodes(place: Place) -> None:
    make(place.block(protection="auto", tolerance=2))


def no_protection(place: Place) -> None:
    make(place.block(protection="none"))


def everybody_on_one_node(place: Place) -> None:
    os.environ["REFT_NODE_ID"], os.environ["LOCAL_RANK"] = "node", os.environ["RANK"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    shared = place.memory.parent / "memory"
    make({**place.block(), "memory_dir": str(shared)})


SETUPS: tuple[Callable[[Place], None], ...] = (
    more_losses_than_nodes,
    auto_for_more_losses_than_nodes,
    no_protection,
    everybody_on_one_node,
    # DeepSpeed's groups are a pipeline's from here on.
    pipeline_over_two_nodes,
    pipeline_allowed_to_be_unprotected,
)


def tried(setup: Callable[[Place], None], root: Path) -> dict[str, Any]:
    """What was said at which step, and how it ended: with an error and an exit code under ``reft launch``."""
    HEARD.lines.clear()
    HEARD.engine = None
    environment = dict(os.environ)
    out: dict[str, Any] = {"error": None, "code": 0}
    try:
        setup(Place(root, setup.__name__))
    except reft.ReftError as error:
        out["error"], out["code"] = str(error), EX_REFUSED if is_refusal(error) else 1
    finally:
        os.environ.clear()
        os.environ.update(environment)
    out["steps"] = 0 if HEARD.engine is None else int(HEARD.engine.global_steps)
    out["heard"] = list(HEARD.lines)
    if HEARD.engine is not None and (session := session_of(HEARD.engine)) is not None:
        session.close()
    return out


def main(root: Path) -> dict[str, Any]:
    logging.getLogger("reft").addHandler(HEARD)
    return {setup.__name__: tried(setup, root) for setup in SETUPS}


if __name__ == "__main__":
    be_a_rank(main)
