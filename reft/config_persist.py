"""The part ``persist`` of the ``reft`` block."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AUTO = "auto"


class Block(BaseModel):
    """The ``reft`` block or a part of it: no unknown keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PersistConfig(Block):
    """Low-frequency checkpoints on storage, written from host memory in the background."""

    dir: Path | None = Field(None, description="directory that every node sees; null switches it off")
    interval_steps: int | Literal["auto"] = Field(
        0,
        description="write the newest committed version every so many steps; 0: only on SIGTERM; 'auto': as "
        "often as failures make it worth what it costs, measured while the job runs",
    )
    max_overhead: float = Field(
        0.035, gt=0, le=1, description="part of the training time that storage may cost, for 'auto'"
    )
    max_lost_steps: int | None = Field(
        None,
        ge=2,
        description="most steps to make again when memory has failed, for 'auto', which then writes at least "
        "twice as often, whatever that costs; null: no bound",
    )
    node_mtbf_days: float = Field(
        150.0,
        gt=0,
        description="mean time between failures of a node, for 'auto'; what the job's own history tells is "
        "added to it",
    )
    survival: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="wished probability, such as 0.999, that memory alone carries the job from one version "
        "on storage to the next, for 'auto'; null: what failures make worth it",
    )
    keep: int = Field(2, ge=1, description="newest persisted checkpoints to keep")
    timeout_secs: float = Field(
        600.0, gt=0, description="give a checkpoint up when a peer's part has not appeared for so long"
    )

    @property
    def fixed_steps(self) -> int:
        """The interval that is written in the block; 0 where there is none."""
        return 0 if self.interval_steps == AUTO else int(self.interval_steps)

    @property
    def adapts(self) -> bool:
        """Whether the job finds the interval itself."""
        return self.interval_steps == AUTO

    @model_validator(mode="after")
    def _check(self) -> PersistConfig:
        if self.fixed_steps < 0:
            raise ValueError(
                f"persist.interval_steps is {self.fixed_steps}; write a number of steps, "
                f'0 to write only when the job is told to stop, or "auto"'
            )
        keys = ("max_overhead", "max_lost_steps", "node_mtbf_days", "survival")
        given = [k for k in keys if getattr(self, k) != PersistConfig.model_fields[k].default]
        if given and not self.adapts:
            raise ValueError(
                f'persist.{given[0]} belongs to "interval_steps": "auto"; found '
                f'"interval_steps": {self.interval_steps}. Write "auto", or remove it'
            )
        return self
