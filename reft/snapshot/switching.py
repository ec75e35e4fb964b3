"""Changing the protection scheme while the job runs, at one version boundary on all ranks.

An order (:mod:`reft.store.protection`) on any node travels in the votes of the versions; every rank hears
its number from the same vote. Once that version is through the protocol the worker threads, and only they,

1. agree on the order's text and check that the scheme suits the group and that its arenas fit on every node;
2. reserve arenas of the new size in every slot but that of the newest committed version, which stays as it
   is and recoverable until a version under the new scheme is committed (P3);
3. say on every node what is in force now, for ``reft status`` and for the next start.

What does not fit is refused on all ranks before anything is given up (P9). Training waits for none of this:
a version that would begin meanwhile is skipped and counted. A kill at any point leaves arenas that each
say what they hold, and records of which the newest counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from reft.errors import ConfigError
from reft.protect.codes import Scheme
from reft.protect.placement import tolerance
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.control import ControlGroup
from reft.snapshot.layout import GroupLayout, layout_under
from reft.store.label import Label
from reft.store.protection import (
    MOST_CHARACTERS,
    Order,
    OrderWatch,
    ProtectionRecord,
    Refusal,
    parse_order,
)
from reft.topology import Topology

logger = logging.getLogger(__name__)

_WORDS = MOST_CHARACTERS // 8


class SchemeSwitch:
    """The scheme in force on one rank, and how it changes. Used by the worker thread.

    Args:
        control: carries the agreement.
        topology: placement of this incarnation.
        record: what this incarnation begins with, the same on all ranks.
        orders: where this node's orders are found; None: only those of others are followed.
        on_change: called with the new record once an order was carried out or refused.
    """

    def __init__(
        self,
        control: ControlGroup,
        topology: Topology,
        record: ProtectionRecord,
        orders: OrderWatch | None = None,
        on_change: Callable[[ProtectionRecord], None] = lambda record: None,
    ) -> None:
        self._control = control
        self._topology = topology
        self._orders = orders
        self._on_change = on_change
        self._heard = record.number
        self.record = record
        self.scheme = record.parsed

    def newest_order(self) -> int:
        """Number of the newest order that this rank knows of: what it says in a vote."""
        order = self._orders.newest() if self._orders is not None else None
        return max(self.record.number, order.number if order is not None else 0)

    def hear(self, number: int) -> None:
        """A vote named this order, on all ranks the same."""
        self._heard = max(self._heard, number)

    @property
    def due(self) -> bool:
        """Whether an order is to be carried out now; all ranks say the same after the same vote."""
        return self._heard > self.record.number

    def carry_out(
        self,
        label: Label,
        layout: GroupLayout | None,
        arenas: ArenaSet,
        *,
        before_record: Callable[[], None] = lambda: None,
    ) -> GroupLayout | None:
        """Collective, between two versions.

        Args:
            label: the version after which the switch takes place.
            layout: in force; None before the first version.
            arenas: this rank's memory.
            before_record: called between reserving memory and saying so.

        Returns:
            The layout to go on with.

        Raises:
            TransferError: a peer is gone.
        """
        order = self._agree_on_order()
        self._heard = order.number
        cause, new = self._try(order, layout, arenas)
        before_record()
        if cause is None:
            self.scheme = parse_order(order.scheme)
            self.record = replace(
                self.record,
                scheme=str(self.scheme),
                number=order.number,
                step=label.step,
                incarnation=label.incarnation,
                tolerance=tolerance(self._topology, self.scheme.copies, self.scheme.parities),
                refused=None,
            )
        else:
            refused = Refusal(order.scheme, cause, label.step)
            self.record = replace(self.record, number=order.number, refused=refused)
        self._on_change(self.record)
        return new

    def _agree_on_order(self) -> Order:
        order = self._orders.newest() if self._orders is not None else None
        number, text = (order.number, order.scheme) if order is not None else (0, "")
        padded = text.encode()[:MOST_CHARACTERS].ljust(MOST_CHARACTERS, b"\0")
        words = np.frombuffer(padded, np.int64).tolist()
        newest = max(self._control.gather_ints([number, *words]))
        chosen = np.array(newest[1:], np.int64).tobytes().rstrip(b"\0").decode(errors="replace")
        return Order(newest[0], chosen)

    def _try(
        self, order: Order, layout: GroupLayout | None, arenas: ArenaSet
    ) -> tuple[str | None, GroupLayout | None]:
        """Reserve what the order needs; returns why it cannot be, if so, and the layout to go on with."""
        try:
            scheme = parse_order(order.scheme)
            refuse_too_small(scheme, self._topology.degrees.dp)
        except ConfigError as error:
            return str(error), layout
        if layout is None or scheme == self.scheme:
            return None, layout
        new = layout_under(layout, scheme)
        cause = self._why_no_room(new, arenas)
        if cause is None:
            problem = arenas.reserve(new)
            failed = [bool(values[0]) for values in self._control.gather_ints([int(problem is not None)])]
            if not any(failed):
                return None, new
            arenas.reserve(layout)
            nodes = sorted({n for n, bad in zip(self._topology.nodes, failed, strict=True) if bad})
            cause = f"memory could not be reserved on {', '.join(nodes)}: {problem or 'see their logs'}"
        return cause, layout

    def _why_no_room(self, layout: GroupLayout, arenas: ArenaSet) -> str | None:
        """Collective: the first rank's or node's want of memory, in words; None where all have enough."""
        limit = arenas.limit_bytes if arenas.limit_bytes is not None else -1
        facts = [arenas.needed_bytes(layout), arenas.held_bytes(), arenas.free_bytes(), limit]
        gathered = self._control.gather_ints(facts)
        nodes = self._topology.nodes
        for rank, (needed, _, _, most) in enumerate(gathered):
            if 0 <= most < needed:
                return (
                    f"it needs {_mib(needed)} for the arenas of rank {rank}, but reft.memory_limit_bytes "
                    f"leaves it {_mib(most)}"
                )
        for node in dict.fromkeys(nodes):
            ranks = [values for values, at in zip(gathered, nodes, strict=True) if at == node]
            more = sum(needed - held for needed, held, _, _ in ranks)
            free = min(values[2] for values in ranks)
            if more > max(0, free):
                return (
                    f"it needs {_mib(more)} more than now on node {node}, where {_mib(free)} are free; make "
                    f"room there, or choose a scheme that keeps less"
                )
        return None


def refuse_too_small(scheme: Scheme, members: int) -> None:
    """Refuse a scheme that a group of ``members`` has no room for.

    Raises:
        ConfigError: says how many members it needs.
    """
    if members < scheme.least_members:
        raise ConfigError(
            f"protection {scheme} needs at least {scheme.least_members} data-parallel members, found "
            f"{members}"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
