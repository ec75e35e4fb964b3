"""The layout that all ranks have agreed on: when it is old, how it is agreed anew, how it is switched."""

from __future__ import annotations

import logging
from typing import Protocol

from reft.control.control import ControlGroup
from reft.errors import ReftError
from reft.grid import Topology
from reft.naming import Label
from reft.snapshot.committing.arenas import ArenaSet
from reft.snapshot.committing.request import SnapshotRequest, WorkerOptions
from reft.snapshot.committing.switching import SchemeSwitch
from reft.snapshot.layout import GroupLayout, LiveImages, agree_on_layout

logger = logging.getLogger(__name__)


class LayoutUser(Protocol):
    """Works by the layout of one rank's versions."""

    def let_go(self) -> None:
        """Memory is given up next: nobody may keep an arena mapped then (P9)."""

    def switching(self, step: int) -> None:
        """An order is carried out on this rank and not on record yet."""

    def adopt(self, layout: GroupLayout) -> None:
        """The layout from now on. Called on all ranks; may be collective."""


class LayoutAgreement:
    """The layout of one rank's versions. Used by the worker thread."""

    def __init__(
        self,
        control: ControlGroup,
        topology: Topology,
        options: WorkerOptions,
        *,
        arenas: ArenaSet,
        switch: SchemeSwitch,
        user: LayoutUser,
    ) -> None:
        self._control = control
        self._topology = topology
        self._arenas = arenas
        self._block_bytes = options.block_bytes
        self._host_bytes = options.host_bytes
        self._switch = switch
        self._user = user
        self._signature: object = None
        self._images: LiveImages | None = None
        self.layout: GroupLayout | None = None
        """Of the next version; None before the first agreement."""

    def let_go(self) -> None:
        """See :meth:`LayoutUser.let_go`."""
        self._user.let_go()

    def fits(self, request: SnapshotRequest) -> bool:
        """Whether the layout is made for the state that a request brings."""
        return (
            self.layout is not None
            and request.images is not None
            and self._signature == request.images.signature
            and len(request.host_blob) <= self._host_bytes
        )

    def renew(self, request: SnapshotRequest) -> None:
        """Agree on a layout for every rank's newest state, and reserve its memory. Collective."""
        if len(request.host_blob) > self._host_bytes:
            self._host_bytes = 2 * len(request.host_blob)
        images = request.images or self._images
        if images is None:
            raise ReftError("peers agree on a layout, but this rank never captured its state")
        self._images = images
        self.let_go()
        layout = agree_on_layout(
            self._control,
            self._topology,
            images,
            scheme=self._switch.wanted.scheme,
            block_bytes=self._block_bytes,
            host_bytes=self._host_bytes,
        )
        self._signature = images.signature
        layout = self._switch.fit(request.label, layout, self._arenas)
        self._adopt(layout)
        self._arenas.reserve(layout)

    def reset(self) -> None:
        """Forget the layout: the ranks agree on one before the next version."""
        self.let_go()
        self._signature = None
        self.layout = None

    def switch(self, label: Label) -> None:
        """Carry out an order that the votes have brought, between two versions. Collective. The newest
        committed version stays where it is (P3)."""
        if not self._switch.due:
            return
        self.let_go()
        layout = self._switch.carry_out(
            label, self.layout, self._arenas, before_record=lambda: self._user.switching(label.step)
        )
        if layout is not None and layout is not self.layout:
            self._adopt(layout)

    def _adopt(self, layout: GroupLayout) -> None:
        self.layout = layout
        self._user.adopt(layout)
        logger.info("layout of the snapshots: %s", layout.plan)
