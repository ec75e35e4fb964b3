"""The order that torch's ``DistributedSampler`` deals out to the replicas: the same at every degree, so that
a position in it is one of the whole job. Pure but for :func:`dealt_by`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler


@dataclass(frozen=True)
class Dealt:
    """A pass of which every replica has a share.

    Attributes:
        samples: of the data set.
        replicas: that share them: sample ``n`` of the order is replica ``n % replicas``'s.
        batch_size: samples of one replica's batch.
        drop_last: whether the loader leaves a smaller last batch out.
        cuts: whether the sampler leaves out what the replicas cannot share evenly; else it repeats samples.
    """

    samples: int
    replicas: int
    batch_size: int
    drop_last: bool
    cuts: bool

    @property
    def batches(self) -> int:
        """Of one replica, in a pass."""
        share = self.samples // self.replicas if self.cuts else -(-self.samples // self.replicas)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)

    def at(self, replicas: int) -> Dealt:
        """The same pass at another degree."""
        return replace(self, replicas=replicas)

    def taken_at(self, taken: int, replicas: int) -> int | None:
        """Batches that a replica has taken where the job has consumed what it has after ``taken`` batches of
        this degree; None where a batch of the other degree does not begin there."""
        other = self.at(replicas)
        if taken >= self.batches:
            return other.batches
        batches, rest = divmod(taken * self.batch_size * self.replicas, self.batch_size * replicas)
        return None if rest else min(batches, other.batches)

    def encode(self) -> dict[str, Any]:
        return asdict(self)


def dealt_by(loader: Any) -> Dealt | None:
    """What a ``DataLoader`` deals out; None where its order or its batches are made otherwise."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
        return None
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    sizes = int(batches.batch_size), bool(batches.drop_last)
    return Dealt(samples, int(sampler.num_replicas), *sizes, bool(sampler.drop_last))
