"""What the nodes of a round agree on: a pure function of what each brings into it.

No counter in the store could be left half done by a crash, and a store that was lost and came back empty
takes nothing along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from reft.errors import ConfigError
from reft.job.exits import Cause


class DuplicateNodeError(ConfigError):
    """Several launchers claim to be the same node."""

    def __init__(self, node: str) -> None:
        super().__init__(
            f"node id {node!r} is used by several launchers of this job; every node needs its own: give "
            f"--node-id, or a --memory-dir of its own to each launcher on one host"
        )


@dataclass(frozen=True)
class NodeInfo:
    """What one node brings into a round."""

    node: str
    workers: int
    turn: int = 0  # how many ranks each node gets in its turn (`deal_ranks`)
    renews: bool = False  # restarts are counted from the last new version on, not over the job's life
    # last round this launcher took part in, with its number of nodes and ``restarts_used``; 0: it is new
    round: int = 0
    size: int = 0
    restarts_used: int = 0
    # newest committed step that any node of that round knew of; ``newest_step``: that this node knows of now;
    # -1: none
    known_step: int = -1
    newest_step: int = -1
    incarnation: int = 0  # number of the newest start of the job that this node knows of
    # why the node's trainers of that round ended; None if they did not fail; ``failure``: in words
    cause: Cause | None = None
    failure: str = ""

    def after(self, agreement: Agreement) -> NodeInfo:
        """What this node brings into the next round, if the trainers of this one do not fail."""
        return replace(
            self,
            round=agreement.round,
            size=len(agreement.members),
            restarts_used=agreement.restarts_used,
            known_step=agreement.known_step,
            incarnation=agreement.incarnation,
            cause=None,
            failure="",
        )


@dataclass(frozen=True)
class Agreement:
    """The outcome, equal on all nodes."""

    round: int  # 1 for the first start of the trainers, one more after every restart
    members: tuple[str, ...]  # members, nodes: launchers and node ids of this round, by group rank
    nodes: tuple[str, ...]
    workers: tuple[int, ...]  # trainers of each node
    restarts_used: int  # of ``--max-restarts``, by the whole job
    known_step: int  # newest committed step that any of the nodes knows of; -1: none
    # number of this start of the job, greater than any that a node, or the store, knows of. Whoever carries a
    # lower one was replaced and is refused.
    incarnation: int = 1
    # why trainers of the round before ended, on the nodes that are still there
    failures: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # members that have to go: they claim to be a node that another is
    turn: int = 0  # ranks that each node gets in its turn

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Global rank of every trainer of each node, by local rank."""
        return deal_ranks(self.workers, self.turn)

    @property
    def world_size(self) -> int:
        return sum(self.workers)

    def nodes_without(self, members: Collection[str]) -> tuple[str, ...]:
        return tuple(n for n, member in zip(self.nodes, self.members, strict=True) if member not in members)


def agree(infos: Mapping[str, NodeInfo], before: Agreement | None = None) -> Agreement:
    """Work out a round from what its members bring, in the order of group ranks. ``before``: the newest round
    that is known of, whoever took part in it.

    A round that ended with at least one failure by own cause uses one restart of the job, however many nodes
    failed in it; one that ended because a node vanished, or because somebody joined, uses none.
    """
    all_infos = tuple(infos.values())
    last_round = max(c.round for c in all_infos)
    last = [c for c in all_infos if c.round == last_round and last_round]
    causes = {c.cause for c in last}
    # An abort without a word is a watchdog's if a peer is gone, and a bug of its own otherwise.
    own = Cause.OWN in causes or (Cause.UNCLEAR in causes and not _somebody_vanished(last))
    newest = max(c.newest_step for c in all_infos)
    known = max((c.known_step for c in last), default=-1)
    renewed = all_infos[0].renews and newest > known
    used = 0 if renewed else max((c.restarts_used for c in last), default=0)
    return Agreement(
        round=1 + max(last_round, before.round if before else 0),
        members=tuple(infos),
        nodes=tuple(c.node for c in all_infos),
        workers=tuple(c.workers for c in all_infos),
        restarts_used=used + own,
        known_step=max(newest, known),
        incarnation=1 + max([before.incarnation if before else 0, *(c.incarnation for c in all_infos)]),
        failures=_failures(last),
        refused=tuple(name for same in doubles(infos) for name in _refused(same, infos)),
        turn=all_infos[0].turn,
    )


def doubles(infos: Mapping[str, NodeInfo]) -> list[list[str]]:
    """Launchers that claim to be the same node, by node."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, info in infos.items():
        found[info.node].append(name)
    return [same for same in found.values() if len(same) > 1]


def _refused(same: list[str], infos: Mapping[str, NodeInfo]) -> list[str]:
    """Whoever is new has to go; the one that trains already keeps its name."""
    first, second, *others = sorted(same, key=lambda name: -infos[name].round)
    return [second, *others] if infos[first].round > infos[second].round else same


def deal_ranks(workers: Sequence[int], turn: int) -> tuple[tuple[int, ...], ...]:
    """Number the trainers of a job: the global ranks of each node, by local rank.

    DeepSpeed, and Megatron by default, number the data-parallel peers of a pipeline stage one after the
    other, with the slices of a tensor-parallel group side by side. torchrun gives a node all its ranks in a
    row, so that peers share nodes. Dealt out in turns as large as the tensor-parallel degree, neighbouring
    peers are on different nodes, and a tensor-parallel group stays on one.

    Args:
        workers: trainers of each node, by group rank.
        turn: ranks that a node gets in its turn; 0: all of them, as torchrun does.
    """
    dealt: list[list[int]] = [[] for _ in workers]
    rank = 0
    while rank < sum(workers):
        for ranks, count in zip(dealt, workers, strict=True):
            given = min(turn or count, count - len(ranks))
            ranks.extend(range(rank, rank + given))
            rank += given
    return tuple(map(tuple, dealt))


def _somebody_vanished(last: Sequence[NodeInfo]) -> bool:
    return bool(last) and len(last) < last[0].size


def _failures(last: Sequence[NodeInfo]) -> tuple[str, ...]:
    """Causes, not consequences: that peers were lost is said only where nothing else is known."""
    causes = (Cause.OWN, Cause.UNCLEAR)
    told = [c for c in last if c.cause in causes]
    if not told and not _somebody_vanished(last):
        told = [c for c in last if c.cause is not None]
    return tuple(f"{c.node}, {c.failure}" for c in told)
