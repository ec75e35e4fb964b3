"""The memory of a job as trainers leave it: arenas in one job directory per node."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reft.config import PersistConfig, ReftConfig
from reft.grid import Coordinate, Degrees
from reft.memory.arena import Arena, arena_name
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum
from reft.memory.jobdir import JobDir
from reft.naming import Label
from reft.protect.blocks import Section
from reft.protect.placement import place_group
from reft.snapshot.plan import SectionSizes, make_shard_plan
from reft.state import codec
from reft.state.catalogue import Manifest, SectionImage
from reft.state.deepspeed_format import Template, shape_of
from reft.state.template import TemplateBuilder

SECRET = bytes(range(32))
JOB = "job-a"
DEGREES = Degrees(2, 2, 1)
PEER_SECS = 150.0
"""How long a node waits for a peer, which may have to start and to import torch on a busy machine."""


@dataclass(frozen=True)
class RankImages:
    """Image bytes of one coordinate."""

    replicated: bytes
    owned: bytes
    host: bytes

    def of(self, section: Section) -> bytes:
        return {Section.REPLICATED: self.replicated, Section.OWNED: self.owned, Section.HOST: self.host}[
            section
        ]


@dataclass(frozen=True)
class Memory:
    """A job's memory on its nodes.

    ``nodes`` maps each coordinate to its node; by default a node holds one dp index of all stages.
    """

    root: Path
    degrees: Degrees = DEGREES
    job_id: str = JOB
    copies: int = 1
    block_bytes: int = 4096
    nodes: Mapping[Coordinate, str] = field(default_factory=dict)

    def node_of(self, at: Coordinate) -> str:
        return self.nodes.get(at, f"n{at.dp}")

    def job_dir(self, node: str) -> JobDir:
        return JobDir.open_or_create(self.root / node, self.job_id, node, SECRET)

    def config(self, directory: Path, **persist: Any) -> ReftConfig:
        return ReftConfig(
            enabled=True,
            job_id=self.job_id,
            memory_dir=self.root / "n0",
            persist=PersistConfig(dir=directory, **{"timeout_secs": PEER_SECS, **persist}),
        )

    def write(self, label: Label, images: Mapping[Coordinate, RankImages], slot: int = 0) -> None:
        """Commit one version on every node."""
        for at in self.degrees.coordinates():
            group = [images[Coordinate(at.pp, d, at.tp)] for d in range(self.degrees.dp)]
            self.write_arena(at, label, group, slot)

    def write_arena(self, at: Coordinate, label: Label, group: list[RankImages], slot: int = 0) -> None:
        """Commit the arena of one rank. ``group`` has the images of every member; without copies only
        the rank's own matter."""
        names = [self.node_of(Coordinate(at.pp, d, at.tp)) for d in range(len(group))]
        sizes = SectionSizes(
            len(group[0].replicated),
            tuple(len(g.owned) for g in group),
            tuple(-(-len(g.host) // 4096) * 4096 for g in group),
        )
        plan = make_shard_plan(sizes, place_group(names, self.copies), self.block_bytes).members[at.dp]
        node = self.node_of(at)
        job = self.job_dir(node)
        local = [c for c in self.degrees.coordinates() if self.node_of(c) == node].index(at)
        header = ArenaHeader(self.job_id, node, self.degrees, at, label, ArenaState.WRITING, layout="layout")
        path = job.path / arena_name(local, slot)
        with Arena.create(path, plan.data_bytes, len(plan.blocks) + 8, job.secret) as arena:
            arena.begin(header)
            entries = []
            for placed in plan.blocks:
                image = group[placed.key.member].of(placed.key.section)
                start = placed.block.start_bytes
                piece = image[start : min(len(image), start + placed.block.nbytes)]
                if not piece:
                    continue
                arena.data[placed.arena_offset : placed.arena_offset + len(piece)] = piece
                entries.append(
                    Entry(
                        placed.key,
                        start,
                        len(piece),
                        len(image),
                        placed.arena_offset,
                        checksum(piece),
                        placed.key.member == at.dp,
                    )
                )
            arena.seal(entries)
            arena.commit()


def made_up_images(degrees: Degrees, step: int, numel: int = 5000) -> dict[Coordinate, RankImages]:
    """A version of a model that no engine ever trained, with templates like DeepSpeed's files."""
    return {at: _made_up_rank(at, step, numel) for at in degrees.coordinates()}


def expected_files(at: Coordinate, step: int, numel: int = 5000) -> dict[str, Any]:
    """What ``torch.load`` has to give for the files of one coordinate."""
    weight, bias, moment = _tensors(at, step, numel)
    files: dict[str, Any] = {
        f"zero_pp_rank_{at.dp}_mp_rank_{at.pp:02d}_optim_states.pt": {
            "optimizer_state_dict": {"exp_avg": moment},
            "ds_version": "0.0",
        }
    }
    if at.dp == 0:
        files[f"mp_rank_{at.pp:02d}_model_states.pt"] = {
            "module": {"weight": weight, "bias": bias, "tied": weight},
            "global_steps": step,
            "note": f"step {step} of {at}",
        }
    return files


def _tensors(at: Coordinate, step: int, numel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = torch.Generator().manual_seed(1000 * step + at.pp)
    own = torch.Generator().manual_seed(1000 * step + 100 + 10 * at.pp + at.dp)
    weight = torch.randn(numel, generator=shared)
    bias = torch.randn(7, generator=shared).to(torch.bfloat16)
    return weight, bias, torch.randn(numel, generator=own)


def host_state(at: Coordinate, step: int) -> dict[str, Any]:
    adapter = {
        "wrapper": "w",
        "optimizer": "o",
        "layout": [],
        "param_groups": [],
        "attributes": {},
        "loss_scale": {},
    }
    return {
        "engine": {"global_steps": step},
        "lr_scheduler": None,
        "adapter": adapter,
        "client": {"note": f"step {step} of {at}"},
        "rng": zlib.crc32(f"{at}{step}".encode()),
    }


def _made_up_rank(at: Coordinate, step: int, numel: int) -> RankImages:
    weight, bias, moment = _tensors(at, step, numel)
    images = (SectionImage([("weight", weight), ("bias", bias)]), SectionImage([("moment", moment)]))
    state = host_state(at, step)
    contents: dict[str, Any] = {}
    for name, content in expected_files(at, step, numel).items():
        contents[name] = {k: v for k, v in content.items() if k != "note"}
        if "module" in contents[name]:
            contents[name]["module"] = {"weight": weight, "bias": bias, "tied": weight}
        else:
            contents[name]["optimizer_state_dict"] = {"exp_avg": moment}

    def resolve(path: tuple[Any, ...], value: Any) -> tuple[Any, ...] | None:
        return ("engine", "global_steps") if path == ("global_steps",) else None

    template = Template(
        files={n: TemplateBuilder(n, images, resolve, state).build(c) for n, c in contents.items()},
        client_files=tuple(n for n in contents if n.startswith("mp_rank")),
        recovery_scripts=False,
        shape=shape_of(state),
        versions={},
    )
    blob = {
        "manifest": Manifest.of(images).encode(),
        "template": template.encode(),
        "state": codec.encode(state),
    }
    return RankImages(image_bytes(images[0]), image_bytes(images[1]), codec.encode(blob))


def image_bytes(image: SectionImage) -> bytes:
    out = torch.empty(image.nbytes, dtype=torch.uint8)
    image.read_into(0, out)
    return out.numpy().tobytes()
