"""What a job in the storm has to have kept to, out of the events that its processes wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reft.tools.demo.history import History
from tests.attack.storm_job import Chapter
from tests.faults.job import Losses, Recovery, recoveries, wrong_losses


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    problems: tuple[str, ...]  # promises that were broken
    recoveries: tuple[Recovery, ...]  # returns to training
    losses: int  # that were compared, every repetition counted


def judge(chapters: Sequence[tuple[Chapter, History]], reference: Losses) -> Verdict:
    """Judge a job. ``chapters``: with their events, oldest first. ``reference``: losses of the undisturbed
    run, at least as long as the job."""
    problems: list[str] = []
    found: list[Recovery] = []
    losses = 0
    for chapter, history in chapters:
        problems += wrong_losses(history, reference)
        problems += unknown_steps(history, reference)
        problems += wrong_beginning(chapter.restored, history)
        losses += sum(len(values) for values in history.losses.values())
        for r in recoveries(history):
            found.append(r)
            if r.version < r.commit:
                problems.append(
                    f"resumed from step {r.version} ({r.source}), but step {r.commit} had been committed"
                )
    return Verdict(tuple(problems), tuple(found), losses)


def unknown_steps(history: History, reference: Losses) -> list[str]:
    """Losses with nothing to be compared with would pass unseen."""
    late = sorted(set(history.losses) - set(reference))
    return [f"steps {late[0]} to {late[-1]}: the undisturbed run has none of them"] if late else []


def wrong_beginning(restored: int, history: History) -> list[str]:
    """Whether the first life of a chapter that trained went on from the checkpoint on disk."""
    first = next((life for _, life in sorted(history.incarnations.items()) if life.steps), None)
    if not restored or first is None:
        return []
    versions = {int(e.fields["version"]) for e in first.restored.values()}
    sources = {str(e.fields["source"]) for e in first.restored.values()}
    if versions == {restored} and sources == {"disk"}:
        return []
    return [
        f"without memory, step {restored} had to come from disk; ranks restored steps {sorted(versions)} from "
        f"{sorted(sources)}"
    ]
