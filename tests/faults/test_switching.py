"""``reft protect`` in a training job: switched while it trains, a node lost after each switch (P1, P3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commands import Answer, command
from tests.faults.cases import DP3, OPTIMIZERS
from tests.faults.job import FaultJob, Scratch, broken_promises, wrong_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

OPTIMIZER = OPTIMIZERS[0]
BLOCK: dict[str, Any] = {
    "host_state_bytes": 2**17,
    "grace_secs": 100.0,
    # In the third life, after the new arenas were made and before the trainer has said so.
    "faults": [
        {"point": "during_switch", "step": step, "dp": 1, "incarnation": 3} for step in range(1, 2000)
    ],
}


class Switched(FaultJob):
    def ask(self, name: str, index: int, *arguments: str) -> Answer:
        return command(name, *arguments, "--memory-dir", self.cluster.job_dir(index))

    def wait_for_protection(self, scheme: str) -> None:
        self.wait_for(f"a version under {scheme}", lambda: self.newest_protection() == scheme)

    def lose_node(self, index: int) -> None:
        life = self.history.current.number
        self.cluster.kill_node(index)
        self.cluster.start_node(index)
        self.wait_for("steps of the next life", lambda: self.steps_in(life + 1) >= 5)

    def steps_in(self, life: int) -> int:
        current = self.history.current
        return len(current.steps) if current.number == life else 0


@pytest.mark.nightly
def test_protection_is_switched_while_training(scratch: Scratch) -> None:
    with Switched(scratch, "switched", DP3, OPTIMIZER, steps=10**6, block=BLOCK, max_restarts=1) as job:
        job.wait_for_commit(3)
        assert job.newest_protection() == "arc"
        answer = job.ask("protect", 0, "aec", "--json")
        told = answer.json
        assert answer.code == 0
        assert (told["scheme"], told["tolerance"], told["refused"]) == ("aec", 1, None)
        job.wait_for_protection("aec")
        job.lose_node(1)
        # The last switch holds for the next start too, on the new node as well.
        restored = [e.fields for e in job.history.current.restored.values()]
        assert sum(int(f["bytes_from"]["parity"]) for f in restored) > 0
        answer = job.ask("protect", 1)
        assert (answer.code, "aec since step" in answer.out) == (0, True)
        assert job.newest_protection() == "aec"

        for scheme, said in (
            ("raid5", "found protection 'raid5'; expected none, arc"),
            ("arc:3", "needs at least 4 data-parallel members, found 3"),
        ):
            answer = job.ask("protect", 2, scheme)
            # Lines are broken anywhere.
            assert (answer.code, said in " ".join(answer.err.split())) == (2, True), answer
        assert job.ask("protect", 2, "arc:2").code == 0
        job.wait_for_protection("arc:2")
        job.lose_node(2)
        assert job.newest_protection() == "arc:2"
        # On a busy machine a version may just have been skipped, which status calls stale.
        job.wait_for("a node that is well", lambda: job.ask("status", 2).code == 0)
        assert "survives the loss of 2 node(s)" in job.ask("protect", 2).out

        assert job.ask("protect", 0, "arc+aec", "--wait", "0").code == 0
        job.wait_for("steps of the next life", lambda: job.steps_in(4) >= 5)
        job.wait_for_protection("arc+aec")

        history = job.history
        assert list(history.incarnations) == [1, 2, 3, 4]
        assert broken_promises(history) == []
        steps = history.current.last_step
        assert wrong_losses(history, scratch.reference(DP3, OPTIMIZER, steps)) == []
        job.stop()
        answer = job.ask("protect", 0, "arc")
        assert (answer.code, "does not run" in answer.err) == (1, True)
