"""Clusters to plan for, by published figures: a node from the view of one device, and how often nodes fail.

The known ones are the files of ``clusters/``; docs/planning.md has the source of every number. Nothing was
fitted to a result of reft or of its papers.
"""

from __future__ import annotations

from difflib import get_close_matches
from math import gamma
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from reft.config import read_object
from reft.errors import ConfigError
from reft.protect.placement import Weibull

DAY_SECS = 86400.0

LINK_EFFICIENCY = 0.8
"""Part of a link's line rate that large pinned copies reach: packet headers and flow control leave 80 to
85 % (NVIDIA's bandwidthTest: 12 to 13 GB/s on PCIe 3.0 x16)."""
MEMORY_SHARE = 0.5
"""Part of a node's memory that reft may take by default: what Linux lets a tmpfs such as /dev/shm hold."""


class Failure(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mtbf_days: PositiveFloat  # mean time between failures of one node
    # of the Weibull distribution; 1 is a constant rate, below 1 young nodes fail more often
    shape: PositiveFloat = 1.0
    source: str = ""  # where that comes from

    @property
    def weibull(self) -> Weibull:
        return Weibull(self.mtbf_days * DAY_SECS / gamma(1 + 1 / self.shape), self.shape)


class Cluster(BaseModel):
    """Its nodes, from the view of one of their devices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    devices_per_node: PositiveInt  # GPUs (on MI250X: GCDs)
    # half precision with matrix units, dense. achieved_flops: in published LLM training.
    peak_flops: PositiveFloat
    achieved_flops: PositiveFloat
    memory_bytes: PositiveInt  # device memory. memory_bytes_per_sec: its bandwidth.
    memory_bytes_per_sec: PositiveFloat
    host_link_bytes_per_sec: PositiveFloat  # line rate of the link to the host, one direction
    devices_per_host_link: PositiveInt  # devices that share it when all copy at once
    network_bytes_per_sec: PositiveFloat  # of the whole node, one direction
    network_over_host_link: bool = True  # traffic of the network takes the device's host link
    network_through_host: bool = False  # and is staged in host memory, so it takes the shared part too
    host_memory_bytes: PositiveInt  # of a node. failures: why nodes fail.
    failures: tuple[Failure, ...] = Field(min_length=1)
    storage_bytes_per_sec: PositiveFloat | None = None  # at which a node writes while all do; None: not known

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def copy_bytes_per_sec(self) -> float:
        """Device to pinned host memory, all devices at once: D2H in the tables."""
        return LINK_EFFICIENCY * self.host_link_bytes_per_sec / self.devices_per_host_link

    @property
    def network_share_bytes_per_sec(self) -> float:
        """One device's share of the node's network."""
        return self.network_bytes_per_sec / self.devices_per_node

    def compute_slowdown(self, copy_bytes_per_sec: float) -> float:
        """How many times longer a computation takes during a copy.

        The copy takes its part of the memory's bandwidth; a computation bound by memory loses all of
        that part, so this is an upper bound for the others. Nothing else is shared: copy engines
        use no compute units.
        """
        return 1.0 + copy_bytes_per_sec / self.memory_bytes_per_sec

    def link_slowdown(self, copy_bytes_per_sec: float) -> float:
        """How many times longer transfers and copies take at the same time.

        On a link that both need and that cannot carry both, each is slowed alike.
        """
        if not self.network_over_host_link:
            return 1.0
        sharing = self.devices_per_host_link if self.network_through_host else 1
        link = LINK_EFFICIENCY * self.host_link_bytes_per_sec / sharing
        return max(1.0, (copy_bytes_per_sec + self.network_share_bytes_per_sec) / link)


_FILES = Path(__file__).with_name("clusters")
CLUSTERS = {
    name: Cluster.model_validate_json((_FILES / f"{name}.json").read_text())
    for name in ("v100", "frontier", "a100", "h100")
}
_EXAMPLE = (
    '{"like": "h100", "devices_per_node": 4, "host_memory_bytes": 1e12, "failures": [{"mtbf_days": 200}]}'
)


def load_cluster(name: str) -> Cluster:
    """A known cluster, or one from a JSON file, in which ``like`` names the known one that it differs
    from."""
    if (known := CLUSTERS.get(name.lower())) is not None:
        return known
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        near = get_close_matches(name.lower(), CLUSTERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"no cluster named {name!r}; {hint}known: {', '.join(CLUSTERS)}, or the path of a .json file "
            f"such as {_EXAMPLE}"
        )
    given = dict(read_object(path, "the cluster file", f"an object such as {_EXAMPLE}"))
    base: dict[str, Any] = {}
    if (like := given.pop("like", None)) is not None:
        if str(like).lower() not in CLUSTERS:
            raise ConfigError(f'the cluster file {path}: "like" is {like!r}; known: {", ".join(CLUSTERS)}')
        base = CLUSTERS[like.lower()].to_json()
    try:
        found = Cluster.model_validate({**base, "name": path.stem, **given})
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error
    if found.achieved_flops > found.peak_flops:
        raise ConfigError(
            f"the cluster file {path}: achieved_flops {found.achieved_flops:.3g} exceed peak_flops "
            f"{found.peak_flops:.3g}; write what training really reaches, usually 0.3 to 0.5 of the peak"
        )
    return found


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"the cluster file {path} cannot be used:"]
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            known = list((Failure if "failures" in item["loc"] else Cluster).model_fields)
            near = get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: like, {', '.join(known)}"
            lines.append(f"  {where}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"  {where}: missing; write it, or begin with a known cluster")
        else:
            lines.append(f"  {where}: {item['msg']} (found {item['input']!r})")
    lines.append(f"  an example: {_EXAMPLE}; 'reft plan --print-cluster h100' prints a whole one")
    return "\n".join(lines)
