"""What the agent of a node tells, and asks, whoever runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from reft.job.agreement import Agreement
from reft.job.exits import Failure


class Observer:
    """What happens around the trainers; the launcher overrides it."""

    def round_formed(self, agreement: Agreement) -> None:
        """All nodes are there; the trainers start after this."""

    def failure_seen(self) -> None:
        """A trainer of this node has failed; the others are still to be ended."""

    def hang(self, table: Any, index: int, pids: list[int], *, silent: bool) -> Failure | None:
        """Why running trainers have to be ended; None: they go on.

        Args:
            table: where the nodes of this round tell each other.
            index: of this node.
            pids: of its trainers.
            silent: a node of this round was struck out for its silence; the others may go on without it.
        """
        return None

    def round_over(self) -> None:
        """The trainers have failed, or restart for another reason."""

    def starting_workers(self) -> AbstractContextManager[None]:
        """Holds while the trainers are started."""
        return nullcontext()

    def workers_started(self, pids: list[int]) -> None: ...

    def trainers_run(self, group_rank: int) -> None:
        """The launcher has looked at the trainers, and all is well. ``group_rank``: of this node."""

    def state_changed(self, state: str, **facts: Any) -> None: ...

    def newest_step(self) -> int:
        """Step of the newest committed version; -1 if none is known of."""
        return -1

    def newest_incarnation(self) -> int:
        """Number of the newest start of the job that this node knows of; 0 if there was none."""
        return 0

    def fenced(self) -> str:
        """Why this node has to end, as its daemon was told by shared storage; empty if it goes on."""
        return ""
