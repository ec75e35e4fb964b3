"""Tests the devices of all ranks at the start, and chooses the protection."""

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
from reft.state.adapters import StateAdapter, Zero3Adapter
from reft.state.catalogue import Adapter

logger = logging.getLogger(__name__)

_SENT_BYTES = 8 * 2**20
# Free device memory required at the start, as a multiple of the size of the gradients that
# recomputing keeps there
_SPARE = 4


@dataclass(frozen=True)
class JobFacts:
    """What is known about the job when the protection is chosen, or in a dry run.

    Attributes:
        config: the ``reft`` block.
        topology: placement of all ranks.
        control: messages between the ranks.
        adapter: adapter of this rank's optimizer.
        copies: copy engine, which copies this rank's state to the host.
        job_dir: the job's memory on this node.
        devices: results of each rank's device test, by rank; empty if ranks train on CPUs.
    """

    config: ReftConfig
    topology: Topology
    control: ControlGroup
    adapter: Adapter
    copies: CopyEngine
    job_dir: Path
    devices: Sequence[DeviceFindings]


def choice_inputs(job: JobFacts) -> ChoiceInputs:
    """Gather the size of each rank's state and the free memory of its node. Collective.

    The choice is a pure function of the result, so all ranks make the same choice.
    """
    config, topology, adapter = job.config, job.topology, job.adapter
    job_dir, limit = job.job_dir, config.memory_limit_bytes
    # Memory that may be reserved on this node: free memory minus the margin, plus the job's
    # present arenas, which will be replaced. Memory that training has yet to allocate is
    # subtracted below.
    room = max(0, free_bytes(job_dir) - margin_bytes(config.memory_margin_bytes, job_dir))
    room += sum(path.stat().st_size for path in job_dir.glob("*.arena"))
    coming = adapter.coming_host_bytes() if isinstance(adapter, StateAdapter) else 0
    frozen = adapter.frozen_bytes() if isinstance(adapter, Zero3Adapter) else 0
    own = [*adapter.expected_bytes(), config.host_state_bytes, frozen, room, coming]
    gathered = job.control.gather_ints(own)
    # Whether a host recomputes an optimizer partition bit for bit; always true if ranks train on
    # CPUs
    exact = adapter.steps_exactly and all(found.adam_is_exact for found in job.devices)
    exact = exact or not job.copies.asynchronous
    memory: dict[str, int] = {}
    for node, (*_, nbytes, _) in zip(topology.nodes, gathered, strict=True):
        memory[node] = min(nbytes, memory.get(node, nbytes))
    for node, (*_, nbytes) in zip(topology.nodes, gathered, strict=True):
        memory[node] = max(0, memory[node] - nbytes)
    if limit is not None:
        memory = {node: min(limit, nbytes) for node, nbytes in memory.items()}
    sections = tuple(RankSections(*nbytes[:4]) for nbytes in gathered)
    return ChoiceInputs(topology, sections, config.arena_count, config.block_bytes, memory, exact)


def choose_protection(job: JobFacts, events: EventLog) -> ReftConfig:
    """Replace ``auto`` in the block by the chosen protection. Collective.

    The choice minimises the number of moved bytes, so it does not need the idle windows, which
    are not measured yet.
    """
    config, situation = job.config, choice_inputs(job)
    situation = replace(situation, rates=_measured_rates(job, situation))
    # If memory is too small, reduce the number of kept versions before the tolerance, as is done
    # when memory runs short later.
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
    # "+aor" in the block is kept even if nothing is partitioned, as it is after a scheme's name.
    recompute = chosen.owned_by is PartitionSurvival.AOR or (
        config.recompute and scheme.certain_losses
    )
    return config.model_copy(update={"protection": f"{scheme}{AOR}" if recompute else str(scheme)})


def _measured_rates(job: JobFacts, situation: ChoiceInputs) -> LinkRates | None:
    """Measure the rates of links and processors. Collective.

    Returns:
        The rates; None if recomputing is impossible, or the device tests did not find it exact.
    """
    config, control, adapter, topology = job.config, job.control, job.adapter, job.topology
    found = job.devices
    if (
        not (found and situation.exact and situation.owns)
        or config.recompute
        or config.interval_steps != 1
    ):
        return None
    # For each loss to be survived, recomputing keeps the gradients of one partition on the
    # device, in addition to training's memory.
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
    for _ in range(2):  # The first round opens connections; only the second one's time is used
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


# -- test of each rank's device at the start; rank 0 logs one paragraph ----------------------------

_COPIED_BYTES = 32 * 2**20
_ELEMENTS, _STEPS = 2**18, 3
_OWN_THREADS = 2  # Threads that a rank needs to train on a device: forward and backward


@dataclass
class DeviceFindings:
    """Results of one rank's device test.

    Attributes:
        name: name of the device.
        free_cores: number of the rank's cores that training does not use.
        copy_bytes_per_sec: rate of copies from the device into registered (pinned) host memory.
        adam_is_exact: whether reft.ExactAdam computes the same bits on the device and on the host.
        adam_parameters_per_sec: parameters that reft.ExactAdam updates in a second on one core
            of the host.
        to_change: advice to the user, one text for each problem found.
    """

    name: str
    free_cores: int
    copy_bytes_per_sec: float = 0.0
    adam_is_exact: bool = False
    adam_parameters_per_sec: float = 0.0
    to_change: list[str] = field(default_factory=list)


def check_device(job: JobFacts) -> list[DeviceFindings]:
    """Test the device of every rank. Collective.

    Returns:
        The results by rank; empty if ranks train on CPUs.
    """
    engine = job.copies
    if not isinstance(engine, DeviceCopyEngine):
        return []
    vendor = find_vendor(engine.device)
    assert vendor is not None  # A rank with a device copy engine has a device with a vendor
    node = job.topology.nodes[job.control.rank]
    ranks_here = len(job.topology.local_ranks(node))
    # The rank is either bound to its own cores, or shares the node's cores equally.
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks_here)
    local = DeviceFindings(vendor.name, max(0, cores - max(_OWN_THREADS, torch.get_num_threads())))
    local.to_change = vendor.settings_to_change(os.environ, job.topology.degrees.tp)
    parities = job.config.chooses or job.config.scheme.parities > 0
    # Test on a separate thread, because the vendor's library changes settings of the calling
    # thread, which must not happen to the training thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(try_device, local, vendor, engine, job.job_dir, parities).result()
    replies = job.control.gather_bytes(json.dumps(asdict(local)).encode())
    return [DeviceFindings(**json.loads(one)) for one in replies]


def device_paragraph(ranks: Sequence[DeviceFindings], nodes: Sequence[str]) -> str:
    """Describe the results of all ranks, with advice, in one paragraph.

    Args:
        ranks: results by rank.
        nodes: node of each rank.
    """
    rates = [one.copy_bytes_per_sec for one in ranks]
    slowest = min(rates)
    by_advice: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        for text in one.to_change:
            by_advice.setdefault(text, []).append(rank)
    change = [f"{text} (rank {at[0]}, {len(at)} in all)" for text, at in by_advice.items()]
    # Ranks that could not measure report 0; leave them out of the median
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
    """Measure copies, parities and optimizer steps on a device. Errors become advice (P6).

    Args:
        found: object that receives the results.
        vendor: vendor of the device.
        engine: copy engine of the device.
        directory: directory of the job's arenas.
        parities: whether the job computes parities on the device.
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
    except Exception as error:  # P6: errors become advice
        found.to_change.append(
            f"the device could not be tried out ({type(error).__name__}: {error})"
        )


def _try_copies(engine: DeviceCopyEngine, directory: Path) -> tuple[float, int]:
    """Measure copies from the device into memory that is allocated and registered like an arena.

    Returns:
        Bytes per second, and the NUMA node of the memory (-1 if unknown).
    """
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
        # The file is missing on kernels without NUMA, and in some containers.
        node = memory_node(NUMA_MAPS.read_text(), target.data_ptr()) if NUMA_MAPS.exists() else -1
        return _COPIED_BYTES / max(shortest, 1e-9), node
    finally:
        engine.unregister(target)


def memory_node(numa_maps: str, address: int) -> int:
    """Return the NUMA node that holds most pages of a mapping; -1 if unknown.

    Args:
        numa_maps: content of ``/proc/PID/numa_maps``.
        address: start address of the mapping.
    """
    line = re.search(rf"^0*{address:x} .*$", numa_maps, re.M)
    pages = [
        (int(n), int(node)) for node, n in re.findall(r" N(\d+)=(\d+)", line[0] if line else "")
    ]
    return max(pages, default=(0, -1))[1]


def _parities_alike(device: torch.device) -> bool:
    """Return whether the device computes the same parity bytes as the host.

    The test computes an XOR and a weighted sum, over a complete cell (512 KiB) and a partial
    one.
    """
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
    """Test ExactAdam on a device.

    Returns:
        Whether the device computes the same bits as the host, and the number of parameters that
        one core of the host updates in a second.
    """
    draw = torch.Generator().manual_seed(0)
    # Small enough that the smallest squares are denormal or 0
    scale = torch.logspace(-22, 2, _ELEMENTS)
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
