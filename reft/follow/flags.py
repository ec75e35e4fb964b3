"""Settings of a DeepSpeed engine that a script may change during training: which parameters are
frozen, the training mode of modules, and batch sizes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reft.engine.context import JobContext
from reft.engine.host_state import HostState

logger = logging.getLogger(__name__)


def followers(context: JobContext, given: Callable[[], list[Any]]) -> Iterable[HostState]:
    engine = getattr(context.engine, "engine", None)
    return () if engine is None else (Flags(engine),)


class Flags(HostState):
    """``requires_grad`` of every parameter, ``training`` of every module, and the batch sizes."""

    name = "flags"

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._is_restored = False
        self._parameters = dict(engine.module.named_parameters())
        self._modules = dict(engine.module.named_modules())
        self._start = self._batch()
        self._accumulation = self._start["accumulation"]
        self._step_ended = int(engine.global_steps), int(engine.micro_steps)
        names = "\n".join([*self._parameters, "", *self._modules])
        self._names = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def capture(self) -> dict[str, Any]:
        return {
            "names": self._names,
            "frozen": [name for name, p in self._parameters.items() if not p.requires_grad],
            "evaluating": [name for name, module in self._modules.items() if not module.training],
            # Batch sizes from the configuration may differ with another number of replicas, so they
            # are saved only if the script has changed them.
            "batch": None if (now := self._batch()) == self._start else now,
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
            # A version taken between an evaluation and ``model.train()`` records all modules as
            # evaluating. If the script has called ``model.train()`` since the restore, do not undo
            # that call.
            if not (self._is_restored and "" in evaluating and self._modules[""].training):
                for name, module in self._modules.items():
                    module.training = name not in evaluating
            self._is_restored = True
        elif saved["frozen"]:
            logger.warning(
                "the version is of another layout: frozen parameters (%d) and the training mode of "
                "modules are those that the script has set",
                len(saved["frozen"]),
            )
        if saved["batch"] is not None:
            self._restore_batch(saved["batch"])
        self._accumulation = self._batch()["accumulation"]
        self._step_ended = int(self._engine.global_steps), int(self._engine.micro_steps)

    def end_step(self) -> str | None:
        engine, (step, micro) = self._engine, self._step_ended
        if engine.global_steps == step:
            return None
        self._step_ended = int(engine.global_steps), int(engine.micro_steps)
        before, self._accumulation = self._accumulation, int(engine.gradient_accumulation_steps())
        made = engine.micro_steps - micro
        # If the script itself sets the end of a step, the engine's count of micro-batches does not
        # matter.
        counts_itself = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
        if before == self._accumulation or engine.global_steps != step + 1 or counts_itself:
            return None
        if made == self._accumulation:
            return None
        return (
            f"step {engine.global_steps} was made of {made} micro-batches although the "
            f"accumulation was set to {self._accumulation}: it was changed after {micro} "
            "micro-batches, which is no multiple. From here on steps end within the script's loop "
            "over micro-batches, and a resumed script begins that loop at another micro-batch. "
            "Write engine.micro_steps = 0 after engine.set_train_batch_size(...)"
        )

    def _restore_batch(self, saved: Mapping[str, int]) -> None:
        """Restore batch sizes that the script had set during training."""
        now = self._batch()
        if now == saved:
            return
        engine = self._engine
        if now["replicas"] != saved["replicas"]:
            # The global batch size is restored; the number of micro-batches then follows from the
            # number of replicas.
            engine.set_train_micro_batch_size(saved["micro"])
            engine.set_train_batch_size(saved["train"])
            return
        config = engine._config
        config.train_batch_size = saved["train"]
        config.train_micro_batch_size_per_gpu = saved["micro"]
        config.gradient_accumulation_steps = saved["accumulation"]
        # A pipeline engine keeps the number in this attribute, too
        if hasattr(engine, "micro_batches"):
            engine.micro_batches = saved["accumulation"]
