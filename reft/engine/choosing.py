"""``"protection": "auto"``: the choice at the start of a job, made by all ranks from the same facts."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

from reft.config import AOR, ReftConfig
from reft.control.control import ControlGroup
from reft.grid import Topology
from reft.log import EventLog
from reft.memory.free_memory import default_margin_bytes, free_bytes
from reft.policy.choose import Choice, Situation, choose
from reft.policy.loads import RankSections
from reft.protect.placement import LEAST_ARENAS

logger = logging.getLogger(__name__)


def choose_protection(
    config: ReftConfig,
    expected_bytes: tuple[int, int],
    *,
    control: ControlGroup,
    topology: Topology,
    job_dir: Path,
    events: EventLog,
    exact: bool = True,
) -> ReftConfig:
    """The block with the chosen protection in the place of ``auto``. Collective on all ranks.

    What a rank alone knows, the bytes of its state and the memory of its node, is gathered first; the rest
    is pure, so that all ranks choose the same. Windows are not measured yet: the choice needs none, since
    it takes what moves least. Partitions are recomputed by peers where the block says ``auto+aor``, and
    only there.

    Args:
        config: the block.
        expected_bytes: of this rank's replicated and owned sections.
        control: to gather by.
        topology: placement of this incarnation.
        job_dir: the job's memory on this node.
        events: told of the choice.
        exact: what a host recomputes is the owner's partition to the bit, as on CPUs; the same on all ranks.
    """
    gathered = control.gather_ints(
        [*expected_bytes, config.host_state_bytes, usable_memory_bytes(config, job_dir)]
    )
    memory: dict[str, int] = {}
    for node, (_, _, _, nbytes) in zip(topology.nodes, gathered, strict=True):
        memory[node] = min(nbytes, memory.get(node, nbytes))
    sections = tuple(RankSections(*nbytes) for *nbytes, _ in gathered)
    situation = Situation(topology, sections, config.arena_count, config.block_bytes, memory, exact)
    choice = _choose(situation, config)
    chosen, scheme = choice.chosen, choice.chosen.scheme
    events.write(
        "protection_chosen",
        scheme=chosen.name,
        tolerance=chosen.tolerance,
        wished=choice.wished,
        reason=choice.reason,
        needed=choice.needed,
        load=asdict(chosen.busiest),
    )
    if control.rank == 0:
        _say(choice)
    if not (config.recompute and scheme.certain_losses):
        return config.model_copy(update={"protection": str(scheme)})
    # Also where nothing is partitioned, as in a block that names the scheme.
    return config.model_copy(update={"protection": f"{scheme}{AOR}"})


def _choose(situation: Situation, config: ReftConfig) -> Choice:
    """Versions are given up before the tolerance is, as when memory runs short later."""
    best: Choice | None = None
    for arenas in range(config.arena_count, LEAST_ARENAS - 1, -1):
        choice = choose(replace(situation, arenas=arenas), config.tolerance, recompute=config.recompute)
        if best is None or choice.chosen.tolerance > best.chosen.tolerance:
            best = choice
        if best.reached:
            break
    assert best is not None
    return best


def _say(choice: Choice) -> None:
    if choice.reached:
        logger.warning("protection auto: %s: %s", choice.chosen.name, choice.reason)
    else:
        logger.warning(
            "THE WISHED TOLERANCE OF %d IS NOT REACHED; protection auto took the best there is: %s, "
            "%s. What it would take: %s",
            *(choice.wished, choice.chosen.name, choice.reason, "; ".join(choice.needed)),
        )
    for other in choice.alternatives:
        if other is not choice.chosen:
            logger.info("not %s: %s", other.name, choice.why_not_chosen(other))


def usable_memory_bytes(config: ReftConfig, job_dir: Path) -> int:
    """What may be reserved on this node: what is free but the margin, and what the job's arenas hold already,
    which make room for the new ones; at most the limit."""
    margin = config.memory_margin_bytes
    free = free_bytes(job_dir) - (default_margin_bytes(job_dir) if margin is None else margin)
    room = max(0, free) + sum(path.stat().st_size for path in job_dir.glob("*.arena"))
    return room if config.memory_limit_bytes is None else min(room, config.memory_limit_bytes)
