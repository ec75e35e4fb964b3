"""Has a job follow its own advice, where the block says ``elastic.follow_advice``: the launcher of the first
node decides, and orders what ``reft scale`` would."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig

from reft.config import ReftConfig
from reft.elastic.agreement import Agreement
from reft.elastic.board import StatusBoard
from reft.elastic.handler import StoreRendezvous
from reft.elastic.shared_state import leaving_of, scaling_of
from reft.policy.advice import advise
from reft.policy.following import JobNow, Sustained, decide
from reft.policy.seen import situation
from reft.store.daemon import CONFIG_FILE
from reft.store.history import read_history
from reft.store.jobdir import read_json
from reft.store.scale_orders import read_order, write_order
from reft.store.signals import Board, Signal, tolerance_without

logger = logging.getLogger(__name__)

LOOK_SECS = 1.0


class Follower:
    """One launcher's part. Looks while the trainers run.

    Args:
        handler: of the rendezvous.
        path: the job's memory on this node.
        board: of the job.
    """

    def __init__(self, handler: StoreRendezvous, path: Path, board: StatusBoard) -> None:
        self._handler = handler
        self._path = path
        self._board = board
        self._sustained = Sustained()
        self._round: int | None = None
        self._looked = float("-inf")
        self._said: set[tuple[object, ...]] = set()
        """In this round: what stands again, after something else stood for a while, is no news."""

    def look(self, agreement: Agreement, group_rank: int, config: LaunchConfig) -> None:
        """Follow what was advised for long. Best effort: it looks again."""
        now = time.monotonic()
        if group_rank != 0 or now - self._looked < LOOK_SECS:
            return
        self._looked = now
        try:
            block = ReftConfig.model_validate(read_json(self._path / CONFIG_FILE) or {})
            if block.elastic.follow_advice:
                self._follow(agreement, config, block.tolerance)
        except (OSError, ValueError) as error:
            logger.debug("advice: %s", error)

    def _follow(self, agreement: Agreement, config: LaunchConfig, wished: int) -> None:
        board = self._board.board
        steps = [row.report.step for row in board.rows if row.report.step is not None]
        if not steps or any(row.report.round > agreement.round for row in board.rows):
            return
        if agreement.round != self._round:  # what was said of trainers that were started anew is over
            self._round, self._sustained = agreement.round, Sustained()
            self._said.clear()
        seen = situation([self._path], board, config.max_nodes)
        sustained = self._sustained.look(advise(seen), max(steps))
        decision = decide(
            sustained,
            JobNow(
                nodes=agreement.nodes,
                spares=len(seen.spares),
                least=config.min_nodes,
                most=config.max_nodes,
                settled=not leaving_of(self._handler.state) and _is_settled(board, agreement),
                tolerance=self._board.tolerance_left(agreement.incarnation),
                wished=wished,
                unix_secs=time.time(),
                tolerance_without={n: tolerance_without(board.rows, n) for n in agreement.nodes},
                ordered_unix_secs=self._last_order(),
                ordered_nodes=self._nodes_ordered(),
            ),
        )
        if decision.nodes is not None:
            if self._is_news(decision.nodes, decision.without):
                logger.warning("advice is followed: %s", decision.why)
            write_order(self._path, decision.nodes, decision.without, decision.why)
        elif sustained and self._is_news(decision.why, *((a.action, a.nodes) for a in sustained)):
            logger.info("advice is not followed: %s; %s", decision.why, "; ".join(map(str, sustained)))

    def _is_news(self, *what: object) -> bool:
        """Whether it was not said in this round yet."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def _last_order(self) -> float | None:
        """When an order was given last, by a person or for advice: here, to any node that trains, or as this
        node saw it followed."""
        order, scaling = read_order(self._path), scaling_of(self._handler.state)
        numbers = [each.number / 1000 for each in (order, scaling) if each is not None]
        times = [r.unix_secs for r in read_history(self._path) if r.followed]
        return max([*numbers, *times], default=None)

    def _nodes_ordered(self) -> int | None:
        """Nodes that a person has asked for, if nothing was ordered since."""
        scaling = scaling_of(self._handler.state)
        return None if scaling is None or scaling.why or scaling.replaces else scaling.nodes


def _is_settled(board: Board, agreement: Agreement) -> bool:
    """All nodes that train are there and well, with trainers of this round."""
    rows = {row.report.node: row for row in board.rows}
    mine = [rows.get(node) for node in agreement.nodes]
    return all(
        row is not None
        and row.signal not in (Signal.OFFLINE, Signal.UNHEALTHY)
        and row.report.round == agreement.round
        for row in mine
    )
