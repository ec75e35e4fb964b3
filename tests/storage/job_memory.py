"""The memory of a job as trainers leave it: arenas in one job directory per node, with files of DeepSpeed's form."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reft.config import PersistConfig, ReftConfig
from reft.grid import Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.jobdir import JobDir
from reft.snapshot.plan import SectionSizes
from reft.state import codec
from reft.state.catalogue import Manifest, SectionImage
from reft.storage.deepspeed_format import Template, read_shape
from reft.storage.persisted import (
    PersistedInfo,
    check_arenas,
    check_files,
    list_persisted,
    read_marker,
)
from reft.storage.template import TemplateBuilder
from tests.recover.fleet import JOB, SECRET, Fleet, place

DEGREES = Degrees(2, 2, 1)
NODES = ["n0", "n1"]
PEER_SECS = 150.0
"""How long a node waits for a peer, which may have to start and to import torch on a busy machine."""

Images = Mapping[Coordinate, Mapping[Section, bytes]]
"""Image bytes of every coordinate."""


@dataclass(frozen=True)
class Written(Fleet):
    images: Images = field(default_factory=dict)

    def sizes(self, pp: int, tp: int) -> SectionSizes:
        group = [self.images[Coordinate(pp, dp, tp)] for dp in range(self.topology.degrees.dp)]
        owned, host = (tuple(len(of[s]) for of in group) for s in (Section.OWNED, Section.HOST))
        return SectionSizes(len(group[0][Section.REPLICATED]), owned, host)

    def image(self, at: Coordinate, section: Section, label: VersionId) -> np.ndarray:
        return np.frombuffer(self.images[at][section], np.uint8)

    def directory(self, root: Path, node: str) -> Path:
        return JobDir.open_or_create(root / node, self.job_id, node, SECRET).path


@dataclass(frozen=True)
class Memory:
    """A job's memory on its nodes; by default a node holds one dp index of all stages."""

    root: Path
    topology: Topology = field(default_factory=lambda: place(DEGREES, "replica"))
    copies: int = 1

    def job_dir(self, node: str) -> JobDir:
        return JobDir.open_or_create(self.root / node, JOB, node, SECRET)

    def config(self, directory: Path, **persist: Any) -> ReftConfig:
        return ReftConfig(
            enabled=True,
            job_id=JOB,
            memory_dir=self.root / "n0",
            persist=PersistConfig(dir=directory, **{"timeout_secs": PEER_SECS, **persist}),
        )

    def write(
        self,
        label: VersionId,
        images: Images,
        slot: int = 0,
        only: Iterable[Coordinate] | None = None,
    ) -> None:
        """Commit one version on every node, or the arenas of some ranks only."""
        written = Written(self.topology, self.copies, block_bytes=4096, images=images)
        for at in self.topology.coordinates if only is None else only:
            written.write_arena(self.root, at, label, slot)


def on_one_node(root: Path) -> Memory:
    return Memory(root, Topology(DEGREES, DEGREES.coordinates(), ("n0",) * DEGREES.world_size))


def made_up_images(step: int) -> dict[Coordinate, dict[Section, bytes]]:
    """A version of a model that no engine ever trained, with templates like DeepSpeed's files."""
    return {at: _made_up_rank(at, step) for at in DEGREES.coordinates()}


def expected_files(at: Coordinate, step: int) -> dict[str, Any]:
    """What ``torch.load`` has to give for the files of one coordinate."""
    files = _files(at, *_tensors(at, step), step)
    for name, content in files.items():
        if name.startswith("mp_rank"):
            content["note"] = f"step {step} of {at}"
    return files


def _tensors(at: Coordinate, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = torch.Generator().manual_seed(1000 * step + at.pp)
    own = torch.Generator().manual_seed(1000 * step + 100 + 10 * at.pp + at.dp)
    weight = torch.randn(5000, generator=shared)
    bias = torch.randn(7, generator=shared).to(torch.bfloat16)
    return weight, bias, torch.randn(5000, generator=own)


def _files(
    at: Coordinate, weight: torch.Tensor, bias: torch.Tensor, moment: torch.Tensor, step: int
) -> dict[str, dict[str, Any]]:
    optimizer = {"optimizer_state_dict": {"exp_avg": moment}, "ds_version": "0.0"}
    files: dict[str, dict[str, Any]] = {
        f"zero_pp_rank_{at.dp}_mp_rank_{at.pp:02d}_optim_states.pt": optimizer
    }
    if at.dp == 0:
        module = {"weight": weight, "bias": bias, "tied": weight}
        files[f"mp_rank_{at.pp:02d}_model_states.pt"] = {"module": module, "global_steps": step}
    return files


def host_state(at: Coordinate, step: int) -> dict[str, Any]:
    adapter: dict[str, Any] = {"wrapper": "w", "optimizer": "o", "layout": [], "param_groups": []}
    return {
        "engine": {"global_steps": step},
        "lr_scheduler": None,
        "adapter": {**adapter, "attributes": {}, "loss_scale": {}},
        "client": {"note": f"step {step} of {at}"},
        "rng": zlib.crc32(f"{at}{step}".encode()),
    }


def _made_up_rank(at: Coordinate, step: int) -> dict[Section, bytes]:
    weight, bias, moment = _tensors(at, step)
    images = (
        SectionImage([("weight", weight), ("bias", bias)]),
        SectionImage([("moment", moment)]),
    )
    state = host_state(at, step)
    contents = _files(at, weight, bias, moment, step)

    def resolve(path: tuple[Any, ...], value: Any) -> tuple[Any, ...] | None:
        return ("engine", "global_steps") if path == ("global_steps",) else None

    template = Template(
        files={n: TemplateBuilder(n, images, resolve, state).build(c) for n, c in contents.items()},
        client_files=tuple(n for n in contents if n.startswith("mp_rank")),
        recovery_scripts=False,
        shape=read_shape(state),
        versions={},
    )
    blob = {
        "manifest": Manifest.of(images).encode(),
        "template": template.encode(),
        "state": codec.encode(state),
    }
    return {
        Section.REPLICATED: image_bytes(images[0]),
        Section.OWNED: image_bytes(images[1]),
        Section.HOST: codec.encode(blob),
    }


def image_bytes(image: SectionImage) -> bytes:
    out = torch.empty(image.nbytes, dtype=torch.uint8)
    image.read_into(0, out)
    return out.numpy().tobytes()


# -- what is on storage -----------------------------------------------------------------------------------


def latest_persisted(directory: Path, job_id: str | None = None) -> PersistedInfo | None:
    """The newest complete checkpoint in a job's directory."""
    found = list_persisted(directory, job_id)
    return found[-1] if found else None


def verify_persisted(directory: Path, tag: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, the newest one without a tag; empty if all is well."""
    info = latest_persisted(directory) if tag is None else read_marker(directory / tag)
    assert info is not None
    missing = check_files(info.path, info.files, read=not info.arenas)
    return missing or (check_arenas(info.path, info.files) if info.arenas else [])
