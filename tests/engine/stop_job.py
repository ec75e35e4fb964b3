"""Two data-parallel ranks whose snapshot workers have lost each other, and that are told to stop."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from reft.engine.deepspeed import session_of
from reft.errors import TransferError
from tests.engine.ranks import join_group
from tests.engine.traffic_job import make, train


def main(out: Path) -> None:
    logging.basicConfig()
    join_group()
    rank = int(os.environ["RANK"])
    os.environ["REFT_NODE_ID"] = f"node{rank}"
    engine = make(0, {"enabled": True, "job_id": "stop", "grace_secs": 4})
    engine.load_checkpoint(str(out / "none"))
    train(engine)
    session = session_of(engine)
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


if __name__ == "__main__":
    main(Path(os.environ["TEST_OUT"]))
