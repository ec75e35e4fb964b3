"""What is tried and chosen at the start: the devices of all ranks, and the protection."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

import torch

from reft.aor.gradients import check_recomputable
from reft.config import AOR, ReftConfig
from reft.control.control import ControlGroup
from reft.device import Vendor, find_vendor
from reft.errors import UnsupportedStateError
from reft.grid import Topology, ring_order
from reft.log import EventLog
from reft.memory.files import free_bytes, margin_bytes
from reft.optim import ExactAdam
from reft.policy.choose import Choice, ChoiceInputs, choose
from reft.policy.loads import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    LinkRates,
    PartitionSurvival,
    RankSections,
)
from reft.protect.backend import NumpyBackend, backend_for
from reft.protect.placement import LEAST_ARENAS
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, parity_rows
from reft.snapshot.copy_engine import CopyEngine
from reft.snapshot.device_engine import DeviceCopyEngine
from reft.state.adapters import StateAdapter
from reft.state.catalogue import Adapter

logger = logging.getLogger(__name__)

_SENT_BYTES = 8 * 2**20
# free device memory at the start, in multiples of the gradients that recomputing keeps there
_SPARE = 4


@dataclass(frozen=True)
class JobFacts:
    """What the choice of the protection depends on, and a dry run.

    Attributes:
        config: the ``reft`` block.
        topology: of all ranks.
        control: messages between them.
        adapter: of this rank's optimizer.
        copies: copies this rank's state to the host.
        job_dir: the job's memory on this node.
        devices: what every rank's device can do, by rank; empty where ranks train on CPUs.
    """

    config: ReftConfig
    topology: Topology
    control: ControlGroup
    adapter: Adapter
    copies: CopyEngine
    job_dir: Path
    devices: Sequence[DeviceFindings]


def choice_inputs(job: JobFacts) -> ChoiceInputs:
    """Gather what only each rank knows: the bytes of its state, and the memory of its node.

    The choice is a pure function of the result, so that all ranks choose the same. Collective.
    """
    config, topology, adapter = job.config, job.topology, job.adapter
    job_dir, limit = job.job_dir, config.memory_limit_bytes
    # What may be reserved on this node: free memory without the margin, and the job's present
    # arenas, which are replaced; less what training will take of it; at most the limit.
    room = max(0, free_bytes(job_dir) - margin_bytes(config.memory_margin_bytes, job_dir))
    room += sum(path.stat().st_size for path in job_dir.glob("*.arena"))
    coming = adapter.coming_host_bytes() if isinstance(adapter, StateAdapter) else 0
    own = [*adapter.expected_bytes(), config.host_state_bytes, room, coming]
    gathered = job.control.gather_ints(own)
    # Whether a host recomputes the owner's partition to the bit, as on CPUs.
    exact = adapter.steps_exactly and all(found.adam_is_exact for found in job.devices)
    exact = exact or not job.copies.asynchronous
    memory: dict[str, int] = {}
    for node, (_, _, _, nbytes, _) in zip(topology.nodes, gathered, strict=True):
        memory[node] = min(nbytes, memory.get(node, nbytes))
    for node, (_, _, _, _, nbytes) in zip(topology.nodes, gathered, strict=True):
        memory[node] = max(0, memory[node] - nbytes)
    if limit is not None:
        memory = {node: min(limit, nbytes) for node, nbytes in memory.items()}
    sections = tuple(RankSections(*nbytes[:3]) for nbytes in gathered)
    return ChoiceInputs(topology, sections, config.arena_count, config.block_bytes, memory, exact)


def choose_protection(job: JobFacts, events: EventLog) -> ReftConfig:
    """The block with the chosen protection in the place of ``auto``. Collective.

    Windows have not been measured yet. The choice does not need them: it takes what moves least.
    """
    config, situation = job.config, choice_inputs(job)
    situation = replace(situation, rates=_measured_rates(job, situation))
    # Fewer versions are kept before the tolerance is reduced, as when memory runs short later.
    choices = [
        choose(replace(situation, arenas=arenas), config.tolerance, recompute=config.recompute)
        for arenas in range(config.arena_count, LEAST_ARENAS - 1, -1)
    ]
    reached = (choice for choice in choices if choice.reached)
    choice = next(reached, max(choices, key=lambda choice: choice.chosen.tolerance))
    chosen, scheme = choice.chosen, choice.chosen.scheme
    events.write(
        "protection_chosen",
        scheme=chosen.name,
        tolerance=chosen.tolerance,
        wanted=choice.wanted,
        reason=choice.reason,
        needed=choice.needed,
        load=asdict(chosen.busiest),
    )
    if job.control.rank == 0:
        _describe(choice)
    # If the block asks for it, also if nothing is partitioned, as in a block that names the scheme.
    recompute = chosen.owned_by is PartitionSurvival.AOR or (
        config.recompute and scheme.certain_losses
    )
    return config.model_copy(update={"protection": f"{scheme}{AOR}" if recompute else str(scheme)})


def _measured_rates(job: JobFacts, situation: ChoiceInputs) -> LinkRates | None:
    """Rates of links and processors; None if recomputing was not seen to be exact, or is not
    possible. Collective."""
    config, control, adapter, topology = job.config, job.control, job.adapter, job.topology
    found = job.devices
    if (
        not (found and situation.exact and situation.owns)
        or config.recompute
        or config.interval_steps != 1
    ):
        return None
    # The gradients of as many partitions as losses are survived lie on the device, next to what
    # training needs.
    parameters = (
        max(1, config.tolerance) * situation.sections[control.rank].owned_bytes // OPTIMIZER_BYTES
    )
    possible = job.copies.free_bytes >= _SPARE * GRADIENT_BYTES * parameters
    try:
        possible = (
            possible and isinstance(adapter, StateAdapter) and bool(check_recomputable(adapter))
        )
    except UnsupportedStateError:
        possible = False
    coordinate = topology.coordinates[control.rank]
    stage = coordinate.pp, coordinate.tp
    ring = [topology.group(*stage)[d] for d in ring_order(topology.group_nodes(*stage))]
    at = ring.index(control.rank)
    peers = {ring[at - 1], ring[(at + 1) % len(ring)]} - {control.rank}
    if control.any_of(not possible or not peers)[0]:
        return None
    sent = torch.empty(_SENT_BYTES, dtype=torch.uint8)
    for _ in range(2):  # the first round opens connections
        began = time.perf_counter()
        control.exchange({p: [sent] for p in peers}, {p: [torch.empty_like(sent)] for p in peers})
        rate = int(_SENT_BYTES * len(peers) / (time.perf_counter() - began))
    return LinkRates(
        copy_bytes_per_sec=min(one.copy_bytes_per_sec for one in found),
        peer_bytes_per_sec=min(one for (one,) in control.gather_ints([rate])),
        adam_parameters_per_sec=min(one.adam_parameters_per_sec for one in found),
        free_cores=min(one.free_cores for one in found),
    )


def _describe(choice: Choice) -> None:
    if choice.reached:
        logger.warning("protection auto: %s: %s", choice.chosen.name, choice.reason)
    else:
        logger.warning(
            "THE WANTED TOLERANCE OF %d IS NOT REACHED; protection auto chose the best possible: "
            "%s, %s. To reach it: %s",
            *(choice.wanted, choice.chosen.name, choice.reason, "; ".join(choice.needed)),
        )
    for other in choice.alternatives:
        if other is not choice.chosen:
            logger.info("not %s: %s", other.name, choice.why_not_chosen(other))


# -- what every rank tries on its own device at attach; rank 0 says it in one paragraph ------------

_COPIED_BYTES = 32 * 2**20
_ELEMENTS, _STEPS = 2**18, 3
_OWN_THREADS = 2  # threads of a rank that trains on a device: forward and backward


@dataclass
class DeviceFindings:
    """What one rank has found about its device.

    Attributes:
        name: of the device.
        free_cores: cores that the rank does not train on.
        copy_bytes_per_sec: into registered memory.
        adam_is_exact: whether steps of reft.ExactAdam give the same bits on the device and on the
            host.
        adam_parameters_per_sec: of such steps on one core of the host.
        to_change: advice.
    """

    name: str
    free_cores: int
    copy_bytes_per_sec: float = 0.0
    adam_is_exact: bool = False
    adam_parameters_per_sec: float = 0.0
    to_change: list[str] = field(default_factory=list)


def check_device(job: JobFacts) -> list[DeviceFindings]:
    """Try the device of every rank. Collective.

    Returns:
        What was found, by rank; empty where ranks train on CPUs.
    """
    engine = job.copies
    if not isinstance(engine, DeviceCopyEngine):
        return []
    vendor = find_vendor(engine.device)
    assert vendor is not None  # the engine copies from its device
    node = job.topology.nodes[job.control.rank]
    ranks_here = len(job.topology.local_ranks(node))
    # The rank is bound to cores of its own, or shares the node's.
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks_here)
    local = DeviceFindings(vendor.name, max(0, cores - max(_OWN_THREADS, torch.get_num_threads())))
    local.to_change = vendor.settings_to_change(os.environ, job.topology.degrees.tp)
    parities = job.config.chooses or job.config.scheme.parities > 0
    # In a thread of its own: what the vendor's library sets for a thread is not set for the
    # training thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(try_device, local, vendor, engine, job.job_dir, parities).result()
    replies = job.control.gather_bytes(json.dumps(asdict(local)).encode())
    return [DeviceFindings(**json.loads(one)) for one in replies]


def device_paragraph(ranks: Sequence[DeviceFindings], nodes: Sequence[str]) -> str:
    """What was found on all ranks, and what to change, in a paragraph.

    Args:
        ranks: findings by rank.
        nodes: the node of each rank.
    """
    rates = [one.copy_bytes_per_sec for one in ranks]
    slowest = min(rates)
    by_advice: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        for text in one.to_change:
            by_advice.setdefault(text, []).append(rank)
    change = [f"{text} (rank {at[0]}, {len(at)} in all)" for text, at in by_advice.items()]
    # without ranks that could not measure
    usual = median([rate for rate in rates if rate] or [0.0])
    change += [
        f"rank {rank} on node {nodes[rank]} copies at {rate / 1e9:.3g} GB/s, less than half of the "
        f"median {usual / 1e9:.3g}: look at its link to the host, or replace the node"
        for rank, rate in enumerate(rates)
        if 0 < rate < usual / 2
    ]
    return (
        f"tried on {ranks[0].name}: reft.ExactAdam steps "
        f"{'as' if all(one.adam_is_exact for one in ranks) else 'NOT as'} on a host; copies into "
        f"host memory run at {slowest / 1e9:.3g} (rank {rates.index(slowest)}) to "
        f"{max(rates) / 1e9:.3g} GB/s; every rank has {min(one.free_cores for one in ranks)} cores "
        f"or more to spare. To change: {'; '.join(change) or 'nothing'}"
    )


NUMA_MAPS = Path("/proc/self/numa_maps")


def try_device(
    found: DeviceFindings, vendor: Vendor, engine: DeviceCopyEngine, directory: Path, parities: bool
) -> None:
    """Measure what only the device can show.

    Args:
        found: filled in.
        vendor: of the device.
        engine: copies from it.
        directory: where arenas will be.
        parities: whether parities are computed.
    """
    try:
        device = engine.device
        vendor.enter(device)
        found.copy_bytes_per_sec, memory = _try_copies(engine, directory)
        at = vendor.numa_node(device)
        if at != memory and -1 not in (at, memory):
            found.to_change.append(
                f"host memory is on NUMA node {memory}, the device on {at}: start the rank with "
                f"numactl --cpunodebind={at} --membind={at}"
            )
        if parities and not _parities_alike(device):
            found.to_change.append('parities differ from a host\'s: write "protection": "arc"')
        found.adam_is_exact, found.adam_parameters_per_sec = _try_adam(device)
    except Exception as error:  # P6
        found.to_change.append(
            f"the device could not be tried out ({type(error).__name__}: {error})"
        )


def _try_copies(engine: DeviceCopyEngine, directory: Path) -> tuple[float, int]:
    """Bytes per second into memory that is allocated and registered like an arena, and its NUMA
    node."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=engine.device)
    with TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, _COPIED_BYTES)
        target = torch.frombuffer(mmap.mmap(file.fileno(), _COPIED_BYTES), dtype=torch.uint8)
    engine.register(target)
    try:
        stamps = [engine.stamp()]
        for _ in range(3):
            target.copy_(source, non_blocking=True)
            stamps.append(engine.stamp())
        shortest = min(b - a for a, b in pairwise(engine.secs_of(stamps)))
        # Kernels without NUMA, and some containers, have no such file.
        node = memory_node(NUMA_MAPS.read_text(), target.data_ptr()) if NUMA_MAPS.exists() else -1
        return _COPIED_BYTES / max(shortest, 1e-9), node
    finally:
        engine.unregister(target)


def memory_node(numa_maps: str, address: int) -> int:
    """The NUMA node with most pages of the mapping that begins at ``address``, by Linux's list; -1
    if not known."""
    line = re.search(rf"^0*{address:x} .*$", numa_maps, re.M)
    pages = [
        (int(n), int(node)) for node, n in re.findall(r" N(\d+)=(\d+)", line[0] if line else "")
    ]
    return max(pages, default=(0, -1))[1]


def _parities_alike(device: torch.device) -> bool:
    """Whether the device's backend computes the same bytes as the host's: an XOR and powers, of a
    complete cell and a part."""
    rows = parity_rows(2, 3)
    sources = [
        torch.arange(CELL_BYTES + GRAIN_BYTES).mul(2 * j + 3).to(torch.uint8) for j in range(3)
    ]
    made = [torch.empty_like(sources[0]) for _ in rows]
    NumpyBackend().combine(rows, [s.numpy() for s in sources], [t.numpy() for t in made])
    targets = [torch.empty_like(made[0], device=device) for _ in rows]
    backend_for(targets[0]).combine(rows, [s.to(device) for s in sources], targets)
    return all(torch.equal(a.cpu(), b) for a, b in zip(targets, made, strict=True))


def _try_adam(device: torch.device) -> tuple[bool, float]:
    """Whether ExactAdam's steps give the same bits as on a host, and how many parameters a host's
    core steps in a second."""
    draw = torch.Generator().manual_seed(0)
    scale = torch.logspace(-22, 2, _ELEMENTS)  # its squares are denormal, or nothing
    start, *gradients = (scale * torch.randn(_ELEMENTS, generator=draw) for _ in range(1 + _STEPS))
    bits, secs = [], 0.0
    for where in (device, torch.device("cpu")):
        param = torch.nn.Parameter(start.to(where, copy=True))
        optimizer, began = ExactAdam([param], weight_decay=0.1), time.thread_time()
        for gradient in gradients:
            param.grad = gradient.to(where)
            optimizer.step()
        secs = time.thread_time() - began
        made = (param, *(optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")))
        bits.append([t.detach().cpu().view(torch.int32) for t in made])
    alike = all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
    return alike, _STEPS * _ELEMENTS / max(secs, 1e-9)
