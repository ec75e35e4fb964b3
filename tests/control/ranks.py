"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reft.control.control import TreeTransport, connect
from reft.errors import TransferError

DEADLINE_SECS = 120.0
SECRET = b"s" * 32


class Table:
    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, bytes] = {}
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.asked += 1
            self._values[key] = value.encode()
            self._lock.notify_all()

    def get(self, key: str) -> bytes:
        with self._lock:
            self.asked += 1
            assert self._lock.wait_for(lambda: key in self._values, DEADLINE_SECS), key
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.asked += 1
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)


def on_all(act: Callable[[int], Any], world_size: int) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [
            future.result(DEADLINE_SECS)
            for future in [pool.submit(act, r) for r in range(world_size)]
        ]


def failure_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except TransferError as error:
        return str(error)
    return ""


def join(store: Table, rank: int, ranks: int = 2, node: str = "a", **options: Any) -> TreeTransport:
    """A rank, which would wait for long."""
    options = {"prefix": "x", "secret": SECRET, "timeout_secs": 2 * DEADLINE_SECS, **options}
    return connect(store, options.pop("prefix"), rank=rank, world_size=ranks, node=node, **options)


def connected(nodes: list[str]) -> list[TreeTransport]:
    store = Table()
    return on_all(lambda rank: join(store, rank, len(nodes), nodes[rank]), len(nodes))


def per_node(nodes: int, ranks: int) -> list[str]:
    return [f"node{r // ranks}" for r in range(nodes * ranks)]
