"""What every rank tries on its own device at attach; rank 0 says it in one paragraph."""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import torch

from reft.device import Vendor, vendor_of
from reft.optim import ExactAdam
from reft.protect.backend import NumpyBackend, backend_for
from reft.protect.rs import CELL_BYTES, GRAIN_BYTES, parity_rows
from reft.snapshot.copying.device import DeviceCopyEngine

if TYPE_CHECKING:
    from reft.engine.session import Session

_COPIED_BYTES = 32 * 2**20
_ELEMENTS, _STEPS = 2**18, 3
_OWN_THREADS = 2  # of a rank that trains on a device: one for forward, one for backward


@dataclass
class DeviceFindings:
    """Of one rank."""

    name: str
    free_cores: int  # that it does not train on
    copy_bytes_per_sec: float = 0.0  # into registered memory
    adam_is_exact: bool = False  # steps of reft.ExactAdam give the same bits on the device and on the host
    adam_parameters_per_sec: float = 0.0  # of such steps on one core
    to_change: list[str] = field(default_factory=list)


def check_device(session: Session) -> list[DeviceFindings]:
    """Of all ranks, in their order; none where ranks train on CPUs. Collective."""
    vendor, engine = vendor_of(session.engine.device), session.copying.engine
    if vendor is None or not isinstance(engine, DeviceCopyEngine):
        return []
    # It is bound to cores of its own, or shares the node's.
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // session.ranks_here)
    mine = DeviceFindings(vendor.name, max(0, cores - max(_OWN_THREADS, torch.get_num_threads())))
    mine.to_change = vendor.settings_to_change(os.environ, session.topology.degrees.tp)
    parities = session.config.chooses or session.config.scheme.parities > 0
    # In a thread of its own: what it sets for itself is not set for the training thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(try_device, mine, vendor, engine, session.memory.job_dir.path, parities).result()
    gathered = session.control.gather_bytes(json.dumps(asdict(mine)).encode())
    return [DeviceFindings(**json.loads(one)) for one in gathered]


def device_paragraph(ranks: Sequence[DeviceFindings], nodes: Sequence[str]) -> str:
    """What was found on all ranks, and what to change. ``nodes``: of each rank."""
    rates = [one.copy_bytes_per_sec for one in ranks]
    slowest = min(rates)
    by_advice: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        for text in one.to_change:
            by_advice.setdefault(text, []).append(rank)
    change = [f"{text} (rank {at[0]}, {len(at)} in all)" for text, at in by_advice.items()]
    usual = median([rate for rate in rates if rate] or [0.0])  # 0: said above, it could not be tried out
    change += [
        f"rank {rank} on node {nodes[rank]} copies at {rate / 1e9:.3g} GB/s, less than half of the median "
        f"{usual / 1e9:.3g}: look at its link to the host, or replace the node"
        for rank, rate in enumerate(rates)
        if 0 < rate < usual / 2
    ]
    return (
        f"tried on {ranks[0].name}: reft.ExactAdam steps "
        f"{'as' if all(one.adam_is_exact for one in ranks) else 'NOT as'} on a host; copies into host memory "
        f"run at {slowest / 1e9:.3g} (rank {rates.index(slowest)}) to {max(rates) / 1e9:.3g} GB/s; every "
        f"rank has {min(one.free_cores for one in ranks)} cores or more to spare. "
        f"To change: {'; '.join(change) or 'nothing'}"
    )


def try_device(
    found: DeviceFindings, vendor: Vendor, engine: DeviceCopyEngine, directory: Path, parities: bool
) -> None:
    """Fill in what only the device can tell. ``directory``: where arenas will be."""
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
        found.to_change.append(f"the device could not be tried out ({type(error).__name__}: {error})")


def _try_copies(engine: DeviceCopyEngine, directory: Path) -> tuple[float, int]:
    """Bytes per second into memory that is made and registered as the arenas' is, and its NUMA node."""
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
        node = memory_node(Path("/proc/self/numa_maps").read_text(), target.data_ptr())
        return _COPIED_BYTES / max(shortest, 1e-9), node
    finally:
        engine.unregister(target)


def memory_node(numa_maps: str, address: int) -> int:
    """The NUMA node with most pages of the mapping that begins at ``address``, by Linux's list; else -1."""
    line = re.search(rf"^0*{address:x} .*$", numa_maps, re.M)
    pages = [(int(n), int(node)) for node, n in re.findall(r" N(\d+)=(\d+)", line[0] if line else "")]
    return max(pages, default=(0, -1))[1]


def _parities_alike(device: torch.device) -> bool:
    """Bytes of the device's backend and of a host's, of an XOR and of powers, of a whole cell and a part."""
    rows = parity_rows(2, 3)
    sources = [torch.arange(CELL_BYTES + GRAIN_BYTES).mul(2 * j + 3).to(torch.uint8) for j in range(3)]
    made = [torch.empty_like(sources[0]) for _ in rows]
    NumpyBackend().combine(rows, [s.numpy() for s in sources], [t.numpy() for t in made])
    targets = [torch.empty_like(made[0], device=device) for _ in rows]
    backend_for(targets[0]).combine(rows, [s.to(device) for s in sources], targets)
    return all(torch.equal(a.cpu(), b) for a, b in zip(targets, made, strict=True))


def _try_adam(device: torch.device) -> tuple[bool, float]:
    """Whether ExactAdam's steps give the same bits as on a host, and parameters a core there steps."""
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
