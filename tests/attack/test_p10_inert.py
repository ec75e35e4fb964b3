"""P10: without the block there is no effect: not on DeepSpeed, not on the engine, not on what is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.attack.jobs import launched, ranks
from tests.prefork import ENV_PREFORK

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("inert_script.py")
LEAST = {
    *("reft", "reft.env", "reft.naming"),
    *("reft.engine", "reft.engine.install", "reft.engine.on_import", "reft.engine.on_import"),
}
"""What looks for the block."""
STARTER = {"reft.job", "reft.job.exits", "reft.refusal"}
"""What `reft launch` runs a script through; its ``reft.job.script`` is ``__main__`` there."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("inert")
    memory = [root / "memory"]
    alone = {ENV_PREFORK: "0"}  # what is forked has reft imported from the beginning
    odd = {"TORCHELASTIC_RUN_ID": "run 7/a", **alone}
    with ExitStack() as stack:
        options = ("--memory-dir", str(root / "launched"))
        secret = {"REFT_SECRET": "5a" * 32, **alone}
        jobs = {
            "plain": ranks(SCRIPT, cwd=root, out=root / "plain", memory=memory, env=alone),
            "initialize": ranks(SCRIPT, "--initialize", cwd=root, out=root / "init", memory=memory, env=odd),
            "launch": launched(SCRIPT, cwd=root, out=root / "launch", options=options, env=secret),
        }
        started = {name: stack.enter_context(job) for name, job in jobs.items()}
        for job in started.values():
            job.said(0, "done")
        yield {name: job.facts(0) for name, job in started.items()}


@pytest.mark.parametrize("how", ["initialize", "launch"])
def test_p10_without_the_block_deepspeed_and_engine_are_untouched(
    found: dict[str, dict[str, Any]], how: str
) -> None:
    plain, ours = found["plain"], found[how]
    assert ours["tables"] == plain["tables"]
    assert ours["engine"] == plain["engine"]
    assert ours["init_distributed"] == plain["init_distributed"] == [True, True]


def test_p10_without_the_block_next_to_nothing_is_imported(found: dict[str, dict[str, Any]]) -> None:
    assert found["plain"]["modules"] == []
    assert set(found["initialize"]["modules"]) == LEAST
    assert set(found["launch"]["modules"]) <= LEAST | STARTER | {"reft.job.script"}
