"""In which order a stage of a pipeline computes: the essence of a schedule, without transfers."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward input", "backward weight"


class Computation(NamedTuple):
    """One computation of a stage: what, for which micro-batch, on which of its chunks."""

    kind: str
    micro_batch: int
    chunk: int = 0


Order = list[Computation]


def gpipe(micro_batches: int) -> Order:
    """All forwards, then all backwards, newest first."""
    forwards = [Computation(FORWARD, j) for j in range(micro_batches)]
    return forwards + [Computation(BACKWARD, j) for j in reversed(range(micro_batches))]


def one_f_one_b(stages: int, micro_batches: int, stage_id: int) -> Order:
    """P-1-p warm-up forwards, then one forward and one backward in turn, then the other
    backwards."""
    warm_up = min(stages - 1 - stage_id, micro_batches)
    order = [Computation(FORWARD, j) for j in range(warm_up)]
    for j in range(micro_batches):
        if warm_up + j < micro_batches:
            order.append(Computation(FORWARD, warm_up + j))
        order.append(Computation(BACKWARD, j))
    return order


def interleaved(stages: int, micro_batches: int, chunks: int, stage_id: int) -> Order:
    """Megatron's order: groups of P micro-batches go through chunk 0, then chunk 1, ...

    2(P-1-p) + (v-1)P warm-up forwards, then one forward and one backward in turn.
    """
    total = micro_batches * chunks
    warm_up = min(2 * (stages - 1 - stage_id) + (chunks - 1) * stages, total)

    def computation(kind: str, n: int) -> Computation:
        group, within = divmod(n, stages * chunks)
        chunk = within // stages
        micro_batch = group * stages + within % stages
        return Computation(kind, micro_batch, chunk if kind == FORWARD else chunks - 1 - chunk)

    order = [computation(FORWARD, n) for n in range(warm_up)]
    for n in range(total):
        if warm_up + n < total:
            order.append(computation(FORWARD, warm_up + n))
        order.append(computation(BACKWARD, n))
    return order


def zero_bubble_h1(stages: int, micro_batches: int, stage_id: int) -> Order:
    """1F1B whose backwards leave their weight half for p backwards later, so that it fills the
    drain.

    Weight gradients of at most p micro-batches wait, so no stage holds more activations than the
    first stage of 1F1B does.
    """
    order: Order = []
    waiting: deque[int] = deque()
    for computation in one_f_one_b(stages, micro_batches, stage_id):
        if computation.kind == FORWARD:
            order.append(computation)
            continue
        order.append(Computation(BACKWARD_INPUT, computation.micro_batch))
        waiting.append(computation.micro_batch)
        if len(waiting) > stage_id:
            order.append(Computation(BACKWARD_WEIGHT, waiting.popleft()))
    return order + [Computation(BACKWARD_WEIGHT, j) for j in waiting]


def dual_pipe_v(stages: int, micro_batches: int, stage_id: int) -> Order:
    """The eight parts of DeepSeek's DualPipeV (deepseek-ai/DualPipe, ``dualpipev.py``).

    A forward and a backward that the original runs intertwined are here one after the other.
    """
    return _DualPipeV(stages, micro_batches, stage_id).order()


class _DualPipeV:
    def __init__(self, stages: int, micro_batches: int, stage_id: int) -> None:
        self._stages, self._micro_batches, self._p = stages, micro_batches, stage_id
        self._next = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD) for chunk in (0, 1)}
        self._weights: deque[Computation] = deque()
        self._order: Order = []

    def order(self) -> Order:
        p, after = self._p, self._stages - 1 - self._p
        for _ in range(2 * after):
            self._forward(0)
        for _ in range(p + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(after):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for _ in range(self._micro_batches - 2 * self._stages + p + 1):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(after):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        self._last_backwards(p + 1)
        for _ in range(after):
            self._weight()
            self._backward(0, split=True)
        for _ in range(p + 1):
            self._weight()
        return self._order

    def _last_backwards(self, count: int) -> None:
        """The second half leaves its weight gradients for later."""
        half = count // 2
        for i in range(count):
            self._backward(1, split=i > half or (i == half and self._p % 2 == 1))
            self._backward(0, split=i >= half)

    def _forward(self, chunk: int) -> None:
        self._order.append(Computation(FORWARD, self._count(FORWARD, chunk), chunk))

    def _backward(self, chunk: int, split: bool = False) -> None:
        micro_batch = self._count(BACKWARD, chunk)
        self._order.append(Computation(BACKWARD_INPUT if split else BACKWARD, micro_batch, chunk))
        if split:
            self._weights.append(Computation(BACKWARD_WEIGHT, micro_batch, chunk))

    def _weight(self) -> None:
        self._order.append(self._weights.popleft())

    def _count(self, kind: str, chunk: int) -> int:
        self._next[kind, chunk] += 1
        return self._next[kind, chunk] - 1
