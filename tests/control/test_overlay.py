"""How ranks find each other and connect, and what is heard where one does not (P6, P11)."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from reft.control import links, overlay
from reft.control.overlay import Overlay, connect, shared_secret
from reft.errors import AuthenticationError, ConfigError, ReftError, TransferError

from .ranks import DEADLINE_SECS, SECRET, Table, failure_of, on_all, per_node


def join(store: Table, rank: int) -> Overlay:
    """One of two ranks of a node, which would wait for long."""
    return connect(
        store, "x", rank=rank, world_size=2, node="a", secret=SECRET, timeout_secs=2 * DEADLINE_SECS
    )


def test_a_rank_asks_the_store_a_fixed_number_of_questions() -> None:
    asked = []
    for ranks in (4, 12):
        store = Table()
        made = on_all(
            lambda r, store=store, n=ranks: connect(
                store, "x", rank=r, world_size=n, node=f"n{r // 4}", secret=SECRET, timeout_secs=DEADLINE_SECS
            ),
            ranks,
        )
        for one in made:
            one.close()
        asked.append(store.asked / ranks)
    assert asked[1] <= asked[0] + 2


def test_p6_who_does_not_come_is_waited_for_only_so_long() -> None:
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        connect(Table(), "x", rank=0, world_size=2, node="a", secret=SECRET, timeout_secs=0.05)
    asked = []
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        connect(
            Table(), "x", rank=0, world_size=2, node="a", secret=SECRET, timeout_secs=DEADLINE_SECS,
            go_on=lambda: bool(asked.append(1)),
        )  # fmt: skip
    assert asked


@pytest.mark.parametrize(
    "nodes", [per_node(1, 2), per_node(2, 1), per_node(3, 2)], ids=["Unix", "TCP", "3x2"]
)
def test_p11_a_rank_with_another_secret_is_refused_and_all_hear_of_it(
    nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "CONNECT_SECS", 2 * DEADLINE_SECS)
    store, world_size = Table(), len(nodes)

    def one(rank: int) -> BaseException | None:
        secret = b"other" * 6 if rank == world_size - 1 else SECRET
        try:
            made = connect(
                store, "x", rank=rank, world_size=world_size, node=nodes[rank], secret=secret,
                timeout_secs=2 * DEADLINE_SECS,
            )  # fmt: skip
        except Exception as error:
            return error
        try:
            made.tree.reduce_min([rank])
        except Exception as error:
            return error
        finally:
            made.close()
        return None

    errors = on_all(one, world_size)
    assert any(isinstance(error, AuthenticationError) for error in errors)
    assert all(errors)


def test_p6_who_cannot_listen_is_heard_by_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store, listens = Table(), links.listen_remotely

    def listen_on_rank_1_only() -> socket.socket:
        if threading.current_thread().name != "rank 0":
            return listens()
        raise ConfigError("no address")

    monkeypatch.setattr(links, "listen_remotely", listen_on_rank_1_only)

    def come(rank: int) -> str:
        threading.current_thread().name = f"rank {rank}"
        try:
            join(store, rank)
        except ReftError as error:
            return str(error)
        return ""

    assert on_all(come, 2) == ["no address", "rank 0 could not connect with the others; its log says why"]


def test_p6_a_rank_that_came_and_does_not_connect_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is killed just then."""
    monkeypatch.setattr(overlay, "CONNECT_SECS", 0.1)
    store = Table()

    def come(rank: int) -> str:
        if rank == 0:
            return failure_of(lambda: join(store, 0))
        store.get("x/came")  # waits for it
        for count in ("node/a", "came"):
            store.add(f"x/{count}", 1)
        for key in ("at/a/1", "whole"):
            store.set(f"x/{key}", "1")
        return ""

    assert "rank 1 did not connect" in on_all(come, 2)[0]


def test_p6_a_store_with_an_earlier_incarnations_keys_is_refused() -> None:
    store = Table()

    def come(rank: int) -> Any:
        return connect(
            store, "x", rank=rank, world_size=3, node="a", secret=SECRET, timeout_secs=DEADLINE_SECS
        )

    for one in on_all(come, 3):
        one.close()
    for failure in on_all(lambda rank: failure_of(lambda: come(rank)), 3):
        assert "expected 3" in failure


def test_the_first_who_asks_makes_the_secret() -> None:
    store, numbers = Table(), iter(range(1, 10))
    found = on_all(lambda _: shared_secret(store, "key", lambda: bytes([next(numbers)])), 4)
    assert found == [b"\x01"] * 4
