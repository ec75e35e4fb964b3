"""What every rank tries on its own device at attach; rank 0 says it in one paragraph."""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
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
_UNKNOWN = -1
_SLOW = 0.5  # part of the fastest rank's copies below which a rank is named
_OWN_THREADS = 2  # of a rank that trains on a device: one for forward, one for backward
_RANKS_SHOWN = 8


@dataclass
class DeviceFindings:
    """Of one rank. NUMA nodes are -1 where they are not known."""

    name: str
    free_cores: int  # that the rank does not train on
    makes_parities: bool = False
    adam_is_exact: bool = False  # the step of ExactAdam gives the same bits on the device and on the host
    adam_parameters_per_sec: float = 0.0  # of that step on one core
    parities_alike: bool = True  # as a host makes them
    copy_bytes_per_sec: float = 0.0
    registered: bool = True
    device_node: int = _UNKNOWN
    memory_node: int = _UNKNOWN  # of memory as the arenas'
    to_change: list[str] = field(default_factory=list)

    def advice(self, fastest: float) -> Iterator[str]:
        """What to change, as the ranks differ in it. ``fastest``: copies of any rank."""
        if not self.parities_alike:
            yield 'parities differ from a host\'s, and restore nothing: write "protection": "arc"'
        if not self.registered:
            yield "host memory cannot be registered, so copies are slower: raise ulimit -l"
        at, memory = self.device_node, self.memory_node
        if at != memory and _UNKNOWN not in (at, memory):
            yield (
                f"host memory is on NUMA node {memory}, the device on {at}: start the rank with "
                f"numactl --cpunodebind={at} --membind={at}"
            )
        if self.copy_bytes_per_sec < _SLOW * fastest:
            yield "copies are less than half as fast as the fastest rank's: look at the device's link"
        yield from self.to_change


def check_device(session: Session) -> list[DeviceFindings]:
    """Of all ranks, in their order; none where ranks train on CPUs. Collective."""
    vendor = vendor_of(session.engine.device)
    if vendor is None:
        return []
    config, topology = session.config, session.topology
    mine = DeviceFindings(vendor.name, _free_cores(session.ranks_here))
    mine.to_change = vendor.settings_to_change(os.environ, topology.degrees.tp)
    mine.makes_parities = config.chooses or config.scheme.parities > 0
    # In a thread of its own: what it sets for itself is not set for the training thread.
    with ThreadPoolExecutor(1) as thread:
        engine = session.copying.engine
        assert isinstance(engine, DeviceCopyEngine)
        thread.submit(try_device, mine, vendor, engine, session.memory.job_dir.path).result()
    gathered = session.control.gather_bytes(json.dumps(asdict(mine)).encode())
    return [DeviceFindings(**json.loads(one)) for one in gathered]


def try_device(found: DeviceFindings, vendor: Vendor, engine: DeviceCopyEngine, directory: Path) -> None:
    """Fill in what only the device can tell. ``directory``: where arenas will be."""
    try:
        device = engine.device
        vendor.enter(device)
        _copy(found, engine, directory)
        found.device_node = vendor.numa_node(device)
        if found.makes_parities:
            found.parities_alike = _parities_alike(device)
        found.adam_is_exact, found.adam_parameters_per_sec = _try_adam(device)
    except Exception as error:  # P6
        found.to_change.append(f"the device could not be tried out ({type(error).__name__}: {error})")


def device_paragraph(ranks: Sequence[DeviceFindings]) -> str:
    """What was found on all ranks, and what to change on which."""
    rates = sorted(one.copy_bytes_per_sec / 1e9 for one in ranks)
    nodes = {(one.device_node, one.memory_node) for one in ranks}
    found = [
        f"reft.ExactAdam steps {'as' if all(one.adam_is_exact for one in ranks) else 'NOT as'} on a host",
        f"copies into host memory run at {rates[0]:.3g} to {rates[-1]:.3g} GB/s",
        f"every rank has {min(one.free_cores for one in ranks)} cores or more to spare",
    ]
    if all(one.makes_parities and one.parities_alike for one in ranks):
        found.insert(1, "parities are as a host's")
    if nodes == {(_UNKNOWN, _UNKNOWN)}:
        found.append("NUMA nodes are not known")
    elif all(device == memory for device, memory in nodes):
        found.append("memory is on the device's NUMA node")
    by_advice: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        for text in one.advice(rates[-1] * 1e9):
            by_advice.setdefault(text, []).append(rank)
    change = [f"{_ranks(at, len(ranks))}: {text}" for text, at in by_advice.items()]
    return f"tried on {ranks[0].name}: {'; '.join(found)}. To change: {'; '.join(change) or 'nothing'}"


def _ranks(at: Sequence[int], of: int) -> str:
    if len(at) == of:
        return "on all ranks"
    more = f" and {len(at) - _RANKS_SHOWN} more" if len(at) > _RANKS_SHOWN else ""
    return f"on rank {', '.join(map(str, at[:_RANKS_SHOWN]))}{more}"


def _free_cores(ranks_here: int) -> int:
    """Of this rank: it is bound to its own, or shares the node's."""
    share = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks_here)
    return max(0, share - max(_OWN_THREADS, torch.get_num_threads()))


def _copy(found: DeviceFindings, engine: DeviceCopyEngine, directory: Path) -> None:
    """Copies into memory that is made as the arenas' is."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=engine.device)
    with TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, _COPIED_BYTES)
        target = torch.frombuffer(mmap.mmap(file.fileno(), _COPIED_BYTES), dtype=torch.uint8)
    found.registered = engine.register(target)
    try:
        stamps = [engine.stamp()]
        for _ in range(3):
            target.copy_(source, non_blocking=True)
            stamps.append(engine.stamp())
        shortest = min(b - a for a, b in pairwise(engine.secs_of(stamps)))
        found.copy_bytes_per_sec = _COPIED_BYTES / max(shortest, 1e-9)
        found.memory_node = memory_node(Path("/proc/self/numa_maps").read_text(), target.data_ptr())
    finally:
        engine.unregister(target)


def memory_node(numa_maps: str, address: int) -> int:
    """The NUMA node with most pages of the mapping that begins at ``address``, by Linux's own list."""
    line = re.search(rf"^0*{address:x} .*$", numa_maps, re.M)
    pages = [(int(n), int(node)) for node, n in re.findall(r" N(\d+)=(\d+)", line[0] if line else "")]
    return max(pages)[1] if pages else _UNKNOWN


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
    """Whether steps of ExactAdam give the same bits on the device, and how many parameters a core steps."""
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
