"""Windows in the schedules of Megatron-core: copies run while a stage waits for a neighbour.

Its schedules, 1F1B and interleaved, are functions that make a ``P2PCommunicator`` for every step and call
``forward_step`` and ``backward_step`` by their names in their module. There these names are given to objects
that do the same and tell reft before and after; nothing is reordered, and a process without a woven training
finds them doing nothing more. Where a receive is only begun (``overlap_p2p_comm``), its window is the wait
for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reft.engine.session import Tracer
from reft.snapshot.copying.pacing import Pacer
from reft.snapshot.scheduling.trace import InstructionRecord

_running: list[MegatronWeaver] = []
"""The weaver whose step is being made: a process trains one model at a time."""


class MegatronWeaver:
    """Windows of one training; the device's time line is not marked. Whether every instruction is timed is
    asked before every step."""

    def __init__(self, pacer: Pacer, tracer: Tracer) -> None:
        self._pacer, self._tracer = pacer, tracer
        tracer.woven = True
        self._computing: dict[str, list[tuple[Any, Any]]] = {"ForwardPass": [], "BackwardPass": []}
        self._is_traced = False
        self._names: list[str] = []
        self._step_began = False
        _weave_schedules()

    # -- the step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forward and backward passes follow, and the optimizer step."""
        self._names = []
        for stamps in self._computing.values():
            stamps.clear()
        self._is_traced, self._tracer.began = self._tracer.active, time.perf_counter()
        self._step_began = True
        self._pacer.begin_step("megatron")
        _running[:] = [self]

    def pause(self) -> None:
        """The optimizer has stepped: what follows until the next step, an evaluation, has no windows."""
        self._names.append("OptimizerStep")
        _running.clear()

    def end_step(self) -> None:
        """The step is over: hand over what was seen. Called where the next one begins."""
        if self._step_began:
            forwards, backwards = (tuple(self._computing[n]) for n in ("ForwardPass", "BackwardPass"))
            self._pacer.end_step("megatron", tuple(self._names), forwards, backwards)
        self._step_began = False

    # -- instructions --------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The stage waits for a neighbour."""
        position = len(self._names)
        self._names.append(name)
        self._pacer.open(position, name.startswith("Recv"))
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._pacer.close()
            self._record(position, name, began, ended)

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """The stage computes."""
        position, stamps = len(self._names), self._computing[name]
        self._names.append(name)
        came, began = self._pacer.stamp(), time.perf_counter()
        try:
            yield
        finally:
            stamps.append((came, self._pacer.stamp()))
            self._record(position, name, began, time.perf_counter())

    def _record(self, position: int, name: str, began: float, ended: float) -> None:
        if self._is_traced:
            micro_batch = self._names[:position].count(name)
            self._tracer.records.append(InstructionRecord(position, name, micro_batch, began, ended))


class _Awaited:
    """A transfer that was begun; to wait for it is a window."""

    def __init__(self, work: Any, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not _running:
            return self._work.wait(*args, **kwargs)
        with _running[0].waiting(self._name):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_NAMES = {
    "recv_prev": "RecvActivation",
    "recv_next": "RecvGrad",
    "send_next": "SendActivation",
    "send_prev": "SendGrad",
}
"""Of DeepSpeed's instructions, by what Megatron's communicator does; a receive goes before a send."""


def _name_of(arguments: dict[str, Any]) -> str | None:
    """None where nothing is sent or received."""
    for key, name in _NAMES.items():
        if key.startswith("recv") and arguments.get(key):
            return name
        if key.startswith("send") and arguments.get(f"tensor_{key}") is not None:
            return name
    return None


def _weave_schedules() -> None:
    """Once in a process."""
    from megatron.core.pipeline_parallel import schedules

    names = vars(schedules)
    communicator = names["P2PCommunicator"]
    if getattr(communicator, "_reft_woven", False):
        return

    class WovenP2PCommunicator(communicator):  # type: ignore[misc, valid-type]
        """Megatron's, with windows."""

        _reft_woven = True

        def _communicate(self, **arguments: Any) -> Any:
            name = _name_of(arguments)
            if not _running or name is None:
                return super()._communicate(**arguments)
            if arguments.get("wait_on_reqs", True):
                with _running[0].waiting(name):
                    return super()._communicate(**arguments)
            *received, begun = super()._communicate(**arguments)
            if isinstance(begun, dict):
                begun = {key: _Awaited(work, _NAMES[key]) for key, work in begun.items()}
            return (*received, begun)

    names["P2PCommunicator"] = WovenP2PCommunicator
    for function, name in (("forward_step", "ForwardPass"), ("backward_step", "BackwardPass")):
        names[function] = _told(names[function], name)


def _told(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not _running:
            return original(*args, **kwargs)
        with _running[0].computing(name):
            return original(*args, **kwargs)

    return told
