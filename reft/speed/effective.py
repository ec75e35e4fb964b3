"""How much of a job's time was training that counts, from its start on, and what the rest was lost to. Pure.

The effective training time ratio is 1 - lost / elapsed. Lost are: the time in which no step was made (start,
recoveries), the steps that were made again after a rollback, what snapshots held up training, and what
stragglers cost. Steps are counted once, however often they were made.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

_Secs = Field(default=0.0, ge=0.0)


class Counts(BaseModel):
    """Of a job since it began, over all its restarts. Times in seconds.

    Attributes:
        began_unix_secs: when it began.
        elapsed_secs: that it was looked at since then.
        first_step, newest_step: that it began with, and that it has reached.
        last_step: made last; below ``newest_step`` while steps are made again.
        repeated_steps: made again after a rollback; ``repeated_secs``: their time.
        samples: that counted: of a step that was made twice once.
        flops: operations of the model for these samples, as far as they are known.
        starting_secs: until its first step.
        recovering_secs: in which no step was made later: trainers were gone, or loaded.
        snapshot_secs: in which training waited for versions.
        straggler_secs: that stragglers have cost, at most.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    began_unix_secs: float
    elapsed_secs: float = _Secs
    first_step: int | None = None
    newest_step: int | None = None
    last_step: int | None = None
    repeated_steps: int = 0
    repeated_secs: float = _Secs
    samples: int = 0
    flops: float = Field(default=0.0, ge=0.0)
    starting_secs: float = _Secs
    recovering_secs: float = _Secs
    snapshot_secs: float = _Secs
    straggler_secs: float = _Secs

    @property
    def lost_secs(self) -> dict[str, float]:
        """By what it was lost to."""
        return {
            "starting": self.starting_secs,
            "recovering": self.recovering_secs,
            "repeated steps": self.repeated_secs,
            "snapshots": self.snapshot_secs,
            "stragglers": self.straggler_secs,
        }

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio, 0 to 1; None before there was time."""
        if self.elapsed_secs <= 0.0:
            return None
        return max(0.0, 1.0 - sum(self.lost_secs.values()) / self.elapsed_secs)

    @property
    def samples_per_sec(self) -> float | None:
        """Over the whole time, losses included; None where the engine does not tell its batch."""
        return self.samples / self.elapsed_secs if self.samples and self.elapsed_secs > 0 else None


def counted(
    counts: Counts,
    *,
    elapsed_secs: float,
    step: int | None,
    training: bool,
    step_secs: float,
    samples_per_step: int,
    flops_per_sample: int = 0,
    stall_secs: float,
    straggler_secs: float,
) -> Counts:
    """After another look.

    Args:
        counts: at the look before.
        elapsed_secs: since then.
        step: last one made; None: no trainer tells.
        training: whether steps are being made.
        step_secs: that a step takes now.
        samples_per_step: of the whole job; 0: not known.
        flops_per_sample: operations of the model; 0: not known.
        stall_secs: that training waited for versions since the look before.
        straggler_secs: that stragglers cost in a step.
    """
    changes: dict[str, float | int | None] = {"elapsed_secs": counts.elapsed_secs + elapsed_secs}
    newest = counts.newest_step
    if not training:
        name = "starting_secs" if newest is None else "recovering_secs"
        changes[name] = getattr(counts, name) + elapsed_secs
    elif step is not None:
        changes["last_step"] = step
        if newest is None:
            changes |= {"first_step": step, "newest_step": step}
        elif step > newest:
            made = step - newest
            changes |= {
                "newest_step": step,
                "samples": counts.samples + made * samples_per_step,
                "flops": counts.flops + float(made * samples_per_step * flops_per_sample),
                "straggler_secs": counts.straggler_secs + made * straggler_secs,
            }
        changes["snapshot_secs"] = counts.snapshot_secs + stall_secs
    return counts.model_copy(update=changes)


def went_back(counts: Counts, *, resumed_step: int, step_secs: float) -> Counts:
    """The job goes on from ``resumed_step``: what it had made beyond that, it makes again."""
    last = counts.newest_step if counts.last_step is None else counts.last_step
    again = max(0, (last or 0) - resumed_step)
    return counts.model_copy(
        update={
            "last_step": resumed_step,
            "repeated_steps": counts.repeated_steps + again,
            "repeated_secs": counts.repeated_secs + again * step_secs,
        }
    )
