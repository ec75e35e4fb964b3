"""A sampler whose position is part of the snapshot (promise P8).

The order of epoch ``e`` is a permutation of the samples by (seed, e). The position counts samples
that were *consumed* by the whole job, so it is the same number on every rank, and the global batch
of a step depends on (seed, position) only: not on ranks, degrees or restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reft.data.permutation import Permutation
from reft.errors import ConfigError

_STATE_VERSION = 1


class ResumableSampler:
    """Endless micro-batches of sample indices for one data-parallel rank.

    A micro-batch of the job is ``micro_batch * dp_size`` consecutive positions; rank ``r`` gets the
    ``r``-th slice. Epochs follow each other without a gap: each sample exactly once in each.

    Args:
        num_samples: samples of an epoch.
        seed: chooses the order.
        micro_batch: samples per rank and micro-batch.
        dp_rank: this rank's replica.
        dp_size: number of replicas.
    """

    position_of_job = True
    """Its state is the same on all replicas, and right at every degree."""

    def __init__(
        self, num_samples: int, *, seed: int, micro_batch: int, dp_rank: int = 0, dp_size: int = 1
    ) -> None:
        if num_samples < 1:
            raise ConfigError("the data holds no sample; give more text with --data, or lower --seq")
        if micro_batch < 1 or not 0 <= dp_rank < dp_size:
            raise ConfigError(
                f"found micro-batch {micro_batch}, replica {dp_rank} of {dp_size}; expected a positive "
                f"micro-batch and a replica below the number of replicas"
            )
        self.num_samples = num_samples
        self.seed = seed
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._consumed_total = 0
        self._orders: dict[int, Permutation] = {}

    @property
    def consumed_total(self) -> int:
        """Samples the job has consumed since the first epoch began."""
        return self._consumed_total

    @property
    def epoch(self) -> int:
        return self._consumed_total // self.num_samples

    @property
    def consumed(self) -> int:
        """Samples of the running epoch that were consumed."""
        return self._consumed_total % self.num_samples

    def __iter__(self) -> ResumableSampler:
        return self

    def __next__(self) -> npt.NDArray[np.int64]:
        first = self._consumed_total + self.dp_rank * self.micro_batch
        indices = self.indices(np.arange(first, first + self.micro_batch, dtype=np.int64))
        self._consumed_total += self.micro_batch * self.dp_size
        return indices

    def indices(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sample index at each global position, counted over all epochs."""
        result = np.empty_like(positions)
        epochs = positions // self.num_samples
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            result[mine] = self._order(int(epoch))(positions[mine] % self.num_samples)
        return result

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            self._orders = {e: p for e, p in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = Permutation(self.num_samples, self.seed, epoch)
        return self._orders[epoch]

    def seek(self, consumed_total: int) -> None:
        """Go to the position after ``consumed_total`` samples of the whole job."""
        if consumed_total < 0:
            raise ValueError(f"cannot seek to sample {consumed_total}; expected 0 or more")
        self._consumed_total = consumed_total

    def state_dict(self) -> dict[str, Any]:
        """Plain values; equal on every rank that read the same number of micro-batches."""
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "epoch": self.epoch,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the samples that ``state`` says were consumed.

        Raises:
            ConfigError: the state belongs to other data or another seed: the order would differ.
        """
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(
                f"data position has version {state.get('version')!r}; this reft reads {_STATE_VERSION}"
            )
        for key, have in (("num_samples", self.num_samples), ("seed", self.seed)):
            if state[key] != have:
                raise ConfigError(
                    f"the data position was taken with {key} {state[key]}, but this job has {have}; "
                    f"resume with the same --data, --seq and --seed, or start from an empty directory"
                )
        self.seek(int(state["epoch"]) * self.num_samples + int(state["consumed"]))
