"""A training under Megatron-core as a session sees it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.core.adapter import MegatronAdapter
from megatron_patches.core.support import check_scheduler
from reft.engine.identity import flat_facts, shapes_of
from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.naming import own_program
from reft.state.catalogue import SectionImage
from reft.state.codec import class_path
from reft.state.fingerprint import Fact, facts_of_arguments
from reft.state.host import capture_buffers, restore_buffers
from reft.state.rng import capture_rng, restore_rng


class MegatronEngine:
    """A :class:`~reft.engine.engine.TrainingEngine`, of what :func:`reft.attach_megatron` is given."""

    name = "MegatronEngine"

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any, micro_batches: int) -> None:
        self.adapter = MegatronAdapter(chunks, optimizer)
        check_scheduler(scheduler)
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.micro_batches = micro_batches
        self.resizing = None
        self.data = None  # it follows from the client state
        self.device: torch.device = next(chunks[0].parameters()).device
        self.global_steps = 0
        self._model = torch.nn.ModuleList(chunks)

    def place(self) -> tuple[Coordinate, Degrees]:
        """Experts are spread over data-parallel ranks: they change nothing here. A LayoutError where the
        groups do not span the job."""
        first = self.chunks[0]
        groups = (first.pp_group, first.dp_cp_group, first.tp_group)
        if not all(isinstance(group, dist.ProcessGroup) for group in groups):
            raise LayoutError(f"found {groups}; expected one pipeline, data and tensor parallel group each")
        degrees = Degrees(*(group.size() for group in groups))
        if degrees.world_size != dist.get_world_size():
            raise LayoutError(
                f"the model chunks report {degrees}, which is {degrees.world_size} ranks, but the job has "
                f"{dist.get_world_size()}. reft needs a plain pp x dp x tp grid"
            )
        return Coordinate(*(group.rank() for group in groups)), degrees

    def shapes(self) -> str:
        kind = type(self.chunks[0].module).__qualname__
        return shapes_of(kind, self._model.named_parameters())

    def settings(self) -> dict[str, Fact]:
        facts: dict[str, Fact] = {
            **facts_of_arguments(sys.argv[1:]),
            "script": own_program()[0],
            "seed": torch.initial_seed(),
            "micro_batches": self.micro_batches,
            "scheduler": "" if self.scheduler is None else class_path(self.scheduler),
            "optimizer": ", ".join(name for part in self.adapter.parts for name in part.classes),
        }
        for name, config in (
            ("model", self.chunks[0].config),
            ("buffers", self.chunks[0].ddp_config),
            ("optimizer", self.optimizer.config),
        ):
            facts |= dict(flat_facts(f"config.{name}", vars(config)))
        return facts

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "engine": {"global_steps": self.global_steps},
            "lr_scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "adapter": self.adapter.host_state(),
            "buffers": {**capture_buffers(self._model), **self.adapter.loss_scales()},
            "rng": capture_rng(),
            "client": dict(client_state) if client_state is not None else None,
            "data": {},
        }

    def restore(self, state: dict[str, Any]) -> None:
        scales = {name: v for name, v in state["buffers"].items() if name.startswith("loss_scale.")}
        buffers = {name: v for name, v in state["buffers"].items() if name not in scales}
        self.adapter.finish(state["adapter"], scales)
        self._restore_scheduler(state["lr_scheduler"])
        restore_buffers(self._model, buffers)
        self.global_steps = int(state["engine"]["global_steps"])
        restore_rng(state["rng"])

    def _restore_scheduler(self, saved: Any) -> None:
        if (self.scheduler is None) != (saved is None):
            raise LayoutError(
                f"the snapshot {'has no' if saved is None else 'has a'} scheduler, the running job "
                f"{'none' if self.scheduler is None else 'has one'}; give reft.attach_megatron the same again"
            )
        if self.scheduler is None:
            return
        if "num_steps" in vars(self.scheduler):
            self.scheduler.num_steps = 0  # OptimizerParamScheduler adds what it loads to what it has counted
        self.scheduler.load_state_dict(saved)

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        """Megatron-core has no one form of checkpoint that could be written from memory: none."""
        return b""
