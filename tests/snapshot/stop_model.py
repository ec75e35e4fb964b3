"""Stop, explored: the ranks of a job agree in their votes after which step all of them stop.

What a rank says in a vote is the real :func:`named_step` and :func:`may_lag`. Around them stand, per rank, the
training thread at its step boundaries and the worker that votes twice on every version; all ranks are explored
together, each moving at its own time:

- a step ends on a rank when all ranks have begun it: its collectives meet;
- any rank may be told to stop at any boundary; there it proposes the next step, hears what was agreed, waits
  for the vote on the step before (not while votes are late), and stops or hands the next version over;
- the vote on a version has a result when all ranks have cast theirs; each learns it at its own time.

One thing rests on time in production and is a rule here: votes that may lag do so by one step at most, so that
both votes on a version have been heard two steps later. Steps shorter than half a second, which wait for no vote
and propose one step more, rest on time alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from reft.snapshot.worker import may_lag, named_step

Job = tuple["Rank", ...]


@dataclass(frozen=True)
class Rules:
    steps: int = 5  # of the job
    ranks: int = 2  # of the job
    named: Callable[..., int] = named_step  # what a rank names


@dataclass(frozen=True)
class Rank:
    ended: int = 0  # the last step that has ended
    newest: int = 0  # the last one whose version was handed over
    told: bool = False  # whether it was told to stop
    proposal: int = 0  # after which step it would
    stop: int | None = None  # after which step all do, as it has heard
    late: bool = False  # whether votes may lag, as it has heard
    heard: int = 0  # votes of which it has learned the result; two to a version
    # what it says in the next: the step to stop after, and whether the votes after may lag
    cast: tuple[int, bool] | None = None
    result: tuple[int, bool] | None = None  # of that vote, once all have cast it
    stopped: int | None = None  # after which step it has stopped

    @property
    def voted_step(self) -> int:
        return (self.heard + 1) // 2


@dataclass(frozen=True)
class StopError(Exception):
    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((*self.trace, self.what))


def explore(rules: Rules) -> tuple[int, set[int]]:
    start: Job = (Rank(),) * rules.ranks
    found: dict[Job, tuple[Job, str] | None] = {start: None}
    queue = deque([start])
    stops: set[int] = set()
    while queue:
        job = queue.popleft()
        ends = {rank.stopped for rank in job}
        following = list(_moves(rules, job))
        stops |= {e for e in ends if e is not None and len(ends) == 1}
        if len(ends - {None}) > 1:
            raise StopError(
                f"ranks stop after steps {sorted(e for e in ends if e)}", _trace(found, job)
            )
        if (
            not following
            and None in ends
            and (len(ends) > 1 or any(r.ended < rules.steps for r in job))
        ):
            raise StopError("a rank waits for what does not come", _trace(found, job))
        for text, after in following:
            key = _sorted(after)
            if key not in found:
                found[key] = (job, text)
                queue.append(key)
    return len(found), stops


def _sorted(job: Job) -> Job:
    return tuple(sorted(job, key=repr))


def _trace(found: dict[Job, tuple[Job, str] | None], job: Job) -> tuple[str, ...]:
    told = []
    while (step := found[job]) is not None:
        job = step[0]
        told.append(step[1])
    return tuple(reversed(told))


def _moves(rules: Rules, job: Job) -> Iterator[tuple[str, Job]]:
    for i, rank in enumerate(job):
        peers = job[:i] + job[i + 1 :]
        for text, after in (*_training(rules, rank, peers), *_voting(rules, rank)):
            yield text, (*job[:i], after, *job[i + 1 :])
    cast = [rank.cast for rank in job if rank.cast is not None and rank.result is None]
    if len(cast) == len(job):
        result = (max(stop for stop, _ in cast), any(late for _, late in cast))
        yield (
            f"the vote says stop after {result[0]}, late {result[1]}",
            tuple(replace(rank, result=result) for rank in job),
        )


def _training(rules: Rules, rank: Rank, peers: Job) -> Iterator[tuple[str, Rank]]:
    if rank.stopped is not None:
        return
    step = rank.ended
    if rank.newest == step:  # handed over: the next step has begun
        begun = all(p.newest >= step for p in peers)
        if begun and step < rules.steps:
            yield f"step {step + 1} ends", replace(rank, ended=step + 1)
        return
    if not rank.told:
        told = replace(rank, told=True, proposal=step + 1)
        yield f"is told to stop behind step {step}", told
    elif rank.proposal != step + 1:
        yield f"proposes {step + 1}", replace(rank, proposal=step + 1)
        return
    if rank.heard < 2 * (step - 2) or (not rank.late and rank.voted_step < step - 1):
        return
    if rank.stop is not None and step >= rank.stop:
        yield f"stops after step {step}", replace(rank, stopped=step)
    else:
        yield f"hands {step} over", replace(rank, newest=step)


def _voting(rules: Rules, rank: Rank) -> Iterator[tuple[str, Rank]]:
    step = rank.heard // 2 + 1
    if rank.result is not None:
        stop, late = rank.result
        agreed = rank.stop if rank.stop is not None else stop or None
        heard = replace(rank, stop=agreed, late=late, heard=rank.heard + 1, cast=None, result=None)
        yield f"hears of the vote on {step}", heard
    elif rank.cast is None and rank.newest >= step:
        stop = rules.named(rank.proposal, step=step, newest_step=rank.newest, late=rank.late)
        for holds_up in (False, True):
            late = may_lag(holds_up, step=step, newest_step=rank.newest, late=rank.late)
            said = f"votes on {step}: stop after {stop}, late {late}"
            yield said, replace(rank, cast=(stop, late))
