"""Clusters to plan for: a machine, its host memory, and how often its nodes fail. Nothing was fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from math import gamma
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reft.errors import ConfigError
from reft.json_file import read_object
from reft.protect.survival import Weibull
from reft.tools.planning.hardware import A100, GIB, H100, MI250X, V100, Machine

DAY_SECS = 86400.0
MEMORY_SHARE = 0.5
"""Part of a node's memory that reft may take by default: what Linux lets a tmpfs such as /dev/shm hold."""


@dataclass(frozen=True)
class Failure:
    """One cause by which nodes fail.

    Attributes:
        mtbf_days: mean time between failures of one node.
        shape: of the Weibull distribution; 1 is a constant rate, below 1 young nodes fail more often.
        source: where that comes from.
    """

    mtbf_days: float
    shape: float = 1.0
    source: str = ""

    @property
    def weibull(self) -> Weibull:
        return Weibull(self.mtbf_days * DAY_SECS / gamma(1 + 1 / self.shape), self.shape)


@dataclass(frozen=True)
class Cluster:
    """What a job runs on.

    Attributes:
        name: for people. machine: a node, from the view of one device.
        host_memory_bytes: of a node. failures: why nodes fail.
        storage_bytes_per_sec: at which a node writes while all do; None: not known.
    """

    name: str
    machine: Machine
    host_memory_bytes: int
    failures: tuple[Failure, ...]
    storage_bytes_per_sec: float | None = None

    def to_json(self) -> dict[str, Any]:
        """What :func:`load_cluster` reads."""
        return {
            "name": self.name,
            **{key: value for key, value in asdict(self.machine).items() if key != "name"},
            "host_memory_bytes": self.host_memory_bytes,
            "failures": [asdict(failure) for failure in self.failures],
            **({"storage_bytes_per_sec": speed} if (speed := self.storage_bytes_per_sec) else {}),
        }


_A100_FAILURES = Failure(
    1000 / 6.5, source="Kokolis et al. 2025: 6.5 failures in 1,000 node-days of a cluster of A100"
)
_H100_FAILURES = Failure(
    54 * 2048 / 419,
    source="The Llama 3 Herd of Models: 419 unexpected interruptions of 2,048 nodes in 54 days",
)
_ASSUMED = replace(_A100_FAILURES, source=f"assumed, none is published; {_A100_FAILURES.source}")

CLUSTERS: dict[str, Cluster] = {
    "v100": Cluster("v100", V100, 256 * GIB, (_ASSUMED,)),  # assumed: as much per GPU as in DGX-1
    "frontier": Cluster("frontier", MI250X, 512 * GIB, (_ASSUMED,)),  # Frontier user guide
    "a100": Cluster("a100", A100, 2048 * GIB, (_A100_FAILURES,)),  # DGX A100 640GB datasheet
    "h100": Cluster("h100", H100, 2048 * GIB, (_H100_FAILURES,)),  # DGX H100 datasheet
}


class _Failure(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mtbf_days: float = Field(gt=0)
    shape: float = Field(1.0, gt=0)
    source: str = ""


class _File(BaseModel):
    """A cluster as people write it. With ``like`` only what differs is needed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    like: str | None = None
    name: str | None = None
    devices_per_node: int | None = Field(None, ge=1)
    peak_flops: float | None = Field(None, gt=0)
    achieved_flops: float | None = Field(None, gt=0)
    memory_bytes: int | None = Field(None, gt=0)
    memory_bytes_per_sec: float | None = Field(None, gt=0)
    host_link_bytes_per_sec: float | None = Field(None, gt=0)
    devices_per_host_link: int | None = Field(None, ge=1)
    network_bytes_per_sec: float | None = Field(None, gt=0)
    network_over_host_link: bool | None = None
    network_through_host: bool | None = None
    host_memory_bytes: int | None = Field(None, gt=0)
    failures: tuple[_Failure, ...] | None = Field(None, min_length=1)
    storage_bytes_per_sec: float | None = Field(None, gt=0)


_EXAMPLE = (
    '{"like": "h100", "devices_per_node": 4, "host_memory_bytes": 1e12, "failures": [{"mtbf_days": 200}]}'
)


def load_cluster(name: str) -> Cluster:
    """A known cluster, or one from a JSON file.

    Raises:
        ConfigError: unknown, unreadable or incomplete; says what to write.
    """
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
    return _from_file(path, read_object(path, "the cluster file", f"an object such as {_EXAMPLE}"))


def _from_file(path: Path, values: Mapping[str, Any]) -> Cluster:
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error
    base = None
    if file.like is not None:
        base = CLUSTERS.get(file.like.lower())
        if base is None:
            raise ConfigError(
                f'the cluster file {path}: "like" is {file.like!r}; known: {", ".join(CLUSTERS)}'
            )
    given = {key: value for key, value in file.model_dump().items() if value is not None}
    start = (
        base.to_json()
        if base is not None
        else {"network_over_host_link": True, "network_through_host": False}
    )
    merged = {**start, **given, "name": file.name or path.stem}
    wanted = (*(field.name for field in fields(Machine)), "host_memory_bytes", "failures")
    if missing := [key for key in wanted if key not in merged]:
        raise ConfigError(
            f"the cluster file {path} lacks {', '.join(missing)}; write them, or begin with a known cluster "
            f"and change what differs: {_EXAMPLE}. 'reft plan --print-cluster h100' prints a whole one"
        )
    if merged["achieved_flops"] > merged["peak_flops"]:
        raise ConfigError(
            f"the cluster file {path}: achieved_flops {merged['achieved_flops']:.3g} exceed peak_flops "
            f"{merged['peak_flops']:.3g}; write what training really reaches, usually 0.3 to 0.5 of the peak"
        )
    return Cluster(
        name=merged["name"],
        machine=Machine(**{field.name: merged[field.name] for field in fields(Machine)}),
        host_memory_bytes=merged["host_memory_bytes"],
        failures=tuple(Failure(**failure) for failure in merged["failures"]),
        storage_bytes_per_sec=merged.get("storage_bytes_per_sec"),
    )


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"the cluster file {path} cannot be used:"]
    for item in error.errors():
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            known = list((_Failure if "failures" in item["loc"] else _File).model_fields)
            near = get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known)}"
            lines.append(f"  {where}: unknown key; {hint}")
        else:
            lines.append(f"  {where}: {item['msg']} (found {item['input']!r})")
    lines.append(f"  an example: {_EXAMPLE}")
    return "\n".join(lines)
