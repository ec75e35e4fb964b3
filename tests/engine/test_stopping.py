"""How a job ends that is told to."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from reft.engine.attach import find_session
from reft.engine.stopping import StopController
from reft.errors import TransferError
from reft.grid import VersionId
from tests.attack.jobs import DEADLINE_SECS, ranks
from tests.engine.ranks import join_group
from tests.engine.test_traffic import make, train


def main(out: Path) -> None:
    logging.basicConfig()
    join_group()
    rank = int(os.environ["RANK"])
    os.environ["REFT_NODE_ID"] = f"node{rank}"
    engine = make(0, {"enabled": True, "job_id": "stop", "grace_secs": 4})
    engine.load_checkpoint(str(out / "none"))
    train(engine)
    session = find_session(engine)
    assert session is not None
    assert session.worker is not None
    if rank == 1:

        def lose(*args: object, **options: object) -> None:
            raise TransferError("lost by the test")

        session.worker.control.rejoin = lose  # type: ignore[method-assign]
        session.worker.votes.cast = lose  # type: ignore[method-assign]
    train(engine)
    (out / f"rank{rank}.json").write_text('{"ready": true}')
    while True:
        train(engine)


GRACE_SECS = 25.0


class Stopped:
    """A controller that has the request to stop, and the parts of the session around it. Its last
    version is committed or given up."""

    def __init__(self, *, waited_secs: float, committed: bool) -> None:
        self.context, self.memory, self.daemon = mock.Mock(), mock.Mock(), mock.Mock()
        self.context.config.grace_secs = GRACE_SECS
        self.session, self.worker = mock.Mock(), mock.Mock()
        self.worker.broken = self.worker.votes.stop_step = None
        request = SimpleNamespace(committed=committed, label="the label")
        self.session.submit.return_value = request
        self.stopping = StopController(self.context, lambda: self.memory.incarnation, self.daemon)
        self.stopping.install(self.session, self.worker)
        self.stopping.uninstall()
        self.stopping.requested = True
        self.stopping._since_secs = time.monotonic() - waited_secs


def test_p6_a_step_longer_than_half_the_grace_is_committed_and_persisted_before_the_end() -> None:
    """All ranks are told, as a rule; there is no time for another step, in which they could agree on one."""
    job = Stopped(waited_secs=20.0, committed=True)
    with pytest.raises(SystemExit):
        job.stopping.stop_if_due(7, 0.1)
    job.session.submit.assert_called_once_with(required=True)
    (secs,) = job.worker.drain.call_args.args
    assert 0 < secs < GRACE_SECS - 20.0
    label, secs = job.daemon.persist_now.call_args.args
    assert label == "the label"
    assert secs < GRACE_SECS - 20.0
    assert job.context.events.write.call_args.kwargs["committed"]


def test_the_job_ends_after_the_step_that_a_vote_names() -> None:
    job = Stopped(waited_secs=0.0, committed=True)
    job.worker.votes.stop_step, job.worker.votes.halt = 7, None
    job.stopping.stop_if_due(6, 0.1)
    assert not job.session.submit.called
    with pytest.raises(SystemExit) as ended:
        job.stopping.stop_if_due(7, 0.1)
    assert ended.value.code == 143
    job.session.submit.assert_called_once_with(required=True)
    job.session.close.assert_called_once_with()


@pytest.mark.parametrize("stepped", [True, False])
def test_where_no_step_begins_in_time_the_newest_version_is_persisted_and_the_process_exits(
    stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of ten minutes. Within a step the boundary is near, and its state is newer."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    job = Stopped(waited_secs=0.6 * GRACE_SECS, committed=True)
    job.session.closed, job.session.stepped = False, stepped
    job.context.stats.committed_step, job.memory.incarnation = 6, 2
    job.stopping._stop_between_steps()
    assert exits == ([143] if stepped else [])
    if stepped:
        label, secs = job.daemon.persist_now.call_args.args
        assert label == VersionId(2, 6)
        assert 0 < secs < 0.4 * GRACE_SECS
    else:
        assert not job.daemon.persist_now.called


@pytest.mark.integration
def test_p6_trainers_whose_snapshot_workers_have_lost_each_other_end_when_told_to(
    tmp_path: Path,
) -> None:
    job, memory = Path(__file__), [tmp_path / f"memory{rank}" for rank in range(2)]
    with ranks(job, cwd=tmp_path, out=tmp_path / "out", memory=memory) as started:
        for rank in range(2):
            started.said(rank, "ready")
        for process in started.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(DEADLINE_SECS) for process in started.processes]
    log = started.log.read_text()
    # The first to end takes the other's next collective along, unless that one ends of the signal too.
    assert 128 + signal.SIGTERM in codes, log
    assert -signal.SIGKILL not in codes, log
    assert "without a vote: the other ranks do not answer" in log


if __name__ == "__main__":
    main(Path(os.environ["TEST_OUT"]))
