"""After which step all ranks stop: what one rank says of it in a vote. Pure: in production
:class:`~reft.snapshot.committing.votes.Votes` says it, and tests/snapshot/stop_model.py explores it."""

from __future__ import annotations


def named_step(proposal: int, *, step: int, newest_step: int, late: bool) -> int:
    """The step to stop after that a rank names in the vote on the version of ``step``: one that no rank has
    passed when it hears of it.

    Args:
        proposal: the step after which it would stop; 0: it would not.
        step: whose version is voted on.
        newest_step: the last one whose version was handed over here.
        late: votes may lag behind training, as the ranks agreed in the last one.
    """
    if proposal and (late or step < newest_step):
        return max(proposal, newest_step + 2)
    return proposal


def may_lag(holds_up: bool, *, step: int, newest_step: int, late: bool) -> bool:
    """Whether a rank says in the vote on the version of ``step`` that the next votes may lag behind training.

    Args:
        holds_up: before the next vote, it has more to do than seal the version.
        step, newest_step, late: as for :func:`named_step`.
    """
    return holds_up or (late and step < newest_step)
