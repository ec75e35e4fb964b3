"""Which orders for another number of nodes can be followed, and which nodes leave for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reft.grid import Degrees
from reft.job.sizes import Sizes, why_not
from reft.memory.scale_orders import ScaleOrder, Size
from reft.protect.codes import Scheme


@dataclass(frozen=True)
class Situation:
    """What an order is judged by.

    Attributes:
        least, most: nodes, of ``--nnodes``.
        nodes: ids of those that train.
        spares: nodes that wait.
        workers: trainers of each node.
        tolerance: node losses that the job survives now; None: nothing is committed yet.
        degrees: of the newest version; None: not known.
        parities: the protection that was asked for by name and keeps parities; None: another.
        size: what else decides about the degree; None: not known.
        sizes: who holds what of the newest version, by the ranks of these nodes; None: not known.
    """

    least: int
    most: int
    nodes: tuple[str, ...]
    spares: int
    workers: int
    tolerance: int | None
    degrees: Degrees | None = None
    parities: Scheme | None = None
    size: Size | None = None
    sizes: Sizes | None = None

    def why_not(self, nodes: int, *, asked: bool = False) -> str:
        """Why the job cannot train on so many nodes; "" where it can, as far as is known."""
        if self.degrees is None:
            return ""
        return why_not(nodes, self.workers, self.degrees, self.size, self.parities, asked=asked)

    @property
    def fitting(self) -> tuple[int, ...]:
        """Numbers of nodes that the job may have."""
        return tuple(
            n
            for n in range(self.least, self.most + 1)
            if n == len(self.nodes) or not self.why_not(n, asked=True)
        )

    def way(self, wanted: int) -> tuple[int, ...]:
        """Numbers of nodes to which it can go on its way to fewer, ``wanted`` first."""
        return tuple(n for n in range(wanted, len(self.nodes)) if n == wanted or not self.why_not(n))


def refusal(order: ScaleOrder, now: Situation) -> str:
    """Why an order cannot be followed, however long it waits; "" where it can. Pure."""
    return (
        _of_the_number(order, now)
        or _of_the_names(order, now)
        or _of_what_fits(order, now)
        or of_the_way(order, now)
    )


def shortfall(order: ScaleOrder, now: Situation) -> str:
    """Which losses, that the order means, the job does not survive at this moment; "": it does. Pure."""
    if now.tolerance is None:
        return "nothing is committed in this start of the job yet"
    named = len(set(order.without)) if replaces(order, now.nodes) else 0
    fewer = order.nodes < len(now.nodes)
    if now.tolerance >= named and not (fewer and not leave_next(order.nodes, order.without, now)):
        return ""
    leave = "a node that leaves takes its part of the state along"
    if named > 1:
        leave = f"{named} nodes were named to be replaced at once"
    elif fewer and (at_once := len(now.nodes) - max(now.way(order.nodes))) > 1:
        leave = f"{at_once} nodes would leave at once, since no number between fits"
    return f"{leave}, and now the job survives the loss of {max(0, now.tolerance) or 'none'}"


def leave_next(
    wanted: int, first: tuple[str, ...], now: Situation, survived: int | None = None
) -> tuple[int, ...]:
    """Group ranks of the nodes that leave next, on the way to fewer: as many as the job survives the loss of,
    down to a number that fits; () where there is none. Pure.

    Args:
        wanted: nodes that the job is to have.
        first: ids of the nodes that leave before any other.
        now: what is judged by.
        survived: losses, whichever they are; None: as now.
    """
    survived = (now.tolerance or 0) if survived is None else survived
    running, way = len(now.nodes), now.way(wanted)
    if survived < 0:
        return ()
    for number in way:
        if running - number <= survived:
            return leavers(now.nodes, running - number, first)
    whole = None if now.sizes is None else now.sizes.tolerance()
    if now.sizes is None or whole is None or survived < whole:
        return ()  # another node is lost, perhaps
    named = [rank for rank, node in enumerate(now.nodes) if node in first]
    found = (now.sizes.leaving(running - number, named[: running - number]) for number in way)
    return next((ranks for ranks in found if ranks), ())


def _of_what_fits(order: ScaleOrder, now: Situation) -> str:
    why = now.why_not(order.nodes, asked=True)
    return why and f"{why}. {_other_numbers(now)}"


def of_the_way(order: ScaleOrder, now: Situation) -> str:
    """Where the nodes that leave at once are more than the job ever survives the loss of."""
    running = len(now.nodes)
    whole = None if now.sizes is None else now.sizes.tolerance()
    if order.nodes >= running or now.tolerance is None or whole is None:
        return ""
    survived = max(whole, now.tolerance)
    if leave_next(order.nodes, order.without, now, survived):
        return ""
    at_once = running - max(now.way(order.nodes))
    protect = ""
    if now.degrees is not None and at_once < now.degrees.dp:
        protect = f"`reft protect arc:{at_once}` makes it survive that; then ask again. "
    others = order.without and leave_next(order.nodes, (), now, survived)
    if others:
        leave = " and ".join(now.nodes[rank] for rank in others)
        return (
            f"{', '.join(order.without)} would leave at once, and hold together what the others need: "
            f"without --without {leave} would leave"
        )
    return (
        f"{order.nodes} nodes were asked for and {running} train: {at_once} would leave at once, with their "
        f"parts of the state, and the job survives the loss of {survived or 'none'}. {protect}"
        f"{_other_numbers(now)}"
    )


def _other_numbers(now: Situation) -> str:
    """What may be asked for."""
    others = [n for n in now.fitting if n != len(now.nodes)]
    if not others:
        return f"No other number of --nnodes {now.least}:{now.most} fits the layout and the batch"
    said = " or ".join(f"`reft scale {n}`" for n in others)
    return f"What fits the layout and the batch: {len(now.nodes)} nodes, as now; {said}"


def _of_the_number(order: ScaleOrder, now: Situation) -> str:
    wanted, running = order.nodes, len(now.nodes)
    if not now.least <= wanted <= now.most:
        return (
            f"{wanted} nodes were asked for, but the job was started with --nnodes {now.least}:{now.most}; "
            f"give a number from {now.least} to {now.most}"
        )
    if wanted > running + now.spares:
        return (
            f"{wanted} nodes were asked for, {running} train and {now.spares or 'none'} wait: start "
            f"`reft launch` on {wanted - running - now.spares} more and ask again"
        )
    return ""


def _of_the_names(order: ScaleOrder, now: Situation) -> str:
    unknown = sorted(set(order.without) - set(now.nodes))
    if unknown:
        return f"no node {', '.join(unknown)} trains; those that do are {', '.join(now.nodes)}"
    gone = len(now.nodes) - order.nodes
    if replaces(order, now.nodes):
        return _of_replacing(order, now)
    if len(set(order.without)) > max(0, gone):
        return (
            f"{len(set(order.without))} nodes were named to leave, but {max(0, gone)} leave from "
            f"{len(now.nodes)} to {order.nodes} nodes"
        )
    return ""


def replaces(order: ScaleOrder, nodes: tuple[str, ...]) -> bool:
    """Whether others are to take the places of the nodes that it names."""
    return bool(order.without) and order.nodes == len(nodes)


def _of_replacing(order: ScaleOrder, now: Situation) -> str:
    leave = len(set(order.without))
    if leave > now.spares:
        return (
            f"{leave} of {len(now.nodes)} nodes were named to be replaced, and {now.spares or 'none'} wait: "
            f"start `reft launch` on {leave - now.spares} more and ask again"
        )
    return ""


def leavers(nodes: tuple[str, ...], number: int, first: tuple[str, ...]) -> tuple[int, ...]:
    """Ranks of the nodes that leave next: those that were named, then the last. Pure."""
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank] not in first, -rank))
    return tuple(order[:number])
