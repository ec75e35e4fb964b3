"""The position in the data at another data-parallel degree, and what is said of those that do not go there.

reft's own loaders count samples of the job. A ``DataLoader`` over torch's ``DistributedSampler``, as
DeepSpeed's own is, counts batches of a replica; its order is that of the job, so that the position is taken
to another degree wherever a batch of that degree begins there.
"""

from __future__ import annotations

import os
from typing import Any

from reft.data.dealt import dealt_by
from reft.data.passes import Position, described
from reft.env import ENV_NODES
from reft.recover.reshape import Resize

LEFT = "left"
"""Beside the positions: what has to be said of those that were left out."""
ITERATOR_OF = "iterator_of"
"""Beside the state of an iterator that counts what a replica has read: its class."""
_LINE = """
    loader = reft.data.loader(dataset, batch_size)    # its position is one of the job"""

_OF_JOB = """
    iterator.position_of_job = True    # if its state is that of all replicas, at every degree"""


def nodes_may_change() -> str:
    """MIN:MAX of the launcher's ``--nnodes``; "" where their number is fixed, or no launcher says it."""
    least, _, most = os.environ.get(ENV_NODES, "").partition(":")
    return "" if most in {"", least} else f"--nnodes {least}:{most}"


def move_data(data: dict[str, Any], resize: Resize) -> dict[str, Any]:
    """The positions of a replica of another degree.

    Args:
        data: of a replica of the old one.
        resize: from which degree to which.

    Returns:
        The positions, without those that do not go there, which :data:`LEFT` names.
    """
    moved, lost, said = dict(data), [], []
    if "pass" in data:
        if (one := _moved(data["pass"], resize)) is None:
            lost.append(str(data["pass"]["source"]))
            del moved["pass"]
        else:
            moved["pass"] = one
    if "resumable" in data:
        found = {name: _moved(position, resize) for name, position in data["resumable"].items()}
        lost += [str(data["resumable"][name]["source"]) for name, one in found.items() if one is None]
        moved["resumable"] = {name: one for name, one in found.items() if one is not None}
    if (kind := moved.pop(ITERATOR_OF, None)) is not None:
        said.append(
            f"the iterator ({kind}) was given the state of one replica, and cannot be taken from {resize} by "
            f"it: samples are trained on twice or not at all. Write{_LINE}\nor{_OF_JOB}"
        )
    if lost:
        said.append(
            f"the position in the data ({', '.join(dict.fromkeys(lost))}) was counted in batches of one "
            f"replica and cannot be taken from {resize}: its pass begins anew, and trains again on samples "
            f"that were trained on, unless the script goes to where the job was by engine.global_samples or "
            f"its client state. Write{_LINE}"
        )
    if said:
        moved[LEFT] = "; ".join(said)
    return moved


def is_of_job(iterator: Any) -> bool:
    """Whether the state of a stateful iterator is the same on all replicas and right at every degree: it has
    to say so itself."""
    return bool(getattr(iterator, "position_of_job", False))


def why_iterator_is_bound(iterator: Any) -> str | None:
    """Why the state of a stateful iterator may not go to another degree, and what to write; None: it does, or
    the number of nodes is fixed."""
    if is_of_job(iterator) or not nodes_may_change():
        return None
    return (
        f"the number of nodes may change ({nodes_may_change()}), and at another data-parallel degree the "
        f"iterator ({kind_of(iterator)}) would be given the state of one replica: samples would be trained "
        f"on twice or not at all. Write{_LINE}\nor{_OF_JOB}"
    )


def kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _moved(position: dict[str, Any], resize: Resize) -> dict[str, Any] | None:
    one = Position.decode(position).at_degree(resize.old, resize.new)
    return None if one is None else one.encode()


def why_bound(loader: Any, batch: int) -> str | None:
    """Why the position in a ``DataLoader`` may not go to another degree, and what to write; None: it does.

    Args:
        loader: torch's.
        batch: samples of a step.
    """
    dealt = dealt_by(loader)
    if dealt is not None and dealt.samples % batch == 0:
        return None
    why = (
        "its order is not known to be dealt out to the replicas, as by torch's DistributedSampler"
        if dealt is None
        else f"its {dealt.samples} samples are no multiple of the {batch} of a step: a pass ends within a "
        f"step, and batches of another degree do not begin there"
    )
    return (
        f"the number of nodes may change ({nodes_may_change()}), and with another data-parallel "
        f"degree the position in the data ({described(loader)}) may be lost: {why}. The pass would begin "
        f"anew, and train again on samples that were trained on. Write{_LINE}"
    )
