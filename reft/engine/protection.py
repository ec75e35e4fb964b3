"""The protection of a session's versions: agreed at the start, switched by order, noted on every node."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reft.config import AOR, AUTO, FaultPoint, ReftConfig
from reft.control.control import WorkerControl
from reft.engine.identity import local_rank
from reft.errors import UnsupportedStateError
from reft.grid import ring_order
from reft.memory.files import default_margin_bytes, free_bytes
from reft.node.protection import OrderWatch, ProtectionRecord, read_record, resume, write_record
from reft.policy.choose import Choice, Situation, choose
from reft.policy.loads import GRADIENT_BYTES, OPTIMIZER_BYTES, OwnedBy, RankSections, Rates
from reft.protect.placement import LEAST_ARENAS, surviving_schemes, tolerance
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.switching import Keeping, SchemeSwitch
from reft.state.adapters import StateAdapter
from reft.state.gradients import check_recomputable

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)

_SENT_BYTES = 8 * 2**20
_SPARE = 4  # times the gradients that recomputing keeps on a device have to be free there at the start


def situation_of(session: Session) -> Situation:
    """What a rank alone knows, the bytes of its state and the memory of its node, is gathered; the rest is
    pure, so that all ranks choose the same. Collective."""
    config, topology, adapter = session.config, session.topology, session.engine.adapter
    job_dir, limit = session.memory.job_dir.path, config.memory_limit_bytes
    # What may be reserved on this node: what is free but the margin, and what the job's arenas hold already,
    # which make room for the new ones; at most the limit.
    room = max(0, free_bytes(job_dir) - _margin_bytes(config, job_dir))
    room += sum(path.stat().st_size for path in job_dir.glob("*.arena"))
    usable = room if limit is None else min(room, limit)
    gathered = session.control.gather_ints([*adapter.expected_bytes(), config.host_state_bytes, usable])
    # Whether what a host recomputes is the owner's partition to the bit, as on CPUs.
    exact = adapter.steps_exactly and all(found.adam_is_exact for found in session.device_findings)
    exact = exact or not session.copying.engine.asynchronous
    memory: dict[str, int] = {}
    for node, (_, _, _, nbytes) in zip(topology.nodes, gathered, strict=True):
        memory[node] = min(nbytes, memory.get(node, nbytes))
    sections = tuple(RankSections(*nbytes) for *nbytes, _ in gathered)
    return Situation(topology, sections, config.arena_count, config.block_bytes, memory, exact)


def choose_protection(session: Session) -> ReftConfig:
    """The block with the chosen protection in the place of ``auto``. Collective. Windows are not measured
    yet: the choice needs none, since it takes what moves least."""
    config, situation = session.config, situation_of(session)
    situation = replace(situation, rates=_measured_rates(session, situation))
    # Versions are given up before the tolerance is, as when memory runs short later.
    choices = [
        choose(replace(situation, arenas=arenas), config.tolerance, recompute=config.recompute)
        for arenas in range(config.arena_count, LEAST_ARENAS - 1, -1)
    ]
    reached = (choice for choice in choices if choice.reached)
    choice = next(reached, max(choices, key=lambda choice: choice.chosen.tolerance))
    chosen, scheme = choice.chosen, choice.chosen.scheme
    session.events.write(
        "protection_chosen",
        scheme=chosen.name,
        tolerance=chosen.tolerance,
        wanted=choice.wanted,
        reason=choice.reason,
        needed=choice.needed,
        load=asdict(chosen.busiest),
    )
    if session.is_rank_zero:
        _say(choice)
    # Where it is asked for also if nothing is partitioned, as in a block that names the scheme.
    recompute = chosen.owned_by is OwnedBy.AOR or (config.recompute and scheme.certain_losses)
    return config.model_copy(update={"protection": f"{scheme}{AOR}" if recompute else str(scheme)})


def _measured_rates(session: Session, situation: Situation) -> Rates | None:
    """None where recomputing was not seen to be exact, or is not possible. Collective."""
    config, control, adapter = session.config, session.control, session.engine.adapter
    found = session.device_findings
    if not (found and situation.exact and situation.owns) or config.recompute or config.interval_steps != 1:
        return None
    # Gradients of as many partitions as losses are survived lie on the device, beside what training needs.
    parameters = max(1, config.tolerance) * situation.sections[control.rank].owned_bytes // OPTIMIZER_BYTES
    possible = session.copying.engine.free_bytes >= _SPARE * GRADIENT_BYTES * parameters
    try:
        possible = possible and isinstance(adapter, StateAdapter) and bool(check_recomputable(adapter))
    except UnsupportedStateError:
        possible = False
    stage = session.coordinate.pp, session.coordinate.tp
    ring = [session.topology.group(*stage)[d] for d in ring_order(session.topology.group_nodes(*stage))]
    at = ring.index(control.rank)
    peers = {ring[at - 1], ring[(at + 1) % len(ring)]} - {control.rank}
    if control.any_of(not possible or not peers)[0]:
        return None
    sent = torch.empty(_SENT_BYTES, dtype=torch.uint8)
    for _ in range(2):  # connections are made by the first
        began = time.perf_counter()
        control.exchange({p: [sent] for p in peers}, {p: [torch.empty_like(sent)] for p in peers})
        rate = int(_SENT_BYTES * len(peers) / (time.perf_counter() - began))
    return Rates(
        copy_bytes_per_sec=min(one.copy_bytes_per_sec for one in found),
        peer_bytes_per_sec=min(one for (one,) in control.gather_ints([rate])),
        adam_parameters_per_sec=min(one.adam_parameters_per_sec for one in found),
        free_cores=min(one.free_cores for one in found),
    )


def _say(choice: Choice) -> None:
    if choice.reached:
        logger.warning("protection auto: %s: %s", choice.chosen.name, choice.reason)
    else:
        logger.warning(
            "THE WANTED TOLERANCE OF %d IS NOT REACHED; protection auto chose the best possible: %s, %s. "
            "To reach it: %s",
            *(choice.wanted, choice.chosen.name, choice.reason, "; ".join(choice.needed)),
        )
    for other in choice.alternatives:
        if other is not choice.chosen:
            logger.info("not %s: %s", other.name, choice.why_not_chosen(other))


def _margin_bytes(config: ReftConfig, job_dir: Path) -> int:
    margin = config.memory_margin_bytes
    return default_margin_bytes(job_dir) if margin is None else margin


class Protection:
    """The protection that is in force, the same on all ranks. Made collectively; a ConfigError where the
    groups are too small for the scheme. ``chosen``: whether the scheme was chosen (``auto``), not named by
    the block."""

    def __init__(self, session: Session, *, chosen: bool) -> None:
        config = session.config
        self.is_chosen = chosen
        self._control = session.control
        self._topology = session.topology
        self._job_dir = session.memory.job_dir.path
        self._events = session.events
        self._persist_dir = config.persist.dir
        self._keeping = Keeping(config.arena_count, _margin_bytes(config, self._job_dir))
        # The last switch, if any node's memory tells of one and the block has not been edited since; else
        # what the block says.
        scheme, mine = str(config.scheme), read_record(self._job_dir)
        told = b"" if mine is None else json.dumps(mine.to_json()).encode()
        records = [ProtectionRecord.from_json(json.loads(d)) for d in self._control.gather_bytes(told) if d]
        found = resume(records, f"{AUTO}:{config.tolerance}" if chosen else scheme, scheme)
        self.record = replace(
            found,
            tolerance=tolerance(self._topology, found.parsed.copies, found.parsed.parities),
            incarnation=session.memory.incarnation,
            aor=config.recompute,
        )

    def switch(
        self, control: WorkerControl, arenas: ArenaSet, reach: Callable[[FaultPoint, int], None]
    ) -> SchemeSwitch:
        """For the snapshot worker, which agrees by ``control``; from here on orders are followed."""
        self.note()
        return SchemeSwitch(
            *(control, self._topology, arenas, self.record, OrderWatch(self._job_dir)),
            keeping=self._keeping,
            on_change=self._changed,
            reach=reach,
        )

    @property
    def lost(self) -> bool:
        """Whether memory has become too short to survive the loss of a node, which it did before."""
        return self.record.degraded is not None and self.record.tolerance == 0

    def why_unprotected(self) -> str:
        if self.record.in_force == "none":
            return 'the protection is "none"'
        if self._topology.degrees.dp == 1:
            return "with a data-parallel degree of 1 nothing is redundant"
        if len(set(self._topology.failure_domains)) == 1:
            return (
                "all ranks share a node with their copies: killed trainers are survived, the loss of the "
                "node is not"
            )
        nodes = [self._topology.group_nodes(*group) for group in self._topology.groups()]
        d = self._topology.degrees
        order = "across-nodes" if d.tp == 1 else f"across-nodes:{d.tp}"
        to_write = (
            f"start it with reft launch --rank-order {order}, or give PipelineModule "
            f"topology=reft.topology(pp={d.pp}, dp={d.dp}, tp={d.tp})"
        )
        others = " or ".join(f'"{scheme}"' for scheme in surviving_schemes(self._topology))
        if others:
            return (
                f"a node holds several data-parallel members of a stage, more than {self.record.in_force} "
                f"restores (found nodes {nodes}); write {others}, which survive the loss of a node here, or "
                f"put the members on different nodes: {to_write}"
            )
        return (
            f"data-parallel members of a stage share a node with their copies (found nodes {nodes}); put "
            f"them on different nodes: {to_write}"
        )

    def _changed(self, record: ProtectionRecord) -> None:
        """An order was carried out, or refused; or memory ran short, or came back. Called by the worker."""
        before, self.record = self.record, record
        self.note()
        self._events.write("protection", **record.to_json())
        if self._control.rank == 0:
            logger.warning("%s", self._words(before, record))

    def _words(self, before: ProtectionRecord, now: ProtectionRecord) -> str:
        if now.refused is not None and now.number != before.number:
            refused = now.refused
            return (
                f"protection stays {before.in_force}; {refused.scheme} was refused at step {refused.step}: "
                f"{refused.cause}"
            )
        survives = f"it survives the loss of {now.tolerance} node(s) per sharding group"
        if not now.tolerance:
            survives += f": TOLERANCE IS 0, {self.why_unprotected()}"
        if self.lost:
            survives += (
                f"; this version is written to {self._persist_dir} at once"
                if self._persist_dir is not None
                else '; nothing is on disk to fall back to: write "persist": {"dir": ...} into "reft"'
            )
        changed = f"protection {before.in_force} -> {now.in_force} from the version after step {now.step} on"
        if now.degraded is None:
            back = "; there is enough memory for the wanted protection again" if before.degraded else ""
            return f"{changed}{back}; {survives}"
        return (
            f"{changed}, {now.degraded.versions} versions a rank instead of {now.scheme} with "
            f"{self._keeping.versions}: MEMORY IS SHORT: {now.degraded.cause}; {survives}"
        )

    def note(self) -> None:
        """Say on this node what is in force: for ``reft status``, and for the next start."""
        if local_rank() != 0:
            return
        try:
            write_record(self._job_dir, self.record)
        except OSError as error:
            logger.warning("the current protection cannot be recorded for the next start: %s", error)
