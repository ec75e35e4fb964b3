"""The name of a version: which incarnation took it, and after which optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


def committed_key(job_id: str) -> str:
    """Where the rendezvous store holds the newest committed version of a job."""
    return f"reft/{job_id}/committed"


@dataclass(frozen=True, order=True)
class Label:
    """A version of the job's state.

    Ordered by incarnation first: a later incarnation starts from the best version there was, so what
    it commits replaces everything older, also where a node that was cut off ran further.

    Attributes:
        incarnation: 1 for the first start of the job, one more after every restart.
        step: optimizer steps that the state has seen (DeepSpeed's ``global_steps``).
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"
