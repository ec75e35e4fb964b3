"""What the ranks of an incarnation agree on when they join: who is where, the memory's secret, a number."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import astuple
from pathlib import Path

from reft.comm.control import ControlGroup
from reft.config import ReftConfig
from reft.env import ENV_SECRET
from reft.errors import ReftError
from reft.grid import Coordinate, Degrees, Topology
from reft.hook.coordinates import Place, hosts_of
from reft.hook.job import JobRecord
from reft.state.codec import decode, encode
from reft.store.jobdir import SECRET_BYTES, SECRET_FILE, JobDir, read_secret, secret_of_environment
from reft.store.persisted import job_directory, newest_incarnation

logger = logging.getLogger(__name__)


def open_control(config: ReftConfig) -> ControlGroup:
    """Connect this rank with the others. Collective."""
    return ControlGroup(
        config.commit_timeout_secs,
        node=Place.here().node,
        secret=secret_of_environment(),
        transport=config.transport,
    )


def gather_topology(
    control: ControlGroup, coordinate: Coordinate, degrees: Degrees
) -> tuple[Topology, tuple[Place, ...]]:
    """Tell all ranks where this one is; the topology, and the place of every global rank. Collective.

    Raises:
        LayoutError: the ranks do not form a pp x dp x tp grid.
    """
    at = (coordinate.pp, coordinate.dp, coordinate.tp)
    mine = encode([list(at), list(astuple(Place.here()))])
    facts = [decode(data) for data in control.gather_bytes(mine)]
    places = tuple(Place(*place) for _, place in facts)
    topology = Topology(
        degrees=degrees,
        coordinates=tuple(Coordinate(*at) for at, _ in facts),
        nodes=tuple(place.node for place in places),
        hosts=hosts_of(places),
    )
    return topology, places


def open_job_dir(config: ReftConfig, job_id: str, node: str, control: ControlGroup) -> JobDir:
    """Open the job's memory on this node under the secret that all nodes share. Collective.

    The launcher hands it out (REFT_SECRET). Under plain ``torchrun`` the memory of a surviving
    node has it, and a new job takes rank 0's.
    """
    secret = None
    if not os.environ.get(ENV_SECRET):
        path = config.job_memory_dir
        known = read_secret(path) if (path / SECRET_FILE).exists() else b""
        gathered = control.gather_bytes(known)
        fresh = control.gather_bytes(secrets.token_bytes(SECRET_BYTES))[0]
        secret = next((s for s in gathered if s), fresh)
    return JobDir.open_or_create(config.memory_dir, job_id, node=node, secret=secret)


def _newest_on_disk(persist_dir: Path | None, job_id: str) -> int:
    """Never raises: the other ranks wait for this one, and the job can do without."""
    try:
        return newest_incarnation(job_directory(persist_dir, job_id), job_id) if persist_dir else 0
    except (ReftError, OSError) as error:
        logger.warning("the incarnations on disk are not known: %s", error)
        return 0


def agree_on_incarnation(
    config: ReftConfig, job_dir: JobDir, record: JobRecord, control: ControlGroup
) -> int:
    """One more than every incarnation that any node, the store or the disk has seen (P7). Collective."""
    seen = job_dir.newest_incarnation()
    if control.rank == 0:
        seen = max(seen, record.next_incarnation() - 1)
        seen = max(seen, _newest_on_disk(config.persist.dir, job_dir.job_id))
    return 1 + max(values[0] for values in control.gather_ints([seen]))
