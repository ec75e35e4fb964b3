"""Which protection is in force on one rank, and where the votes send it. Pure: in production
:class:`~reft.snapshot.committing.switching.SchemeSwitch` does what is decided here, and the model in
tests/snapshot/switch_model.py drives it through every order of events.

A ladder (:mod:`reft.protect.degrade`) belongs to the order in force. All ranks hear the same order and the
same rung from the same vote, so all begin to change at the same version. They try a rung: every rank reserves
the arenas that it needs and tells the others whether it could. Then all ranks move there, or none does (P3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class InForce:
    """The protection of one rank.

    Attributes:
        order: number of the last order that was carried out or refused.
        rung: how far down the ladder what is in force is; 0 is what is wanted.
        heard_order: number of the newest order that a vote named.
        heard_rung: the rung that the last vote named.
    """

    order: int = 0
    rung: int = 0
    heard_order: int = 0
    heard_rung: int = 0

    @classmethod
    def at_start(cls, order: int) -> InForce:
        """On the first rung, with no vote yet."""
        return cls(order=order, heard_order=order)

    def heard(self, order: int, rung: int) -> InForce:
        """A vote named this order and this rung, on all ranks the same."""
        return replace(self, heard_order=max(self.heard_order, order), heard_rung=rung)

    def would_change(self, order: int, rung: int) -> bool:
        """Whether a vote with this order and rung has a change follow."""
        return order > self.order or rung != self.rung

    @property
    def due(self) -> bool:
        """Whether something is to be changed now; all ranks say the same after the same vote."""
        return self.would_change(self.heard_order, self.heard_rung)

    @property
    def ordered(self) -> bool:
        """Whether what is due is an order: it goes before a rung."""
        return self.heard_order > self.order

    def targets(self, rungs: int) -> Sequence[int]:
        """Rungs to try, until all ranks move: up one alone, down past those that cannot be reserved.

        Args:
            rungs: of the ladder.
        """
        return (self.heard_rung,) if self.heard_rung < self.rung else range(self.heard_rung, rungs)

    def moves(self, failed: Sequence[bool]) -> bool:
        """Whether the ranks use what they have tried: all of them do, or none.

        Args:
            failed: of every rank, whether it could not reserve its arenas.
        """
        return not any(failed)

    def followed(self, order: int) -> InForce:
        """An order was carried out, or refused."""
        return replace(self, order=order, heard_order=order)

    def now_on(self, rung: int) -> InForce:
        """All ranks are on this rung."""
        return replace(self, rung=rung, heard_rung=rung)

    def resync(self, order: int, rungs: int) -> InForce:
        """The ranks have come together again. How far down the ladder is found out anew with the layout.

        Args:
            order: of the newest record of any rank.
            rungs: of its ladder.
        """
        return self.followed(order).now_on(min(self.rung, rungs - 1))
