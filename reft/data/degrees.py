"""Converts positions in the data to another data-parallel degree.

reft's own loaders count samples of the whole job. A ``DataLoader`` over torch's
``DistributedSampler``, such as DeepSpeed's own, counts batches of one replica. The sampler's
order is the same at every degree, so a position is valid at another degree if a batch of that
degree begins at the same sample.
"""

from __future__ import annotations

import os
from typing import Any

from reft.data.passes import (
    Position,
    described,
    find_distribution,
)
from reft.env import ENV_NODES
from reft.grid import Resize
from reft.state.codec import class_path

LEFT = "left"  # Key of a warning about positions that were left out

# If an iterator counts batches of one replica: key for the name of the iterator's class, which is
# stored next to the iterator's state
ITERATOR_OF = "iterator_of"

LINES_OWN = """
    loader = reft.data.loader(dataset, batch_size)    # its position is one of the job"""

POSITION_OF_JOB = "position_of_job"
"""Attribute of a stateful iterator; true if the iterator's state is the same on all replicas and
stays valid when the data-parallel degree changes."""

LINES_JOB = """
    iterator.position_of_job = True    # if its state is that of all replicas, at every degree"""


def nodes_may_change() -> str:
    """Return MIN:MAX of the launcher's ``--nnodes``; empty if the number of nodes is fixed or
    unknown."""
    least, _, most = os.environ.get(ENV_NODES, "").partition(":")
    return "" if most in {"", least} else f"--nnodes {least}:{most}"


def move_data(data: dict[str, Any], resize: Resize) -> dict[str, Any]:
    """Convert the positions of a replica to another degree.

    Args:
        data: positions of a replica of the old degree.
        resize: the old and the new degree.

    Returns:
        The new positions. Positions that cannot be converted are left out and named in a warning
        under the key :data:`LEFT`.
    """
    moved, lost, reasons = dict(data), [], []
    if "pass" in data:
        if (one := _moved(data["pass"], resize)) is None:
            lost.append(str(data["pass"]["source"]))
            del moved["pass"]
        else:
            moved["pass"] = one
    if "resumable" in data:
        found = {name: _moved(position, resize) for name, position in data["resumable"].items()}
        lost += [
            str(data["resumable"][name]["source"]) for name, one in found.items() if one is None
        ]
        moved["resumable"] = {name: one for name, one in found.items() if one is not None}
    if (kind := moved.pop(ITERATOR_OF, None)) is not None:
        reasons.append(
            f"the iterator ({kind}) was given the state of one replica, which does not cover the "
            f"change from {resize}: some samples are used twice and others never. "
            f"Write{LINES_OWN}\nor{LINES_JOB}"
        )
    if lost:
        reasons.append(
            f"the position in the data ({', '.join(dict.fromkeys(lost))}) was counted in batches "
            f"of one replica and cannot be taken from {resize}: its pass starts again and repeats "
            "samples, unless the script skips to the right position by engine.global_samples or "
            f"its client state. Write{LINES_OWN}"
        )
    if reasons:
        moved[LEFT] = "; ".join(reasons)
    return moved


def explain_bound_iterator(iterator: Any) -> str | None:
    """Return why the state of a stateful iterator is invalid at another data-parallel degree,
    and what to write in the script.

    Returns:
        The text; None if the state is valid, or the number of nodes is fixed.
    """
    if getattr(iterator, POSITION_OF_JOB, False) or not nodes_may_change():
        return None
    return (
        f"the number of nodes may change ({nodes_may_change()}), and at another data-parallel "
        f"degree the iterator ({class_path(iterator)}) would get the state of one replica: some "
        f"samples would be used twice and others never. Write{LINES_OWN}\nor{LINES_JOB}"
    )


def _moved(position: dict[str, Any], resize: Resize) -> dict[str, Any] | None:
    one = Position(**position).at_degree(resize.old, resize.new)
    return None if one is None else dict(vars(one))


def explain_bound_data(loader: Any, batch: int) -> str | None:
    """Return why the position in a torch loader is invalid at another data-parallel degree, and
    what to write in the script.

    Args:
        loader: a ``DataLoader``.
        batch: number of samples in a step of all replicas.

    Returns:
        The text; None if the position is valid.
    """
    dealt = find_distribution(loader)
    if dealt is not None and dealt.samples % batch == 0:
        return None
    why = (
        "reft does not know how its order is distributed over the replicas, as it does for torch's "
        "DistributedSampler"
        if dealt is None
        else f"its {dealt.samples} samples are no multiple of the {batch} of a step: a pass ends "
        "within a step, and batches of another degree do not begin there"
    )
    return (
        f"the number of nodes may change ({nodes_may_change()}), and with another data-parallel "
        f"degree the position in the data ({described(loader)}) may be lost: {why}. The pass would "
        f"start again and repeat samples. Write{LINES_OWN}"
    )
