"""An error that nobody foresaw in the transfer of a recovery: this rank ends, its peers do not wait (P6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from reft.naming import Label
from reft.recover import transfer
from reft.recover.stages import BrokenOffError, Exchange, Flaw, Ledger


def _execute(control: mock.MagicMock) -> Any:
    plan: Any = SimpleNamespace(label=Label(1, 7), fetches=mock.MagicMock())
    arenas = mock.MagicMock()
    arenas.items.side_effect = MemoryError("no room for buffers")
    return transfer.execute([plan], mock.MagicMock(), control, arenas, mock.MagicMock())


def test_p6_what_breaks_off_a_transfer_is_told_apart_from_what_its_sink_raised() -> None:
    control = mock.MagicMock(rank=1)
    with pytest.raises(BrokenOffError, match=r"rank 1: MemoryError: no room"):
        _execute(control)
    control.leave.assert_called_once_with()  # its peers hear of it now


def test_p6_a_rank_whose_transfer_broke_off_does_not_wait_for_peers_that_wait_for_it() -> None:
    control = mock.MagicMock(rank=1)
    control.any_of.side_effect = control.gather_bytes.side_effect = AssertionError("it waits")
    ledger = Ledger(Exchange(mock.MagicMock(), control))
    plans: Any = {(0, 0): SimpleNamespace(label=Label(1, 7))}
    with pytest.raises(BrokenOffError):
        ledger.share(plans, {(0, 0): [0, 1]}, lambda: _execute(control), Flaw.IN_TRANSIT)
