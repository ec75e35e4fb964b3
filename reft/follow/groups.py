"""Learning rates and other numbers of the optimizer's parameter groups.

The numbers are restored where training begins, and compared from step to step. If a number changes
for a reason that reft does not see, a restarted script may compute a different value, so the change
is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from reft.checks.start import rates_from_step
from reft.engine.context import JobContext
from reft.engine.host_state import HostState
from reft.follow.schedulers import Schedulers

_COUNTS = ("last_epoch", "_step_count", "last_batch_iteration")
"""Attributes by which torch's and DeepSpeed's schedulers count their steps."""
_MOMENTA = ("betas", "momentum")
"""Keys that torch's cyclic schedulers change in addition to the learning rate."""


def followers(context: JobContext, given: Callable[[], list[Any]]) -> Iterable[HostState]:
    """Return the objects that follow schedulers and parameter groups of a DeepSpeed engine; none
    for other programs."""
    engine = getattr(context.engine, "engine", None)
    if engine is None:
        return ()
    schedulers = Schedulers(engine, given)
    return schedulers, ParamGroups(context, schedulers, given)


class ParamGroups(HostState):
    """The numbers of every parameter group of the innermost optimizer."""

    name = "param_groups"

    def __init__(
        self, context: JobContext, schedulers: Schedulers, given: Callable[[], list[Any]]
    ) -> None:
        self._context = context
        self._given = given
        self._schedulers = schedulers
        self._state = context.engine.adapter.state  # type: ignore[attr-defined]  # DeepSpeed's have one
        # Numbers and scheduler counts after the last optimizer step; None if they are not compared
        self._after: tuple[list[dict[str, Any]], Any] | None = None
        # Numbers at the end of the engine's last step
        self._ended: list[dict[str, Any]] | None = None
        # Whether the restored version records that the numbers changed between two steps
        self._moved = False
        self._found: str | None = None  # Message about an unexplained change, not yet reported
        self._reported = self._lost_reported = False
        optimizer, self._hooks = self._state.optimizer, []
        if isinstance(optimizer, torch.optim.Optimizer):
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_optimizer),
                optimizer.register_step_post_hook(self._after_optimizer),
            ]

    @property
    def is_reapplied(self) -> bool:
        # Restore the numbers again if the script may have overwritten restored ones with those of
        # its first start: if the numbers used to change between steps, or if a scheduler was
        # constructed (which sets the learning rate of step 0). Otherwise a value that the script
        # writes after a load is intended, for example a rate for another number of replicas.
        return self._moved or self._schedulers.made_after_load

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def capture(self) -> dict[str, Any]:
        moved = self._ended is not None and self._ended != self._numbers()
        return {"groups": self._state.param_groups(), "moved": moved, "replicas": self._replicas()}

    def restore(self, saved: dict[str, Any]) -> None:
        self._after = self._ended = None
        data = self._context.engine.data
        # A program that loads its own checkpoints may have options that override values of the
        # checkpoint.
        overrides = data is not None and data.left_to_program
        self._moved = saved["moved"] and saved["replicas"] == self._replicas() and not overrides
        if len(saved["groups"]) == len(self._state.optimizer.param_groups):
            self._state.restore_groups(saved["groups"])

    def _replicas(self) -> int:
        return self._context.topology.degrees.dp

    def _after_optimizer(self, *_: Any) -> None:
        self._after = None if self._reported else (self._numbers(), self._counts())

    def _before_optimizer(self, *_: Any) -> None:
        if self._after is None:
            return
        (was, counts), now = self._after, self._numbers()
        moved = self._counts() != counts or any(not any(c) for c in counts)
        for index, (before, after) in enumerate(zip(was, now, strict=False)):
            for key in before:
                changed = before[key] != after.get(key)
                if changed and not (moved and self._is_scheduled(key, after.get(key))):
                    self._found = self._found or self._describe(
                        index, key, before[key], after.get(key)
                    )

    def _numbers(self) -> list[dict[str, Any]]:
        return [dict(_numbers_of(group)) for group in self._state.optimizer.param_groups]

    def _followed(self) -> list[Any]:
        """Return the schedulers whose state is in the version: those that reft found, and those
        that the script gave."""
        given = [g for g in self._given() if callable(getattr(g, "step", None))]
        return [
            s for s in (self._schedulers.own(), *self._schedulers.live(), *given) if s is not None
        ]

    def _counts(self) -> list[tuple[Any, ...]]:
        return [tuple(getattr(s, name, None) for name in _COUNTS) for s in self._followed()]

    def _is_scheduled(self, key: str, value: Any) -> bool:
        """Return whether a scheduler may have set this number.

        Torch's schedulers keep the learning rates that they set in ``_last_lr``. A scheduler
        without this attribute may have set any number.
        """
        rates = [getattr(s, "_last_lr", None) for s in self._followed()]
        if any(kept is None for kept in rates):
            return True
        return any(value in kept for kept in rates if kept) if key == "lr" else key in _MOMENTA

    def _describe(self, index: int, key: str, was: Any, now: Any) -> str | None:
        if (lines := rates_from_step(key)) is None:
            return None
        what = "the learning rate" if key == "lr" else f'"{key}"'
        return (
            f"{lines}{what} of parameter group {index} was changed from {was} to {now} between two "
            "steps, by nothing that reft follows. After a failure the script computes it from "
            "values that it has to restore itself. Compute it from engine.global_steps, or give "
            'the object that changes it: reft.attach(engine, state={"scheduler": ...})'
        )

    def end_step(self) -> str | None:
        self._ended = self._numbers()
        lost = None if self._lost_reported else self._context.engine.adapter.why_groups_are_lost()  # type: ignore[attr-defined]
        if lost is not None:
            self._lost_reported = True
            return str(lost)
        found, self._found = self._found, None
        if found is not None:
            self._reported, self._after = True, None
        return found


def _numbers_of(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            # Reading a value on a device would wait for the device.
            if value.device.type == "cpu" and value.numel() == 1:
                yield key, value.item()
        elif isinstance(value, int | float | tuple):
            yield key, value
