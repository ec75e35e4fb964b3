"""P7, identity: no two jobs share memory, a job finds its own again, and what is restored is this job's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attack.jobs import DEADLINE_SECS, Started, launched, ranks

SCRIPT = Path(__file__).with_name("identity_job.py")


class Jobs:
    """Starts of the script, each in a directory of its own; nothing of them is left when the test ends."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.memory = root / "memory"
        self._stack = stack
        self._starts = 0

    def _place(self, name: str) -> tuple[Path, Path]:
        cwd = self.root / name
        cwd.mkdir(exist_ok=True)
        self._starts += 1
        return cwd, self.root / f"out{self._starts}"

    def torchrun(self, name: str, *args: str, world: int = 1, **env: str) -> Started:
        """As plain ``torchrun`` starts it: all ranks on this host, one memory directory."""
        cwd, out = self._place(name)
        arguments = ("--ckpt", str(cwd / "ckpt"), *args)
        memory = [self.memory] * world
        return self._stack.enter_context(ranks(SCRIPT, *arguments, cwd=cwd, out=out, memory=memory, env=env))

    def launch(
        self, name: str, *args: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> Started:
        """With ``reft launch``."""
        cwd, out = self._place(name)
        arguments = ("--ckpt", str(cwd / "ckpt"), *args)
        wanted = ("--memory-dir", str(self.memory), *options)
        return self._stack.enter_context(
            launched(SCRIPT, *arguments, cwd=cwd, out=out, options=wanted, env=env)
        )


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)


@pytest.mark.nightly
def test_p7_jobs_without_an_id_share_nothing_and_each_finds_its_own_again(jobs: Jobs) -> None:
    first = jobs.torchrun("one", "--steps", "4", "--wait")
    assert first.said(0, "committed") == 4
    # Beside it the same script in another directory.
    second = jobs.torchrun("two", "--steps", "2", "--wait")
    assert (second.said(0, "from"), second.said(0, "resumed")) == (None, 0)
    assert second.said(0, "job") != first.said(0, "job")
    assert second.said(0, "committed") == 2
    # Killed whole and started again, later, as it was.
    first.kill()
    again = jobs.torchrun("one", "--steps", "4", "--wait")
    assert (again.said(0, "resumed"), again.said(0, "job")) == (4, first.said(0, "job"))


@pytest.mark.integration
def test_p7_the_same_start_twice_at_once_is_refused_and_disturbs_nothing(jobs: Jobs) -> None:
    first = jobs.torchrun("one", "--steps", "3", "--wait", world=2)
    assert [first.said(rank, "committed") for rank in range(2)] == [3, 3]
    memory = jobs.memory / first.said(0, "job")
    recorded = json.loads(json.loads((memory / "fingerprint.json").read_text())["1"])["facts"]
    assert recorded["config.optimizer.type"] == "AdamW"
    assert (recorded["layout.dp"], recorded["script"], recorded["seed"]) == (2, str(SCRIPT), 7)
    before = {path.name: path.read_bytes() for path in memory.iterdir() if path.is_file()}
    second = jobs.torchrun("one", "--steps", "3", "--wait", world=2)
    assert [second.said(rank, "refused") for rank in range(2)] == ["JobInUseError"] * 2
    message = second.said(0, "message") + second.said(1, "message")
    assert f"held by pid {first.processes[0].pid} on" in message
    assert "--job-id NAME" in message
    assert {path.name: path.read_bytes() for path in memory.iterdir() if path.is_file()} == before
    assert first.end() == [0, 0]


@pytest.mark.integration
def test_p7_state_of_other_settings_is_refused_on_all_ranks_until_it_is_accepted(jobs: Jobs) -> None:
    first = jobs.torchrun("one", "--steps", "3", world=2)
    assert [first.said(rank, "committed") for rank in range(2)] == [3, 3]
    assert first.end() == [0, 0]
    changed = {"TEST_LR": "0.5", "TEST_WIDTH": "16", "TEST_SEED": "8"}
    second = jobs.torchrun("one", "--steps", "3", world=2, **changed)
    for rank in range(2):
        assert second.said(rank, "refused") == "FingerprintError"
        message = second.said(rank, "message")
        assert "config.optimizer.params.lr: was 0.01, is 0.5" in message
        assert "seed: was 7, is 8" in message
        assert "model.pp0.tp0: was" in message
        assert "2 parameters of 9 numbers" in message
        assert "2 parameters of 17 numbers" in message
        assert '"accept_changes": [' in message
    # What is restored is the state; the settings are in force that the person accepted.
    accepted = {"TEST_LR": "0.5", "TEST_ACCEPT": "config.optimizer"}
    third = jobs.torchrun("one", "--steps", "3", world=2, **accepted)
    assert [third.said(rank, "resumed") for rank in range(2)] == [3, 3]


@pytest.mark.nightly
def test_p7_launched_without_an_id_a_job_has_its_own_name_and_finds_it_again(jobs: Jobs) -> None:
    def start(name: str) -> Started:
        return jobs.launch(name, "--steps", "2", "--wait")

    first = start("one")
    assert first.said(0, "committed") == 2
    second = start("two")
    assert (second.said(0, "from"), second.said(0, "resumed")) == (None, 0)
    names = [first.said(0, "job"), second.said(0, "job")]
    assert len(set(names)) == 2
    assert all(name.startswith("identity_job-") for name in names)
    # The same once more, beside it: the launcher refuses before it meets anybody.
    twice = start("one")
    assert twice.processes[0].wait(DEADLINE_SECS) == 2
    assert f"held by pid {first.processes[0].pid} on" in twice.log.read_text()
    first.kill()
    again = start("one")
    assert (again.said(0, "job"), again.said(0, "resumed")) == (names[0], 2)
