"""Flags of a DeepSpeed engine that a script may change on the way: frozen parameters, the training mode of
modules, batch sizes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from reft.engine.host_state import HostState

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)


def followers(session: Session) -> Iterable[HostState]:
    engine = getattr(session.engine, "engine", None)
    return () if engine is None else (Flags(engine),)


class Flags(HostState):
    """``requires_grad`` of every parameter, ``training`` of every module, and the sizes of a batch."""

    name = "flags"

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._parameters = dict(engine.module.named_parameters())
        self._modules = dict(engine.module.named_modules())
        names = "\n".join([*self._parameters, "", *self._modules])
        self._names = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def capture(self) -> dict[str, Any]:
        return {
            "names": self._names,
            "frozen": [name for name, p in self._parameters.items() if not p.requires_grad],
            "evaluating": [name for name, module in self._modules.items() if not module.training],
            "batch": self._batch(),
        }

    def _batch(self) -> dict[str, int]:
        engine = self._engine
        return {
            "train": int(engine.train_batch_size()),
            "micro": int(engine.train_micro_batch_size_per_gpu()),
            "accumulation": int(engine.gradient_accumulation_steps()),
            "replicas": int(engine.dp_world_size),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        if saved["names"] == self._names:
            frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
            for name, parameter in self._parameters.items():
                parameter.requires_grad = name not in frozen
            for name, module in self._modules.items():
                module.training = name not in evaluating
        elif saved["frozen"]:
            logger.warning(
                "the version is of another layout: frozen parameters (%d) and the training mode of modules "
                "are "
                "those that the script has set",
                len(saved["frozen"]),
            )
        self._restore_batch(saved["batch"])

    def _restore_batch(self, saved: Mapping[str, int]) -> None:
        now = self._batch()
        if now == saved:
            return
        engine = self._engine
        if now["replicas"] != saved["replicas"]:
            # The global batch stays; how many micro-batches that makes follows from the number of replicas.
            engine.set_train_micro_batch_size(saved["micro"])
            engine.set_train_batch_size(saved["train"])
            return
        config = engine._config
        config.train_batch_size = saved["train"]
        config.train_micro_batch_size_per_gpu = saved["micro"]
        config.gradient_accumulation_steps = saved["accumulation"]
        if hasattr(engine, "micro_batches"):  # of a pipeline
            engine.micro_batches = saved["accumulation"]
