"""An iterator with ``state_dict`` at another data-parallel degree: what is a replica's is told (P8, P12)."""

from __future__ import annotations

from typing import Any

import pytest

from reft.engine.data import DataPosition, move_data
from reft.env import ENV_NODES
from reft.recover.relayout import Resize
from tests.data.life import Pipeline

HERE = f"{__name__}.Counted"


class Counted:
    """As torchdata's: it counts what its replica has read."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> int:
        self.taken += 1
        return self.taken

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class OfJob(Counted):
    position_of_job = True


@pytest.fixture
def begin(begin: Any) -> Any:
    return lambda: begin(Pipeline()).data


def trained(data: DataPosition, iterator: Any) -> dict[str, Any]:
    data.begin_batch(iterator)
    next(iterator)
    data.end_batch()
    return data.state()


def test_p12_an_iterator_of_a_replica_goes_on_at_its_degree_and_is_told_where_that_changes(
    begin: Any,
) -> None:
    state = trained(begin(), Counted())
    for moved, said in (
        (state, ()),
        (move_data(state, Resize(3, 4)), (HERE, "DP3 to DP4", "position_of_job = True")),
    ):
        data, again = begin(), Counted()
        data.restore(moved, None)
        left = data.left_behind()
        assert all(word in str(left) for word in said)
        assert left is None or said
        trained(data, again)
        assert again.taken == 2


def test_an_iterator_of_the_job_goes_on_without_a_word(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NODES, "1:4")
    iterator = OfJob()
    data = begin()
    state = trained(data, iterator)
    assert data.advice() is None
    data = begin()
    data.restore(move_data(state, Resize(3, 4)), None)
    assert data.left_behind() is None
    again = OfJob()
    trained(data, again)
    next(iterator)
    assert again.state_dict() == iterator.state_dict()


@pytest.mark.parametrize(("nodes", "said"), [("2:4", True), ("4", False), ("4:4", False)])
def test_p12_an_iterator_of_a_replica_is_told_at_step_1_where_the_number_of_nodes_may_change(
    begin: Any, monkeypatch: pytest.MonkeyPatch, nodes: str, said: bool
) -> None:
    monkeypatch.setenv(ENV_NODES, nodes)
    data = begin()
    trained(data, Counted())
    found = str(data.advice())
    assert ("--nnodes 2:4" in found and HERE in found and "position_of_job = True" in found) is said
