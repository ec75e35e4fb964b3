"""What a person sees while the demonstration runs: a live table on a terminal, timed lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_MOST_STEP_LINES = 40
_STYLES = {
    "healthy": "green",
    "dead": "bold red",
    "stopped": "bold red",
    "failed": "bold red",
    "restoring": "magenta",
    "starting": "yellow",
    "waiting": "yellow",
    "ended": "dim",
}


@dataclass(frozen=True)
class NodeView:
    """One node, as it is shown.

    Attributes:
        name: node id.
        state: starting, waiting, restoring, healthy, stopped, dead, failed, ended.
        ranks: coordinates of its trainers.
        step: newest step done there.
        version: newest version committed there.
    """

    name: str
    state: str
    ranks: str = ""
    step: int = 0
    version: int = 0


@dataclass(frozen=True)
class View:
    """One moment of the run.

    Attributes:
        phase: what is going on, in words.
        step: newest step done.
        steps: of the whole job.
        loss: of ``step``; None: not known yet.
        version: newest version committed; None: nothing is snapshotted in this run.
        nodes: in the order of their indices; a replacement follows the node it replaces.
    """

    phase: str
    step: int
    steps: int
    loss: float | None
    version: int | None
    nodes: tuple[NodeView, ...]


class Screen(AbstractContextManager["Screen"], ABC):
    """Where the demonstration shows what happens.

    Args:
        console: to write to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the start."""
        stamp = f"[{time.monotonic() - self._since:6.1f} s] "
        self._console.print(Text(stamp, style="dim") + Text(text, style=style), highlight=False)

    def show(self, renderable: RenderableType) -> None:
        """Anything, without a time."""
        self._console.print(renderable, highlight=False)

    @abstractmethod
    def update(self, view: View) -> None:
        """The current moment."""

    def close(self) -> None:
        """Give the terminal back."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainScreen(Screen):
    """Lines for whatever changed."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last: View | None = None

    def update(self, view: View) -> None:
        last, self._last = self._last, view
        if last is None or last.phase != view.phase:
            self.say(f"--- {view.phase}")
            last = None
        self._say_states(last.nodes if last else (), view.nodes)
        every = -(-view.steps // _MOST_STEP_LINES)
        due = view.step % every == 0 or view.step == view.steps
        if view.step and due and (last is None or last.step != view.step):
            self.say(_step_text(view))

    def _say_states(self, before: Sequence[NodeView], now: Sequence[NodeView]) -> None:
        known = {node.name: node.state for node in before}
        changed: dict[str, list[str]] = {}
        for node in now:
            if known.get(node.name) != node.state:
                changed.setdefault(node.state, []).append(node.name)
        for state, names in changed.items():
            self.say(f"{', '.join(names)}: {state}", _STYLES.get(state, ""))


class LiveScreen(Screen):
    """A table that is drawn anew, below the lines that were said."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._drawn = 0.0

    def update(self, view: View) -> None:
        if time.monotonic() - self._drawn > 0.1:
            self._drawn = time.monotonic()
            self._live.update(_draw(view, time.monotonic() - self._since), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_screen(console: Console) -> Screen:
    """The one that fits the terminal, or the file."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


def _step_text(view: View) -> str:
    loss = "" if view.loss is None else f"  loss {view.loss:.6f}"
    version = "" if view.version is None else f"  snapshot {view.version}"
    return f"step {view.step}/{view.steps}{loss}{version}"


def _draw(view: View, secs: float) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(view.phase, style="bold"),
        ProgressBar(total=view.steps, completed=view.step, width=24),
        Text(_step_text(view)),
        Text(f"{secs:.0f} s", style="dim"),
    )
    if not view.nodes:
        return head
    table = Table("node", "state", "ranks", "step", "snapshot", box=None, pad_edge=False, padding=(0, 2))
    for node in view.nodes:
        table.add_row(
            node.name,
            Text(node.state, style=_STYLES.get(node.state, "")),
            node.ranks,
            str(node.step or ""),
            str(node.version or ""),
        )
    return Group(head, table)
