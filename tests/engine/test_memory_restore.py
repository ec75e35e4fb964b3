"""What a restore costs beside its bytes."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from reft.engine.load.memory import MemoryRestorer
from reft.recover.plan import NotRecoverable

DEVICE = SimpleNamespace(type="cpu")
SESSION = SimpleNamespace(
    state=SimpleNamespace(adapter=None),
    engine=SimpleNamespace(resizing=None, device=DEVICE),
    coordinate=SimpleNamespace(dp=0),
)


class Recovery:
    """Makes as many objects as a plan of some thousand blocks, and ends."""

    def __init__(self, found: NotRecoverable | Exception) -> None:
        self.found = found
        self.made: list[Any] = []

    def restore(self, prepare: Any, write: Any) -> NotRecoverable:
        self.made = [[number] for number in range(200_000)]
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize("fails", [False, True])
def test_a_restore_collects_no_garbage_and_lets_it_be_collected_afterwards(fails: bool) -> None:
    """A full collection in a process that has imported torch and DeepSpeed takes longer than the bytes of a rank."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(info["generation"])

    level: Any = MemoryRestorer(SESSION)  # type: ignore[arg-type]
    recovery = Recovery(RuntimeError("broken off") if fails else NotRecoverable(()))
    gc.callbacks.append(note)
    try:
        if fails:
            with pytest.raises(RuntimeError, match="broken off"):
                level.restore(recovery)
        else:
            level.restore(recovery)
    finally:
        gc.callbacks.remove(note)
    assert len(recovery.made) == 200_000
    assert len(collections) <= 2, f"{len(collections) // 2} collections"
    assert gc.isenabled()
