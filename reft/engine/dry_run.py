"""``reft launch --dry-run``: the engine is built, what reft would do is said, and the job ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reft.engine.choosing import usable_memory_bytes
from reft.env import ENV_DRY_RUN
from reft.errors import ConfigError
from reft.grid import ring_order
from reft.policy.loads import Load, OwnedBy, RankSections, group_loads

if TYPE_CHECKING:
    from reft.engine.session import Session

_NODES_SHOWN = 8


def end_dry_run(session: Session) -> None:
    """Where this start is one, say on rank 0 what the job would keep and copy. Collective then.

    Raises:
        SystemExit: it is one; with code 0.
        ConfigError: it is one, and a node has less memory to spare than the job would reserve.
    """
    if os.environ.get(ENV_DRY_RUN) != "1":
        return
    loads = _loads(session)
    nodes = _node_memory(session, loads)
    if session.is_rank_zero:
        print(_words(session, loads, nodes), flush=True)
    if lacking := [node for node in nodes if node.needed_bytes > node.usable_bytes]:
        worst = max(lacking, key=lambda node: node.needed_bytes - node.usable_bytes)
        raise ConfigError(
            f"{len(lacking)} of {len(nodes)} node(s) have too little memory for reft: {worst.name} would "
            f"have to reserve {_mib(worst.needed_bytes)}, and {_mib(worst.usable_bytes)} may be used. The "
            f"job would train without snapshots. Free memory there, enlarge the memory directory, raise "
            f"memory_limit_bytes, keep fewer versions (arenas) or less redundancy (protection), or use more "
            f"nodes"
        )
    raise SystemExit(0)


@dataclass(frozen=True)
class _NodeMemory:
    """What one node would reserve for its ranks, and what reft may use there."""

    name: str
    needed_bytes: int
    usable_bytes: int


def _node_memory(session: Session, loads: dict[int, Load]) -> list[_NodeMemory]:
    """Of every node. Collective."""
    topology = session.topology
    mine = usable_memory_bytes(session.config, session.memory.job_dir.path)
    usable = [value for (value,) in session.control.gather_ints([mine])]
    found = []
    for node in dict.fromkeys(topology.nodes):
        ranks = topology.local_ranks(node)
        needed = sum(loads[rank].memory_bytes for rank in ranks)
        found.append(_NodeMemory(node, needed, min(usable[rank] for rank in ranks)))
    return found


def _loads(session: Session) -> dict[int, Load]:
    """By rank."""
    config, topology = session.config, session.topology
    mine = [*session.state.adapter.expected_bytes(), config.host_state_bytes]
    sections = [RankSections(*nbytes) for nbytes in session.control.gather_ints(mine)]
    found: dict[int, Load] = {}
    for pp, tp in topology.groups():
        members = topology.group(pp, tp)
        loads = group_loads(
            [sections[rank] for rank in members],
            ring_order(topology.group_nodes(pp, tp)),
            session.protection.record.parsed,
            OwnedBy.AOR if config.recompute else OwnedBy.PEER,
            arenas=config.arena_count,
            block_bytes=config.block_bytes,
        )
        found |= dict(zip(members, loads, strict=True))
    return found


def _words(session: Session, loads: dict[int, Load], nodes: list[_NodeMemory]) -> str:
    topology, config = session.topology, session.config
    copied, sent = max(x.to_host_bytes for x in loads.values()), max(x.sent_bytes for x in loads.values())
    tightest = sorted(nodes, key=lambda node: node.usable_bytes - node.needed_bytes)
    memory = "".join(
        f"memory of {node.name}: {_mib(node.needed_bytes)} for {config.arena_count} versions, "
        f"{_mib(node.usable_bytes)} may be used\n"
        for node in tightest[:_NODES_SHOWN]
    )
    if len(nodes) > _NODES_SHOWN:
        memory += f"{len(nodes) - _NODES_SHOWN} more nodes have more memory to spare\n"
    return (
        f"dry run: {topology.degrees} on {len(set(topology.failure_domains))} node(s), "
        f"{session.engine.name}\n"
        f"protection: {session.protection.record.scheme}, survives {session.tolerance} lost node(s) per "
        f"sharding group\n"
        f"{memory}"
        f"a version: every rank copies at most {_mib(copied)} to the host and sends at most {_mib(sent)} to "
        f"other nodes\n"
        f"nothing was trained, and the job's own memory was not touched"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
