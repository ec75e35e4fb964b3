"""The protection in force: which losses the job survives, and who is told when that changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reft.config import AUTO
from reft.control.control import WorkerControl
from reft.engine.identity import local_rank
from reft.memory.files import margin_bytes
from reft.memory.protection_record import (
    ProtectionRecord,
    read_record,
    resume_record,
    write_record,
)
from reft.policy.switching import RequestPoll, RetentionConfig, SchemeSwitch
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, surviving_schemes, tolerance
from reft.snapshot.arenas import ArenaSet

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)


def kept_members(session: Session) -> tuple[int, ...]:
    """Members of the group whose own bytes this rank keeps beside its own, under the scheme in
    force."""
    at, scheme = session.coordinate, Scheme.parse(session.protection.record.in_force)
    placement = place_group(
        session.topology.group_nodes(at.pp, at.tp), scheme.copies, scheme.parities
    )
    return placement.kept_by(at.dp)[1:]


class Protection:
    """The protection that is in force, the same on all ranks. Made collectively; a ConfigError
    where the groups are too small for the scheme. ``chosen``: whether the scheme was chosen
    (``auto``), not named by the block."""

    def __init__(self, session: Session, *, chosen: bool) -> None:
        config = session.config
        self._session = session
        self.is_chosen = chosen
        # The last switch, if any node's memory tells of one and the block has not been edited
        # since; else what the block says.
        scheme, mine = str(config.scheme), read_record(session.memory.job_dir.path)
        told = b"" if mine is None else json.dumps(mine.to_json()).encode()
        records = [
            ProtectionRecord.from_json(json.loads(d))
            for d in session.control.gather_bytes(told)
            if d
        ]
        found = resume_record(records, f"{AUTO}:{config.tolerance}" if chosen else scheme, scheme)
        self.record = replace(
            found,
            tolerance=tolerance(session.topology, found.parsed.copies, found.parsed.parities),
            incarnation=session.memory.incarnation,
            aor=config.recompute,
        )

    def switch(self, control: WorkerControl, arenas: ArenaSet) -> SchemeSwitch:
        """For the snapshot worker, which agrees by ``control``; from here on orders are
        followed."""
        self.note()
        config, job_dir = self._session.config, self._session.memory.job_dir.path
        return SchemeSwitch(
            *(control, self._session.topology, arenas, self.record, RequestPoll(job_dir)),
            keeping=RetentionConfig(
                config.arena_count, margin_bytes(config.memory_margin_bytes, job_dir)
            ),
            on_change=self._changed,
            reach=self._session.faults.reach,
        )

    @property
    def lost(self) -> bool:
        """Whether memory has become too short to survive the loss of a node, which it did
        before."""
        return self.record.degraded is not None and self.record.tolerance == 0

    def why_unprotected(self) -> str:
        if self.record.in_force == "none":
            return 'the protection is "none"'
        topology, d = self._session.topology, self._session.topology.degrees
        if d.dp == 1:
            return "with a data-parallel degree of 1 nothing is redundant"
        if len(set(topology.failure_domains)) == 1:
            return (
                "all ranks share a node with their copies: killed trainers are survived, the loss "
                "of the "
                "node is not"
            )
        nodes = [topology.group_nodes(*group) for group in topology.groups()]
        order = "across-nodes" if d.tp == 1 else f"across-nodes:{d.tp}"
        to_write = (
            f"start it with reft launch --rank-order {order}, or give PipelineModule "
            f"topology=reft.topology(pp={d.pp}, dp={d.dp}, tp={d.tp})"
        )
        others = " or ".join(f'"{scheme}"' for scheme in surviving_schemes(topology))
        if others:
            return (
                "a node holds several data-parallel members of a stage, more than "
                f"{self.record.in_force} "
                f"restores (found nodes {nodes}); write {others}, which survive the loss of a "
                "node here, or "
                f"put the members on different nodes: {to_write}"
            )
        return (
            "data-parallel members of a stage share a node with their copies (found nodes "
            f"{nodes}); put "
            f"them on different nodes: {to_write}"
        )

    def _changed(self, record: ProtectionRecord) -> None:
        """An order was carried out, or refused; or memory ran short, or came back. Called by the
        worker."""
        before, self.record = self.record, record
        self.note()
        self._session.events.write("protection", **record.to_json())
        if self._session.is_rank_zero:
            logger.warning("%s", self._words(before, record))

    def _words(self, before: ProtectionRecord, now: ProtectionRecord) -> str:
        if now.refused is not None and now.number != before.number:
            refused = now.refused
            return (
                f"protection stays {before.in_force}; {refused.scheme} was refused at step "
                f"{refused.step}: "
                f"{refused.cause}"
            )
        survives = f"it survives the loss of {now.tolerance} node(s) per sharding group"
        if not now.tolerance:
            survives += f": TOLERANCE IS 0, {self.why_unprotected()}"
        config = self._session.config
        if self.lost:
            survives += (
                f"; this version is written to {config.persist.dir} at once"
                if config.persist.dir is not None
                else '; nothing is on disk to fall back to: write "persist": {"dir": ...} into '
                '"reft"'
            )
        changed = (
            f"protection {before.in_force} -> {now.in_force} from the version after step "
            f"{now.step} on"
        )
        if now.degraded is None:
            back = (
                "; there is enough memory for the wanted protection again"
                if before.degraded
                else ""
            )
            return f"{changed}{back}; {survives}"
        return (
            f"{changed}, {now.degraded.versions} versions a rank instead of {now.scheme} with "
            f"{config.arena_count}: MEMORY IS SHORT: {now.degraded.cause}; {survives}"
        )

    def note(self) -> None:
        """Say on this node what is in force: for ``reft status``, and for the next start."""
        if local_rank() != 0:
            return
        try:
            write_record(self._session.memory.job_dir.path, self.record)
        except OSError as error:
            logger.warning(
                "the current protection cannot be recorded for the next start: %s", error
            )
