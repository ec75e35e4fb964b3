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
MOST_MODULES = 10
"""What looks for the block, and what ``reft launch`` runs a script through."""


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
            "initialize": ranks(
                SCRIPT, "--initialize", cwd=root, out=root / "init", memory=memory, env=odd
            ),
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


def test_p10_without_the_block_next_to_nothing_is_imported(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["plain"]["modules"] == []
    for how in ("initialize", "launch"):
        assert len(found[how]["modules"]) <= MOST_MODULES, found[how]["modules"]
