"""``reft launch --dry-run``: the engine is built, what reft would do is said, and the job ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reft.env import ENV_DRY_RUN
from reft.grid import ring_order
from reft.policy.loads import Load, OwnedBy, RankSections, group_loads

if TYPE_CHECKING:
    from reft.hook.session import Session


def end_dry_run(session: Session) -> None:
    """Where this start is one, say on rank 0 what the job would keep and copy. Collective then.

    Raises:
        SystemExit: it is one; with code 0.
    """
    if os.environ.get(ENV_DRY_RUN) != "1":
        return
    loads = _loads(session)
    if session.is_rank_zero:
        print(_words(session, loads), flush=True)
    raise SystemExit(0)


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


def _words(session: Session, loads: dict[int, Load]) -> str:
    topology, config = session.topology, session.config
    nodes = set(topology.nodes)
    per_node = max(sum(loads[r].memory_bytes for r in topology.local_ranks(node)) for node in nodes)
    copied, sent = max(x.to_host_bytes for x in loads.values()), max(x.sent_bytes for x in loads.values())
    return (
        f"dry run: {topology.degrees} on {len(set(topology.failure_domains))} node(s), "
        f"{session.engine.name}\n"
        f"protection: {session.protection.record.scheme}, survives {session.tolerance} lost node(s) per "
        f"sharding group\n"
        f"memory: at most {_mib(per_node)} a node, for {config.arena_count} versions\n"
        f"a version: every rank copies at most {_mib(copied)} to the host and sends at most {_mib(sent)} to "
        f"other nodes\n"
        f"nothing was trained, and the job's own memory was not touched"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
