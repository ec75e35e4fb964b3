"""The trainer's side of being watched: its page, and its stacks when they are asked for."""

from __future__ import annotations

import faulthandler
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from reft.node.progress import STACKS_SUFFIX, Phase, ProgressPage

logger = logging.getLogger(__name__)

_STACK_SIGNAL = signal.SIGRTMAX - 2
"""One that nobody uses; its handler is C, and writes where Python's would not be run."""
_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_pages: WeakSet[ProgressPage] = WeakSet()


def open_page(job_dir: Path, local_rank: int, rank: int, patience: float) -> ProgressPage:
    """The page of this process's newest session; see :class:`ProgressPage`."""
    page = ProgressPage(job_dir, local_rank, rank, patience)
    _pages.add(page)
    if signal.getsignal(_STACK_SIGNAL) is signal.SIG_DFL:
        with suppress(OSError, RuntimeError, ValueError):
            # Kept open for as long as the process lives.
            file = (job_dir / f"{local_rank}{STACKS_SUFFIX}").open("w")
            faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
            page.set_stack_signal(_STACK_SIGNAL)
    return page


def at_instruction(page: ProgressPage, name: str) -> _Wrapper:
    """A wrapper of an engine's method that is an instruction by itself."""
    number = page.number_of(name)

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            page.instruction(number)
            return original(*args, **kwargs)

        return noted

    return wrapper


def at_phase(page: ProgressPage, phase: Phase) -> _Wrapper:
    """A wrapper of an engine's method with limits of its own."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def during(*args: Any, **kwargs: Any) -> Any:
            with page.during(phase):
                return original(*args, **kwargs)

        return during

    return wrapper


@contextmanager
def pause_watch() -> Iterator[None]:
    """Have this trainer not watched for hangs while the block lasts, and the others wait for it:

        with reft.pause_watch():
            evaluate_for_an_hour()

    Without reft it does nothing.
    """
    with ExitStack() as pauses:
        for page in list(_pages):
            pauses.enter_context(page.during(Phase.PAUSED))
        yield
