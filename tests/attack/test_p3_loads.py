"""A script that loads more than once, in any order, resumes once, at the newest version."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reft
from benchmarks.job_events import History
from tests.engine.ranks import be_a_rank, run_ranks
from tests.engine.test_engine import make, seed, train

pytestmark = pytest.mark.integration


Loads = Callable[[Any], Any]
FIRST_LIFE, STEPS = 5, 8


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(block: dict[str, Any] | None) -> Any:
    engine = make(block, None if block is None else reft.initialize)
    seed()
    return engine


class Job:
    def __init__(self, root: Path, name: str, loads: Loads, heard: Heard, **block: Any) -> None:
        self.memory = root / "memory" / name
        self._block = {"enabled": True, "job_id": name, "memory_dir": str(root / "memory"), **block}
        self._loads, self._heard = loads, heard
        self.weights = b""

    def live(self, until: int, save_at: tuple[Path, int] | None = None) -> dict[str, Any]:
        """Start, load, train, die: the memory is left as a killed process would leave it."""
        self._heard.lines.clear()
        events = self.memory.parents[1] / f"events-{time.monotonic_ns()}"
        os.environ["REFT_EVENTS"] = str(events)
        engine = start(self._block)
        out: dict[str, Any] = {}
        try:
            loaded = self._loads(engine)
            out["returned"] = [str(x) for x in loaded] if isinstance(loaded, tuple) else loaded
            out["resumed_at"] = int(engine.global_steps)
            if save_at is not None:
                train(engine, save_at[1])
                engine.save_checkpoint(str(save_at[0]))
            out["losses"] = train(engine, until)
        except reft.ReftError as error:
            out["refused"] = str(error)
        finally:
            self.weights = next(engine.module.parameters()).detach().numpy().tobytes()
            reft.attach(engine).close(60)
        life = History.of(events).current
        out["incarnation"], out["committed"] = life.number, max(life.committed, default=0)
        out["heard"] = list(self._heard.lines)
        return out


def base_weights(root: Path) -> str:
    engine = start(None)
    train(engine, 3)
    engine.save_checkpoint(str(root / "base"), client_state={"of": "base"})
    return str(root / "base")


def reference(base: str | None) -> list[str]:
    engine = start(None)
    if base is not None:
        engine.load_checkpoint(base, load_module_only=True)
    return train(engine, STEPS)


def main(root: Path) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger("reft").addHandler(heard)
    logging.getLogger("reft").setLevel(logging.INFO)
    base = base_weights(root)
    out: dict[str, Any] = {"reference": reference(base), "from_scratch": reference(None)}

    def scripts(own: str) -> dict[str, Loads]:
        def base_first(engine: Any) -> Any:
            engine.load_checkpoint(base, load_module_only=True)
            return engine.load_checkpoint(own)

        def base_last(engine: Any) -> Any:
            found = engine.load_checkpoint(own)
            engine.load_checkpoint(base, load_module_only=True)
            return found

        def base_without_optimizer(engine: Any) -> Any:
            engine.load_checkpoint(
                base, load_optimizer_states=False, load_lr_scheduler_states=False
            )
            return engine.load_checkpoint(own)

        def base_by_tag(engine: Any) -> Any:
            engine.load_checkpoint(base, tag="global_step3")
            return engine.load_checkpoint(own)

        def twice(engine: Any) -> Any:
            engine.load_checkpoint(own)
            return engine.load_checkpoint(own)

        found = (base_first, base_last, base_without_optimizer, base_by_tag, twice)
        return {f.__name__: f for f in found}

    for name in scripts(""):
        own = root / f"own-{name}"
        job = Job(root, name, scripts(str(own))[name], heard)
        # The script also saves, at a step that the memory is beyond.
        out[name] = [job.live(FIRST_LIFE, save_at=(own, 4)), job.live(STEPS)]

    out["positional"] = positional(root, base)
    fault = {"point": "before_commit", "step": 1, "action": "raise"}
    none = str(root / "none")
    job = Job(
        root, "never_committed", lambda engine: engine.load_checkpoint(none), heard, faults=[fault]
    )
    out["never_committed"] = [job.live(1), damage_weights(job), job.live(STEPS)]
    return out


def damage_weights(job: Job) -> int:
    number = 0
    for path in job.memory.glob("*.arena"):
        with path.open("r+b") as file:
            if (at := file.read().find(job.weights)) >= 0:
                file.seek(at)
                file.write(bytes([job.weights[0] ^ 0x40]))
                number += 1
    return number


def positional(root: Path, base: str) -> dict[str, Any]:
    engine = start({"enabled": True, "job_id": "positional", "memory_dir": str(root / "memory")})
    out: dict[str, Any] = {}
    try:
        # load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        path, _ = engine.load_checkpoint(base, None, True, True, True, True)
        out["base"] = [Path(path).parent.name, int(engine.global_steps)]
        engine.load_checkpoint(load_dir=str(root / "none"))
        train(engine, 2)
        engine.save_checkpoint(str(root / "saved"), "mine", {"epoch": 4}, False)
        out["latest"] = (root / "saved" / "latest").exists()
        path, client = engine.load_checkpoint(str(root / "saved"), "mine", True)
        out["loaded"] = [Path(path).parent.name, client["epoch"], int(engine.global_steps)]
        try:
            engine.load_checkpoint(str(root / "saved"), load_everything=True)
        except TypeError as error:
            out["unknown"] = str(error)
    except TypeError as error:
        out["error"] = str(error)
    finally:
        reft.attach(engine).close()
    return out


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(Path(__file__), tmp_path_factory.mktemp("loads"), world=1)[0]


@pytest.mark.parametrize("script", ["base_first", "base_last"])
def test_p3_base_weights_and_a_resume_in_any_order_lose_no_commit(
    result: dict, script: str
) -> None:
    first, second = result[script]
    assert first["resumed_at"] == 0
    assert second["resumed_at"] == FIRST_LIFE == first["committed"]
    assert first["losses"] + second["losses"] == result["reference"][4:], (
        "base weights, then no step twice"
    )
    assert second["incarnation"] == first["incarnation"] + 1


@pytest.mark.parametrize("script", ["base_without_optimizer", "base_by_tag"])
def test_p3_any_way_to_load_a_base_loses_no_commit(result: dict, script: str) -> None:
    first, second = result[script]
    assert first["resumed_at"] == 3, "the counters of the base"
    assert second["resumed_at"] == FIRST_LIFE == first["committed"]
    assert "memory" in second["returned"][0]


def test_p3_the_same_load_twice_resumes_once(result: dict) -> None:
    first, second = result["twice"]
    assert second["resumed_at"] == FIRST_LIFE
    assert first["losses"] + second["losses"] == result["from_scratch"][4:]
    assert sum("resumed at step" in line for line in second["heard"]) == 1


def test_what_deepspeed_takes_by_position_is_taken(result: dict) -> None:
    found = result["positional"]
    assert "error" not in found
    assert found["base"] == ["global_step3", 0]
    assert not found["latest"], "save_latest=False was passed on"
    assert found["loaded"] == ["mine", 4, 2]
    assert "load_everything" in found["unknown"]


def test_p3_a_version_that_turns_out_corrupt_while_it_is_restored_is_not_trained_on(
    result: dict,
) -> None:
    """Nothing was ever committed, so the job might start anew; but some of its weights are written by then."""
    first, damaged, second = result["never_committed"]
    assert first["committed"] == 0
    assert damaged == 1
    assert "corrupt" in second["refused"]
    assert "losses" not in second


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    be_a_rank(main)
