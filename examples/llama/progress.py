"""What a person sees: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WINDOW_STEPS = 20


class StepDisplay(AbstractContextManager["StepDisplay"]):
    """Shows steps, loss and speed on one rank; silent where ``enabled`` is False.

    Args:
        enabled: whether this process shows anything.
        first: steps done before this run.
        last: step at which the run ends.
        tokens_per_step: of the whole job.
        log_interval: steps between lines where there is no terminal.
    """

    def __init__(
        self, enabled: bool, first: int, last: int, tokens_per_step: int, log_interval: int
    ) -> None:
        self._enabled = enabled
        self._first, self._last = first, last
        self._tokens_per_step = tokens_per_step
        self._log_interval = max(1, log_interval)
        self._times: deque[float] = deque([time.perf_counter()], maxlen=_WINDOW_STEPS + 1)
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "", total=last, completed=first, loss=float("nan"), speed=""
            )

    def say(self, message: str) -> None:
        """Print one line."""
        if self._enabled:
            self._console.print(message, markup=False)

    def needs(self, step: int) -> bool:
        """Whether the loss of ``step`` will be shown (reading it waits for the device)."""
        if not self._enabled:
            return False
        regular = step % self._log_interval == 0 or step in (self._first + 1, self._last)
        return self._bar is not None or regular

    def step(self, step: int, loss: float | None, lr: float) -> None:
        """Tell that ``step`` is done; ``loss`` is not shown where :meth:`needs` is False."""
        self._times.append(time.perf_counter())
        if loss is None or not self.needs(step):
            return
        per_sec = (len(self._times) - 1) / (self._times[-1] - self._times[0])
        speed = f"{per_sec * self._tokens_per_step:,.0f} tokens/s  {per_sec:.2f} steps/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        else:
            eta = (self._last - step) / per_sec
            self.say(
                f"step {step}/{self._last}  loss {loss:.4f}  lr {lr:.2e}  {speed}  eta {eta:.0f} s"
            )

    def __enter__(self) -> StepDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class ByteProgress(AbstractContextManager["ByteProgress"]):
    """A bar for tokenising; appears with the first call, and only on a terminal."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._bar: Progress | None = None
        self._console = Console(file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        if not self._console.is_terminal:
            return
        if self._bar is None:
            columns = (
                TextColumn(self._description),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
