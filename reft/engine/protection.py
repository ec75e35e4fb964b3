"""The active protection: the node losses that the job survives, and reports of changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from reft.config import AUTO
from reft.engine.context import JobContext
from reft.engine.nodes import local_rank
from reft.memory.protection_record import (
    ProtectionRecord,
    read_record,
    resume_record,
    write_record,
)
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, surviving_schemes, tolerance

logger = logging.getLogger(__name__)


class Protection:
    """The active protection, the same on all ranks. The constructor is collective.

    Args:
        context: the job.
        incarnation: number of this start.
        chosen: True if reft has chosen the scheme (``auto``), which the block then does not
            name.

    Raises:
        ConfigError: the groups are too small for the scheme.
    """

    def __init__(self, context: JobContext, incarnation: int, *, chosen: bool) -> None:
        config = context.config
        self._context = context
        self.is_chosen = chosen
        # Use the last switch recorded in a node's memory. If there is none, or the block was edited
        # since, use the block's scheme.
        scheme, local = str(config.scheme), read_record(context.job_dir.path)
        message = b"" if local is None else json.dumps(local.to_json()).encode()
        replies = context.control.gather_bytes(message)
        records = [ProtectionRecord.from_json(json.loads(reply)) for reply in replies if reply]
        found = resume_record(records, f"{AUTO}:{config.tolerance}" if chosen else scheme, scheme)
        self.record = replace(
            found,
            tolerance=tolerance(context.topology, found.parsed.copies, found.parsed.parities),
            incarnation=incarnation,
            aor=config.recompute,
        )

    def kept_members(self) -> tuple[int, ...]:
        """Return other members of the sharding group whose bytes this rank stores."""
        at, scheme = self._context.coordinate, Scheme.parse(self.record.in_force)
        nodes = self._context.topology.group_nodes(at.pp, at.tp)
        return place_group(nodes, scheme.copies, scheme.parities).kept_by(at.dp)[1:]

    @property
    def lost(self) -> bool:
        """Whether the job would not survive the loss of a node now, because memory has run
        short."""
        return self.record.degraded is not None and self.record.tolerance == 0

    def why_unprotected(self) -> str:
        """Explain why the job does not survive the loss of a node, and what to change."""
        if self.record.in_force == "none":
            return 'the protection is "none"'
        topology, d = self._context.topology, self._context.topology.degrees
        if d.dp == 1:
            return "with a data-parallel degree of 1 nothing is redundant"
        if len(set(topology.failure_domains)) == 1:
            return (
                "all ranks share a node with their copies: killed trainers are survived, the loss "
                "of the node is not"
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
                f"{self.record.in_force} restores (found nodes {nodes}); write {others}, which "
                "survive the loss of a node here, or put the members on different nodes: "
                f"{to_write}"
            )
        return (
            "data-parallel members of a stage share a node with their copies (found nodes "
            f"{nodes}); put them on different nodes: {to_write}"
        )

    def changed(self, record: ProtectionRecord) -> None:
        """Record and log a new protection, after a request was carried out or refused, or after
        memory ran short or became available again. Called by the worker thread."""
        before, self.record = self.record, record
        self.note()
        self._context.events.write("protection", **record.to_json())
        if self._context.is_rank_zero:
            logger.warning("%s", self._words(before, record))

    def _words(self, before: ProtectionRecord, now: ProtectionRecord) -> str:
        if now.refused is not None and now.number != before.number:
            refused = now.refused
            return (
                f"protection stays {before.in_force}; {refused.scheme} was refused at step "
                f"{refused.step}: {refused.cause}"
            )
        survives = f"it survives the loss of {now.tolerance} node(s) per sharding group"
        if not now.tolerance:
            survives += f": TOLERANCE IS 0, {self.why_unprotected()}"
        config = self._context.config
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
        """Record the active protection on this node, for ``reft status`` and for the next start."""
        if local_rank() != 0:
            return
        try:
            write_record(self._context.job_dir.path, self.record)
        except OSError as error:
            logger.warning(
                "the current protection cannot be recorded for the next start: %s", error
            )
