"""P2: tensors that the script writes outside the optimizer step are in a version as they are where the next step
begins, or the version is given up with the tensor's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reft
from reft.engine.attach import find_session
from tests.follow.lives import Life, live, mlp, resumed, said, square

STEPS = 9


def clipped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def clipped_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("clip", [clipped, clipped_by_data])
def test_what_is_written_after_the_step_is_in_the_version(
    root: Path, clip: Callable[[Any], None]
) -> None:
    def script(life: Life) -> None:
        model = mlp()
        engine = life.initialize(model, zero=1)
        reft.resume(engine)
        while engine.global_steps < life.steps:
            loss = life.train(square)
            clip(model)
            life.note(loss, model[0].weight.sum())

    undisturbed, found = resumed(root, script, cuts=(3, 6), steps=STEPS)
    assert found == undisturbed


class WithTable(nn.Module):
    """Writes a table in its forward pass, where copies of it are under way."""

    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.inner = mlp()
        self.table = nn.Parameter(torch.zeros(1000), requires_grad=False)
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        if self.training:
            self._write(self.table)
        return out + self.table[:8]


def counted(table: torch.Tensor) -> None:
    table.add_(0.01)


def uncounted(table: torch.Tensor) -> None:
    table.data.add_(0.01)


def test_what_the_forward_pass_writes_costs_one_version_and_is_copied_first_from_then_on(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats: list[Any] = []

    def script(life: Life) -> None:
        engine = life.initialize(WithTable(counted), config={"reft": every_step(life)})
        reft.resume(engine)
        session = find_session(engine)
        assert session is not None
        while engine.global_steps < life.steps:
            loss = life.train(square)
            life.note(loss)
            assert session.worker is not None
            assert session.worker.drain(30)
        stats.append(session.stats)

    undisturbed, found = resumed(root, script, cuts=(6,), steps=STEPS)
    assert found == undisturbed
    # A busy machine may not begin to copy a version of so short a step: that is another cause.
    assert stats[0].skipped["written while it was copied"] == 1, stats[0].skipped
    assert "the script wrote model.table after its forward pass began" in said(caplog)
    assert "the script writes model.table after the forward pass of a step has begun" in said(
        caplog
    )
    assert stats[0].committed > 1


def test_no_version_is_sealed_before_its_tensors_were_compared(root: Path) -> None:
    """A trainer that is killed meanwhile must not leave a torn version that a recovery takes for whole."""

    def script(life: Life) -> None:
        engine = life.initialize(mlp(), config={"reft": every_step(life)})
        reft.resume(engine)
        session = find_session(engine)
        assert session is not None
        life.train(square)
        out = engine(torch.ones(4, 8))  # the version of step 1 is handed over
        request = session.first_request
        assert request is not None
        assert request.copied.wait(30)
        assert not request.done.wait(0.2)
        assert not list(whole(life.root / "memory"))
        engine.backward(square(out))
        engine.step()
        assert request.done.wait(30)
        assert request.committed
        assert list(whole(life.root / "memory"))

    live(root, script, "sealed", steps=2)


def whole(memory: Path) -> Iterator[int]:
    """Steps of the versions that a recovery would take."""
    from tests.commands import inspected

    for version in inspected(memory)["versions"]:
        if version["whole_ranks"]:
            yield version["step"]


def test_writes_that_torch_does_not_count_are_found_in_a_block_that_is_read_twice(
    root: Path,
) -> None:
    stats: list[Any] = []

    def script(life: Life) -> None:
        engine = life.initialize(WithTable(uncounted), config={"reft": every_step(life)})
        reft.resume(engine)
        session = find_session(engine)
        assert session is not None
        while engine.global_steps < life.steps:
            if engine.global_steps == 3:
                write_between_two_readings(session, engine.module.table)
            life.train(square)
            assert session.worker is not None
            assert session.worker.drain(30)
        stats.append(session.stats)

    live(root, script, "uncounted", steps=6)
    assert stats[0].skipped["written while it was copied"] == 1


def write_between_two_readings(session: Any, table: torch.Tensor) -> None:
    copier = session.worker.copier
    original = copier._read_again

    def written(*args: Any) -> Any:
        table.data.add_(1.0)
        copier._read_again = original
        return original(*args)

    copier._read_again = written


def every_step(life: Life) -> dict[str, Any]:
    return {
        "enabled": True,
        "allow_unprotected": True,
        "job_id": life.job,
        "memory_dir": str(life.root / "memory"),
    }
