"""Identity: no two jobs share memory, a job finds its own again, and what is restored is this job's (P7); what counts
as a node (P4)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attack.jobs import DEADLINE_SECS, Started, launched, ranks, wait_for
from tests.machine import free_port

SCRIPT = Path(__file__).with_name("identity_job.py")


class Jobs:
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
        cwd, out = self._place(name)
        arguments = ("--ckpt", str(cwd / "ckpt"), *args)
        memory = [self.memory] * world
        return self._stack.enter_context(
            ranks(SCRIPT, *arguments, cwd=cwd, out=out, memory=memory, env=env)
        )

    def launch(self, name: str, *args: str) -> Started:
        cwd, out = self._place(name)
        arguments, options = (
            ("--ckpt", str(cwd / "ckpt"), *args),
            ("--memory-dir", str(self.memory)),
        )
        return self._stack.enter_context(
            launched(SCRIPT, *arguments, cwd=cwd, out=out, options=options)
        )

    def names(self) -> set[str]:
        return {path.name for path in self.memory.iterdir()}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["torchrun", "launch"])
def test_p7_jobs_without_an_id_share_nothing_and_each_finds_its_own_again(
    jobs: Jobs, how: str
) -> None:
    def start(name: str) -> Started:
        return getattr(jobs, how)(name, "--steps", "4", "--wait")

    first = start("one")
    first.wait_for_commit(4)
    # At the same time the same script in another directory.
    second = start("two")
    assert (second.said(0, "from"), second.said(0, "resumed")) == (None, 0)
    second.wait_for_commit(4)
    names = jobs.names()
    assert len(names) == 2
    if how == "launch":
        # The same once more: the launcher refuses before it meets anybody.
        twice = start("one")
        assert twice.processes[0].wait(DEADLINE_SECS) == 2
        assert f"held by pid {first.processes[0].pid} on" in twice.log.read_text()
    # Killed whole and started again, later, as it was.
    first.kill()
    again = start("one")
    assert (again.said(0, "resumed"), jobs.names()) == (4, names)


@pytest.mark.integration
def test_p7_the_same_start_twice_at_once_is_refused_and_disturbs_nothing(jobs: Jobs) -> None:
    first = jobs.torchrun("one", "--steps", "3", "--wait", world=2)
    first.wait_for_commit(2)  # step 3 is one when the next begins
    (memory,) = jobs.memory.iterdir()
    before = {path.name: path.read_bytes() for path in memory.iterdir() if path.is_file()}
    second = jobs.torchrun("one", "--steps", "3", "--wait", world=2)
    assert [second.said(rank, "refused") for rank in range(2)] == ["JobInUseError"] * 2
    message = second.said(0, "message") + second.said(1, "message")
    assert f"held by pid {first.processes[0].pid} on" in message
    assert "--job-id NAME" in message
    assert {path.name: path.read_bytes() for path in memory.iterdir() if path.is_file()} == before
    assert first.end() == [0, 0]


@pytest.mark.integration
def test_p7_state_of_other_settings_is_refused_on_all_ranks_until_it_is_accepted(
    jobs: Jobs,
) -> None:
    first = jobs.torchrun("one", "--steps", "3", world=2)
    assert first.end() == [0, 0]
    second = jobs.torchrun("one", "--steps", "3", world=2, TEST_LR="0.5")
    assert [second.said(rank, "refused") for rank in range(2)] == ["FingerprintError"] * 2
    # What is restored is the state; the settings are in force that the person accepted.
    accepted = {"TEST_LR": "0.5", "TEST_BLOCK": '{"accept_changes": ["config.optimizer"]}'}
    third = jobs.torchrun("one", "--steps", "3", world=2, **accepted)
    assert [third.said(rank, "resumed") for rank in range(2)] == [3, 3]


@pytest.mark.process
@pytest.mark.parametrize("how", ["torchrun", "launch"])
def test_p3_a_second_live_engine_of_a_job_is_refused_and_disturbs_nothing(
    jobs: Jobs, how: str
) -> None:
    job = getattr(jobs, how)("one", "--steps", "3", "--second", "--wait")
    assert job.said(0, "again") == 5, "the first went on; once closed it is in nobody's way"
    assert '"enabled": false' in job.facts(0)["refused"]
    assert max(job.history.incarnations[1].committed) > 3


@pytest.mark.integration
def test_p7_the_fault_kill_node_removes_the_memory_of_its_own_job_alone(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    (memory / "another").mkdir(parents=True, mode=0o700)
    memory.chmod(0o700)
    fault = {"point": "after_commit", "step": 1, "action": "kill_node"}
    options = ("--memory-dir", str(memory), "--job-id", "mine")
    env = {"TEST_BLOCK": json.dumps({"faults": [fault]})}
    arguments = ("--ckpt", str(tmp_path / "ckpt"), "--wait")
    with launched(
        SCRIPT, *arguments, cwd=tmp_path, out=tmp_path / "out", options=options, env=env
    ) as job:
        assert job.processes[0].wait(DEADLINE_SECS) == -signal.SIGKILL
        # The launcher died first; the trainer that killed it may not be through.
        wait_for(lambda: not (memory / "mine").exists(), "the memory to be gone", job.log)
    assert [path.name for path in memory.iterdir()] == ["another"]


@pytest.mark.process
@pytest.mark.parametrize("declared", [False, True])
def test_p4_launchers_on_one_host_are_one_node_unless_declared(
    tmp_path: Path, declared: bool
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:

        def start(index: int) -> Started:
            meet = f"--nnodes 2 --rdzv-endpoint {endpoint} --rdzv-id domains --local-addr 127.0.0.1"
            options = [*meet.split(), "--memory-dir", str(tmp_path / f"memory{index}")]
            options += ["--node-id", f"node{index}"] if declared else []
            arguments = ("--ckpt", str(tmp_path / "ckpt"), "--steps", "1", "--wait")
            # One directory: each rank writes a file of its own there.
            where = {"cwd": tmp_path, "out": tmp_path / "out", "options": options}
            return stack.enter_context(launched(SCRIPT, *arguments, **where))

        launchers = [start(0), start(1)]
        launchers[0].wait_for(lambda: len(launchers[0].history.current.nodes) == 2, "two ranks")
        tolerance = launchers[0].history.current.tolerance
        told = "nodes node0, node1 are declared (--node-id or REFT_NODE_ID) and share a host"
        told = told if declared else "TOLERANCE IS 0"
        launchers[0].wait_for(lambda: told in launchers[0].log.read_text(), told)
    assert tolerance == (1 if declared else 0)
