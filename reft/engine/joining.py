"""What the ranks of an incarnation agree on when they join: who is where, the memory's secret, a number."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from reft.config import ReftConfig
from reft.control.control import ControlGroup
from reft.engine.coordinates import Place, hosts_of
from reft.env import ENV_INCARNATION, ENV_SECRET
from reft.errors import FencedError, ReftError
from reft.grid import Coordinate, Degrees, Topology
from reft.memory.jobdir import SECRET_BYTES, SECRET_FILE, JobDir, read_secret, secret_of_environment
from reft.state.codec import decode, encode
from reft.storage import fence
from reft.storage.persisted import job_directory, newest_incarnation

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


def agree_on_incarnation(config: ReftConfig, job_dir: JobDir, control: ControlGroup) -> int:
    """One more than every incarnation that any node or the disk has seen (P7): that on which the launchers
    agreed when they started the trainers, unless the disk knows a later one. Older starts change nothing on
    the disk any more. Collective.

    Raises:
        FencedError: on all ranks, if another start of the job has claimed the disk with the same number.
    """
    seen = max(job_dir.newest_incarnation(), int(os.environ.get(ENV_INCARNATION, "0")) - 1)
    if control.rank == 0:
        seen = max(seen, _newest_on_disk(config.persist.dir, job_dir.job_id))
    incarnation = 1 + max(values[0] for values in control.gather_ints([seen]))
    told = b""
    if control.rank == 0 and config.persist.dir is not None:
        told = _claim_disk(config.persist.dir, job_dir.job_id, incarnation).encode()
    refused = control.gather_bytes(told)[0].decode()
    if refused:
        raise FencedError(refused)
    return incarnation


def _claim_disk(persist_dir: Path, job_id: str, incarnation: int) -> str:
    """Keep older starts from writing; why this one must not, or an empty text. Never raises: peers wait."""
    try:
        directory = job_directory(persist_dir, job_id)
        for made in (persist_dir, directory):
            with suppress(FileExistsError):
                made.mkdir()
        fence.claim(directory, job_id, incarnation, alone=True)
    except FencedError as error:
        return str(error)
    except (ReftError, OSError) as error:
        logger.warning("older starts of the job are not kept from %s: %s", persist_dir, error)
    return ""
