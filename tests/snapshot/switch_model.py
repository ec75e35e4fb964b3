"""What a rank keeps, and how it changes: memory short on a rank, room again, an order, a layout agreed anew.

Which level is tried, and whether the ranks move to it, says the real
:class:`~reft.policy.switching.ActiveProtection`; which slots are given up, the real :meth:`Slots.slots_to_free`; which
arenas are made anew, the real :meth:`Slots.choose`. Around them stands what :class:`ArenaSet` and
:class:`SchemeSwitch` do: one file after the other is removed or made anew, any of which may fail, and after all of it
the ranks tell each other whether they could. Whose memory is short, and when, is left open: any rank at any vote.

Not explored: how the room of the nodes is counted before anything is touched (a change that is refused there
leaves everything as it was), and which bytes of which peer a scheme keeps: what a crash leaves is looked at as if
every scheme kept one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from reft.policy.switching import ActiveProtection
from reft.protect.placement import ProtectionLevel
from reft.snapshot.version import CopyFailed, Rejoined, Signal, Task, Voted
from tests.snapshot.version_model import (
    EMPTY,
    SOME,
    Ballot,
    Event,
    Move,
    OneRank,
    Rank,
    Rules,
    Stage,
    Verdict,
    say,
    write,
)


@dataclass(frozen=True)
class Keeps:
    in_force: ActiveProtection  # the protection
    wanted: int  # the order whose ladder it is on
    layout: object  # under which versions are written; None: to be agreed on
    count: int  # versions that it means to hold
    unused: frozenset[int] = frozenset()  # slots that it has given up
    before: int | None = None  # versions that it held before it tried a level; None: it tries none
    tried: int = 0  # that level
    made: frozenset[int] = frozenset()  # slots whose arenas it has made anew for that
    changes: int = 0  # that it has heard of


class SwitchingRank(OneRank):
    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.ladders = rules.ladders

    def start(self) -> Rank:
        first = self.ladders[0][0]
        return replace(super().start(), keeps=Keeps(self.rules.in_force, 0, None, first.arenas))

    def voting(self, rank: Rank) -> Iterator[Move]:
        keeps: Keeps = rank.keeps
        now = keeps.in_force
        for text, voted in super().voting(rank):
            for order, level in (
                self._wishes(keeps) if voted.cast.ok or not rank.state.votes_yes else ()
            ):
                ballot = replace(voted.cast, order=order, level=level)
                yield f"{text}, order {order}, level {level}", replace(voted, cast=ballot)
            if rank.state.votes_yes and not voted.cast.ok:
                yield (
                    text,
                    replace(voted, cast=replace(voted.cast, order=now.order, level=now.level)),
                )

    def _wishes(self, keeps: Keeps) -> set[tuple[int, int]]:
        now, last = keeps.in_force, len(self.ladders[keeps.wanted]) - 1
        orders, levels = {now.heard_order}, {now.level}
        if keeps.layout is not None:
            levels.add(now.heard_level)
        if keeps.changes < self.rules.changes:
            orders.add(min(now.order + 1, len(self.ladders) - 1))
            if keeps.layout is not None:
                levels |= {max(0, now.level - 1), min(last, now.level + 1)}
        return set(product(orders, levels))

    def results(
        self, cast: Sequence[tuple[Rank, Ballot]]
    ) -> Iterator[tuple[Voted | Verdict, list[Rank]]]:
        task = cast[0][1].task if cast else None
        if task is Task.LAYOUT:
            for level in range(max(len(ladder) for ladder in self.ladders)):
                yield Verdict(Voted(True), level=level), [r for r, _ in cast]
            return
        for voted, ranks in super().results(cast):
            assert isinstance(voted, Voted)
            heard = [(r, r.cast) for r in ranks if r.cast is not None]
            for order, level in {(b.order, c.level) for _, b in cast for _, c in cast}:
                may = [r for r, ballot in heard if ballot.order <= order and ballot.level <= level]
                if may:
                    yield Verdict(voted, order, level), may

    def hears(self, rank: Rank, result: Voted | Verdict) -> Iterator[Move]:
        assert isinstance(result, Verdict)
        assert rank.cast is not None
        text, keeps, mine = f"learns {say(result)}", rank.keeps, rank.cast
        rank = replace(rank, cast=None, result=None)
        match rank.state.task:
            case Task.LAYOUT:
                yield from self._laid_out(rank, result.level)
            case Task.SWITCH:
                failed = [not mine.ok, not result.voted.ok]
                yield text, self._tried(rank, keeps.in_force.moves(failed))
            case _:
                now = keeps.in_force.heard(result.order, result.level)
                new = now.due and not keeps.in_force.due
                keeps = replace(keeps, in_force=now, changes=keeps.changes + new)
                yield from self._effects(text, replace(rank, keeps=keeps), result.voted)

    def slot(self, rank: Rank) -> int | None:
        return rank.state.slots.choose(rank.keeps.unused)

    def layout(self, rank: Rank) -> object:
        return rank.keeps.layout

    def _copying(self, rank: Rank) -> Iterator[Move]:
        if rank.keeps.layout is not None or rank.state.head.stage is not Stage.QUEUED:
            # Another layout at any time is explored without changes; here, where there is none.
            yield from (move for move in super()._copying(rank) if not move[1].state.wants_layout)
            return
        yield "has no layout", self.tell(rank, Signal.UNFIT)
        if self.rules.errors:
            yield "fails before it has a layout", self.tell(rank, CopyFailed(SOME))

    def laying_out(self, rank: Rank) -> Iterator[Move]:
        yield (
            "agrees on a layout",
            replace(rank, cast=Ballot(rank.state.head.label, Task.LAYOUT, True)),
        )

    def _laid_out(self, rank: Rank, level: int) -> Iterator[Move]:
        """The first level that every node has memory for, or the last: any."""
        ladder = self.ladders[rank.keeps.wanted]
        found = ladder[min(level, len(ladder) - 1)]
        keeps = replace(rank.keeps, in_force=rank.keeps.in_force.now_on(ladder.index(found)))
        after = self._use(replace(rank, keeps=replace(keeps, layout=found.scheme)), found.arenas)
        for text, reserved in self._reserved(after):
            yield f"has agreed on {found}, {text}", self.tell(reserved, Signal.LAID_OUT)

    @staticmethod
    def _use(rank: Rank, count: int) -> Rank:
        """:meth:`ArenaSet.use`."""
        unused = rank.state.slots.slots_to_free(count, rank.keeps.unused)
        for slot in unused:
            rank = write(rank, slot, EMPTY)
        return replace(rank, keeps=replace(rank.keeps, unused=unused, count=count))

    @staticmethod
    def _reserved(rank: Rank) -> Iterator[Move]:
        """:meth:`ArenaSet.reserve`, which may end anywhere; and with nothing to do."""
        yield "makes no arena anew", rank
        made: list[int] = []
        while (slot := rank.state.slots.choose([*made, *rank.keeps.unused])) is not None:
            made.append(slot)
            rank = write(rank, slot, EMPTY)
            yield f"makes arenas {made} anew", rank

    def _effects(self, text: str, rank: Rank, event: Event) -> Iterator[Move]:
        """After a commit, memory is reserved that could not be before (:meth:`ArenaSet.reserve_rest`)."""
        for said, after in super()._effects(text, rank, event):
            yield said, after
            if after.state.slots.committed_label != rank.state.slots.committed_label:
                for settled, reserved in self._reserved(self._use(after, after.keeps.count)):
                    yield f"{said}, {settled}", reserved

    def switching(self, rank: Rank) -> Iterator[Move]:
        keeps: Keeps = rank.keeps
        now = keeps.in_force
        if keeps.before is not None:
            yield from self._trying(rank)
        elif not now.due:
            yield "goes on", self.tell(rank, Signal.SWITCHED)
        elif keeps.layout is not None:
            yield from self._try(rank, 0 if now.ordered else self._targets(keeps)[0])
        elif now.ordered:
            yield f"follows order {now.heard_order}", self._followed(rank)
        else:
            yield "has no layout to change", _now(rank, now.now_on(now.level))

    def _targets(self, keeps: Keeps) -> Sequence[int]:
        return keeps.in_force.targets(len(self.ladders[keeps.wanted]))

    def _level(self, keeps: Keeps) -> ProtectionLevel:
        ordered = keeps.in_force.ordered
        return self.ladders[keeps.in_force.heard_order if ordered else keeps.wanted][keeps.tried]

    def _try(self, rank: Rank, tried: int) -> Iterator[Move]:
        keeps = replace(rank.keeps, tried=tried, before=len(rank.files) - len(rank.keeps.unused))
        level = self._level(keeps)
        unused = rank.state.slots.slots_to_free(level.arenas, keeps.unused)
        keeps = replace(keeps, unused=unused, count=level.arenas)
        yield f"tries {level}, gives up {sorted(unused)}", replace(rank, keeps=keeps)

    def _trying(self, rank: Rank) -> Iterator[Move]:
        keeps: Keeps = rank.keeps
        vote = Ballot(rank.state.head.label, Task.SWITCH, True)
        left = [slot for slot in sorted(keeps.unused) if rank.files[slot] != EMPTY]
        slot = rank.state.slots.choose([*keeps.made, *keeps.unused])
        if left:
            yield f"removes arena {left[0]}", write(rank, left[0], EMPTY)
            return
        if slot is not None:
            made = replace(keeps, made=keeps.made | {slot})
            yield f"makes arena {slot} anew", write(replace(rank, keeps=made), slot, EMPTY)
        else:
            yield "has reserved all", replace(rank, cast=vote)
        if self.rules.short:
            yield "cannot reserve all", replace(rank, cast=replace(vote, ok=False))

    def _tried(self, rank: Rank, moves: bool) -> Rank:
        keeps: Keeps = rank.keeps
        assert keeps.before is not None
        over = replace(keeps, before=None, tried=0, made=frozenset())
        if moves:
            if keeps.in_force.ordered:
                return self._followed(replace(rank, keeps=over))
            layout = self._level(keeps).scheme
            return _now(
                replace(rank, keeps=replace(over, layout=layout)),
                keeps.in_force.now_on(keeps.tried),
            )
        back = self._use(replace(rank, keeps=over), keeps.before)
        if keeps.in_force.ordered:
            return _now(back, keeps.in_force.followed(keeps.in_force.heard_order))
        left = [target for target in self._targets(keeps) if target > keeps.tried]
        if left and keeps.in_force.heard_level > keeps.in_force.level:
            return next(after for _, after in self._try(back, left[0]))
        return _now(back, keeps.in_force.now_on(keeps.in_force.level))

    def _followed(self, rank: Rank) -> Rank:
        keeps: Keeps = rank.keeps
        now = keeps.in_force.followed(keeps.in_force.heard_order).now_on(0)
        wanted = self.ladders[now.order][0]
        layout = None if keeps.layout is None else wanted.scheme
        after = replace(rank, keeps=replace(keeps, in_force=now, wanted=now.order, layout=layout))
        return self._use(after, wanted.arenas)

    def interrupted(self, rank: Rank) -> Rank:
        keeps = replace(rank.keeps, before=None, tried=0, made=frozenset())
        return super().interrupted(replace(rank, keeps=keeps))

    def record(self, rank: Rank) -> tuple[int, ...]:
        return rank.keeps.in_force.order, rank.keeps.wanted

    def met(self, rank: Rank, event: Rejoined, record: tuple[int, ...]) -> Iterator[Move]:
        order, wanted = record
        now = rank.keeps.in_force.resync(order, len(self.ladders[wanted]))
        keeps = replace(rank.keeps, in_force=now, wanted=wanted, layout=None)
        yield from super().met(replace(rank, keeps=keeps), event, record)


def _now(rank: Rank, in_force: ActiveProtection) -> Rank:
    return replace(rank, keeps=replace(rank.keeps, in_force=in_force))
