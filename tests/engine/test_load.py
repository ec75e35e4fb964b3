"""What a load restores, by what was loaded before it and by what it asks for: the table of
:class:`reft.engine.load.Restorer`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from reft.engine.load import Restorer
from reft.engine.load_call import LoadCall
from reft.errors import LayoutError, UnrecoverableError
from reft.grid import Degrees, VersionId
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.recover import RecoveryOutcome
from reft.storage.load import DamagedError, DiskCheckpoint, LoadedCheckpoint

ONE, TWO = Degrees(1, 1, 1), Degrees(1, 2, 1)
NOTHING = NotRecoverable(("nothing is in memory",), newest_committed=None)


def stored(step: int) -> DiskCheckpoint:
    """A checkpoint of this job."""
    return DiskCheckpoint(Path("/ckpt"), f"step{step}", step, VersionId(1, step), "job")


def plan_of(step: int, written: Degrees = ONE) -> Any:
    plan = mock.Mock(spec=RecoveryPlan)
    plan.label, plan.written, plan.degrees = VersionId(1, step), written, ONE
    plan.other_layout, plan.empty = written != ONE, False
    return plan


class Job:
    """A restorer between a memory and a storage that are as told. ``loaded`` has what was loaded
    from storage, in order."""

    def __init__(self, *plans: Any, stored: list[DiskCheckpoint], damaged: tuple[int, ...] = ()):
        self.loaded: list[str] = []
        self._stored, self._damaged = stored, damaged
        self.session = mock.Mock(started=False)
        self.session.start.side_effect = lambda frozen: setattr(self.session, "started", True)
        self.memory = mock.Mock(client_state={"from": "memory"})
        self.memory.survey.side_effect = [(mock.Mock(), plan) for plan in plans]
        self.memory.restore.side_effect = self._restore
        self.outcome: Any = None
        context: Any = mock.Mock(is_rank_zero=True, job_id="job")
        context.engine.global_steps = 7
        checkpoints: Any = self
        self.restorer = Restorer(context, self.session, self.memory, checkpoints)
        self.disk = SimpleNamespace(
            find=lambda directory: LoadedCheckpoint(tuple(self._stored)),
            find_named=lambda directory, tag: None,
            refused=lambda found: tuple(f"step{step} is damaged" for step in damaged),
            refuse=lambda checkpoint, error: None,
        )
        self.unprotected = False

    def _restore(self, recovery: Any) -> Any:
        if isinstance(self.outcome, Exception):
            error, self.outcome = self.outcome, None
            raise error
        if self.outcome is None:
            self.session.start({})
            return mock.Mock(spec=RecoveryOutcome, label=VersionId(1, 5))
        return self.outcome

    def load(self, checkpoint: DiskCheckpoint, call: LoadCall, *, start: bool = True) -> Any:
        if checkpoint.step in self._damaged:
            raise DamagedError("a file differs")
        self.loaded.append(checkpoint.tag)
        self.session.started = self.session.started or start
        return str(checkpoint.path), {"from": checkpoint.tag}

    def load_named(self, call: LoadCall, *, start: bool = True) -> Any:
        named = stored(int(str(call.tag).removeprefix("step")))
        return named, self.load(named, call, start=start)

    def count_beyond(self, *checkpoints: DiskCheckpoint) -> None: ...

    def newest(self, directory: str | None = "/ckpt", **options: Any) -> Any:
        return self.restorer.load(LoadCall(self.deepspeed, directory, None, options))

    def tagged(self, tag: str) -> Any:
        return self.restorer.load(LoadCall(self.deepspeed, "/ckpt", tag, {}))

    def deepspeed(self, directory: Any, tag: Any = None, **options: Any) -> Any:
        self.loaded.append("by DeepSpeed")
        return None, None


@pytest.mark.parametrize(
    ("steps", "damaged", "source"),
    [
        ([3], (), "memory:job/5"),
        ([], (), "memory:job/5"),
        ([8, 3], (), "/ckpt/step8"),
        ([8, 3], (8,), "memory:job/5"),
    ],
)
def test_p3_the_first_load_returns_the_newest_sound_state(
    steps: list[int], damaged: tuple[int, ...], source: str
) -> None:
    job = Job(plan_of(5), stored=[stored(step) for step in steps], damaged=damaged)
    assert job.newest()[0] == source
    assert job.session.started


def test_without_a_version_in_memory_the_newest_sound_checkpoint_is_loaded() -> None:
    job = Job(NOTHING, stored=[stored(8), stored(3)], damaged=(8,))
    assert job.newest() == ("/ckpt/step3", {"from": "step3"})


def test_where_there_is_nothing_deepspeed_is_asked_and_the_session_starts() -> None:
    job = Job(NOTHING, stored=[])
    assert job.newest() == (None, None)
    assert job.loaded == ["by DeepSpeed"]
    job.memory.refuse_silent_restart.assert_called_once_with(NOTHING, "")
    assert job.session.started


def test_a_version_of_another_layout_that_cannot_be_converted_is_left_for_one_of_this_layout() -> (
    None
):
    job = Job(plan_of(6, written=TWO), plan_of(5), stored=[stored(4)])
    job.outcome = LayoutError("the buffers differ")
    assert job.newest()[0] == "memory:job/5"
    assert job.memory.survey.call_args.kwargs == {"any_layout": False}


def test_p5_memory_that_turns_out_corrupt_falls_back_to_an_older_checkpoint() -> None:
    job = Job(plan_of(5), stored=[stored(3)])
    job.outcome = replace(NOTHING, reasons=("a block is corrupt",))
    assert job.newest()[0] == "/ckpt/step3"
    job = Job(plan_of(5), stored=[])
    job.outcome = NOTHING
    job.memory.refuse_half_written.side_effect = UnrecoverableError("half written")
    with pytest.raises(UnrecoverableError, match="half written"):
        job.newest()


def test_a_checkpoint_by_its_tag_starts_nothing_and_the_newest_state_may_follow() -> None:
    job = Job(plan_of(5), plan_of(5), stored=[stored(3)])
    assert job.tagged("step3")[0] == "/ckpt/step3"
    assert not job.session.started
    assert job.newest()[0] == "memory:job/5"


@pytest.mark.parametrize(("steps", "second"), [([3], "memory:job/5"), ([8, 3], "/ckpt/step8")])
def test_a_second_load_before_the_first_step_returns_only_what_is_newer(
    steps: list[int], second: str
) -> None:
    job = Job(plan_of(5), stored=[])
    assert job.newest()[0] == "memory:job/5"
    job._stored = [stored(step) for step in steps]
    assert job.newest()[0] == second


def test_a_job_that_trains_goes_back_to_the_newest_checkpoint_or_to_the_one_that_is_named() -> None:
    job = Job(plan_of(5), stored=[stored(3)])
    job.newest()
    job.restorer.begin_step()
    assert job.newest()[0] == "/ckpt/step3"
    assert job.tagged("step2")[0] == "/ckpt/step2"
    assert job.newest(None) == (None, None), "reft.resume, of which a job that trains has no need"


def test_p3_base_weights_are_not_loaded_over_what_the_job_has_trained() -> None:
    job = Job(plan_of(5), stored=[])
    job.newest()
    assert job.newest(load_module_only=True)[0] == "memory:job/5"
    assert job.loaded == []
    job.restorer.begin_step()
    job.newest(load_module_only=True)
    assert job.loaded == ["by DeepSpeed"]
    job.session.hold.assert_called_once_with()
