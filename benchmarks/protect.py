"""How fast parities are encoded and lost shards decoded, against the memory's bandwidth.

One trial encodes the parities of a whole sharding group from one replica, or decodes everything
that lost members held. The bound is measured in the same round: a copy that moves as many bytes
through as many streams. What needs more than plain XOR is decoded by a compiled loop, if reft was
installed with a compiler ("compiled" in the result), and once more with NumPy. Rounds alternate
between the bound and all cases, so that a busy machine disturbs all alike; ratios are of one round.
``cpu`` figures count the thread's processor time instead of the clock's.

    python benchmarks/protect.py [--json] [--quick] [--members 8] [--image-mib 768] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from typing import Any
from unittest import mock

# The figures are those of one core; libraries read this when they are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import MIB, progress
from results import estimate, machine, run_lines

from reft.errors import ConfigError
from reft.grid import BlockKey
from reft.protect.backend import (
    Backend,
    Buffer,
    CupyBackend,
    NumpyBackend,
    TorchBackend,
    combine_ragged,
    compiled_run,
)
from reft.protect.codes import BlockCode, Code, Scheme, make_code
from reft.recover.plan import LostBlock, find_lost, find_stripes
from reft.recover.rebuild import Pool, Stripe

CASES = (
    ("encode", "aec", ()),
    ("encode", "rs:2", ()),
    ("encode", "rs:3", ()),
    ("encode", "arc+aec", ()),
    ("decode", "aec", (1,)),
    ("decode", "rs:2", (1,)),
    ("decode", "rs:2", (1, 2)),
    ("with NumPy", "rs:2", (1, 2)),
    ("add up", "rs:2", (1, 2)),
)
_COMPILED = "reft.protect.backend.compiled_run"
_CHUNK_BYTES = 512 * 2**10
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Place:
    """Where buffers lie and how to work on them.

    Attributes:
        name: of the backend.
        backend: computes.
        put: moves bytes there.
        copy: copies a buffer there.
        wait: until everything queued is done.
    """

    name: str
    backend: Backend
    put: Callable[[np.ndarray], Buffer]
    copy: Callable[[Buffer, Buffer], None]
    wait: Callable[[], None]


def places() -> list[Place]:
    """Every backend that works on this machine."""
    import torch

    torch.set_num_threads(1)

    def on_host(data: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(data)

    def torch_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    made = [
        Place("numpy", NumpyBackend(), lambda data: data, np.copyto, lambda: None),
        Place("torch cpu", TorchBackend(), on_host, torch_copy, lambda: None),
    ]
    if torch.cuda.is_available():
        backends: list[tuple[str, Backend]] = [("torch device", TorchBackend())]
        try:
            backends.append(("cupy", CupyBackend()))
        except ConfigError as e:
            progress(str(e))
        for name, backend in backends:
            made.append(
                Place(
                    name, backend, lambda d: on_host(d).cuda(), torch_copy, torch.cuda.synchronize
                )
            )
    return made


@dataclass(frozen=True)
class Trial:
    """One thing to time.

    Attributes:
        name: what it does.
        run: does it.
        nbytes: bytes that it has to read and to write.
    """

    name: str
    run: Callable[[], object]
    nbytes: int


def encoding(place: Place, image: Buffer, code: Code) -> Trial:
    """Encode every parity of the group."""
    section = BlockCode(code, len(image), _BLOCK_BYTES)
    parities = [p for p in code.pieces if not p.is_data]
    targets = [place.backend.zeros(section.piece_bytes(p), image) for p in parities]
    work = []
    for piece, target in zip(parities, targets, strict=True):
        sources = [image[slice(*section.range_of(block))] for block, _ in piece.terms]
        work.append((tuple(coefficient for _, coefficient in piece.terms), sources, target))
    moved = sum(map(len, targets)) + sum(len(s) for _, sources, _ in work for s in sources)

    def run() -> None:
        for row, sources, target in work:
            combine_ragged(place.backend, (row,), sources, (target,))
        place.wait()

    return Trial(f"encode {code.scheme}", run, moved)


def decoding(
    what: str, image: np.ndarray, code: Code, lost_members: tuple[int, ...]
) -> Trial | None:
    """Decode every block of the lost members, on the host and stripe by stripe as a recovery does,
    and check the bytes once; None where copies are left of all of them. What has to be moved: every
    block of the stripes read once, every lost one written. "with NumPy": without the compiled loop.
    "add up": no room for what arrives, it is added at once."""
    blocks = BlockCode(code, len(image), _BLOCK_BYTES)
    data = {b.key: b for member in range(code.size) for b in blocks.data(member)}
    left = {key: image[b.start_bytes : b.start_bytes + b.nbytes] for key, b in data.items()}
    alive = set(range(code.size)) - set(lost_members)
    for key in [k for k in left if k.member in lost_members]:
        if not any(blocks.stores_copy(member, key) for member in alive):
            del left[key]
    for member in alive:
        for parity in blocks.parities(member):
            left[parity.key] = np.zeros(parity.nbytes, np.uint8)
            terms = [(data[key], coefficient) for key, coefficient in parity.terms]
            sources = [image[b.start_bytes : b.start_bytes + b.nbytes] for b, _ in terms]
            row = tuple(coefficient for _, coefficient in terms)
            combine_ragged(NumpyBackend(), (row,), sources, (left[parity.key],))
    missing, why = find_lost(blocks, left)
    if why is not None:
        raise SystemExit(why)
    if not missing:
        return None
    stripes = find_stripes(missing)
    memory = [np.zeros(sum(lost.padded_bytes for lost in stripe), np.uint8) for stripe in stripes]
    read = {key for block in missing for key, _ in block.terms}
    moved = sum(len(left[key]) for key in read) + sum(block.nbytes for block in missing)

    compiled = nullcontext() if what != "with NumPy" else mock.patch(_COMPILED, return_value=None)

    def run() -> list[tuple[LostBlock, np.ndarray]]:
        with compiled:
            return decode(stripes, memory, left, stays=what != "add up")

    for lost, data in run():
        if not np.array_equal(data, image[lost.start_bytes : lost.start_bytes + lost.nbytes]):
            raise SystemExit(f"{lost.key} of {code.scheme} came back wrong")
    return Trial(f"{what} {code.scheme}, {len(lost_members)} lost", run, moved)


def decode(
    stripes: Sequence[tuple[LostBlock, ...]],
    memory: Sequence[np.ndarray],
    left: Mapping[BlockKey, np.ndarray],
    *,
    stays: bool,
) -> list[tuple[LostBlock, np.ndarray]]:
    """Every lost block with its bytes. Terms may stay where they are, as those in the node's own
    arenas and those received in their room do."""
    decoded: list[tuple[LostBlock, np.ndarray]] = []
    for blocks, out in zip(stripes, memory, strict=True):
        stripe = Stripe(blocks, out, Pool(0))
        for key in stripe.keys:
            stripe.add(key, left[key], stays=stays)
        decoded += zip(stripe.blocks, stripe.results(), strict=True)
    return decoded


def copying(place: Place, image: Buffer, streams: int) -> Trial:
    """The bound: half of the streams are read, the others written, in chunks as the encoder
    does."""
    pairs = max(1, streams // 2)
    length = len(image) // 2 // pairs
    sources = [image[i * length : (i + 1) * length] for i in range(pairs)]
    targets = [place.backend.zeros(length, image) for _ in range(pairs)]
    chunk = _CHUNK_BYTES if place.name in ("numpy", "torch cpu") else length

    def run() -> None:
        for start in range(0, length, chunk):
            for source, target in zip(sources, targets, strict=True):
                place.copy(target[start : start + chunk], source[start : start + chunk])
        place.wait()

    return Trial("copy (bound)", run, 2 * pairs * length)


def timed(trial: Trial) -> tuple[float, float]:
    """Bytes per second by the clock and by the thread's processor time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    trial.run()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return trial.nbytes / wall, trial.nbytes / max(cpu, 1e-9)


def measure(place: Place, image_bytes: int, members: int, rounds: int) -> list[dict[str, Any]]:
    """Alternate between the bound and every case."""
    data = np.random.default_rng(0).integers(0, 256, image_bytes, dtype=np.uint8)
    image = place.put(data)
    trials = [copying(place, image, members)]
    for what, text, lost in CASES:
        scheme = Scheme.parse(text)
        if scheme.least_members > members:
            continue
        code = make_code(scheme, range(members))
        if what == "encode":
            trials.append(encoding(place, image, code))
        elif place.name == "numpy" and (trial := decoding(what, data, code, lost)):
            trials.append(trial)  # on the host only: there recovery decodes, whatever encoded
    for trial in trials:
        trial.run()
    seen: dict[str, list[tuple[float, float]]] = {trial.name: [] for trial in trials}
    for at in range(rounds):
        progress(f"{place.name}: round {at + 1} of {rounds}")
        for trial in trials:
            seen[trial.name].append(timed(trial))
    bound, xor = seen["copy (bound)"], seen["encode aec"]
    return [
        {
            "backend": place.name,
            "what": name,
            "bytes": next(t.nbytes for t in trials if t.name == name),
            "bytes_per_sec": estimate([wall for wall, _ in values]).to_json(),
            "bytes_per_cpu_sec": estimate([cpu for _, cpu in values]).to_json(),
            "of_bound": _ratio(values, bound, 0),
            "of_bound_cpu": _ratio(values, bound, 1),
            "of_xor_encode": _ratio(values, xor, 0),
            "of_xor_encode_cpu": _ratio(values, xor, 1),
        }
        for name, values in seen.items()
    ]


def _ratio(
    values: list[tuple[float, float]], base: list[tuple[float, float]], which: int
) -> dict[str, Any]:
    return estimate([v[which] / b[which] for v, b in zip(values, base, strict=True)]).to_json()


def device_to_host(image_bytes: int, rounds: int) -> dict[str, Any] | None:
    """What one copy engine brings to pinned host memory, where there is a device."""
    import torch

    if not torch.cuda.is_available():
        return None
    source = torch.zeros(image_bytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros(image_bytes, dtype=torch.uint8).pin_memory()
    seen = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seen.append(image_bytes / (time.perf_counter() - begin))
    return estimate(seen[1:]).to_json()


def table(result: Mapping[str, Any]) -> str:
    """For people: GB/s of everything read and written, and parts of the bound."""
    lines = [
        *run_lines(result),
        f"one core, load average {result['load_average_at_end']} at the end; "
        f"D={result['members']}, image {result['image_bytes'] / MIB:.0f} MiB, {result['rounds']} "
        "rounds; median and 95 % interval; traffic read and written",
        "",
        f"{'backend':<13}{'what':<22}{'GB/s':>7}{'  of the bound':<24}{'GB/cpu s':>9}  of the "
        "bound",
    ]
    for row in result["results"]:
        wall, cpu = row["of_bound"], row["of_bound_cpu"]
        lines.append(
            f"{row['backend']:<13}{row['what']:<22}{row['bytes_per_sec']['median'] / 1e9:7.2f}"
            f"  {_part(wall):<22}{row['bytes_per_cpu_sec']['median'] / 1e9:9.2f}  {_part(cpu)}"
        )
    if result["device_to_host_bytes_per_sec"]:
        lines.append(
            f"device to host {result['device_to_host_bytes_per_sec']['median'] / 1e9:.2f} GB/s"
        )
    return "\n".join(lines)


def _part(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["ci95"]
    return f"{ratio['median']:.0%} [{low:.0%}, {high:.0%}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--members", type=int, default=8, help="size D of the sharding group (default 8)"
    )
    parser.add_argument(
        "--image-mib", type=int, default=768, help="replicated section, MiB (default 768)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternations (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="a small image and few rounds: for the tests"
    )
    options = parser.parse_args()
    if options.quick:
        options.image_mib, options.rounds = 8, 3
    if options.members < 2 or options.image_mib < 1 or options.rounds < 1:
        parser.error("found less than 2 members, 1 MiB or 1 round; expected at least that")
    host = machine()
    results = [
        row
        for place in places()
        for row in measure(place, options.image_mib * MIB, options.members, options.rounds)
    ]
    result = {
        "benchmark": "protect",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/protect.py", *sys.argv[1:]]),
        "machine": host,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "software": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("numpy", "torch", "reft-ckpt")},
        },
        "members": options.members,
        "image_bytes": options.image_mib * MIB,
        "rounds": options.rounds,
        "compiled": compiled_run() is not None,
        "device_to_host_bytes_per_sec": device_to_host(options.image_mib * MIB, options.rounds),
        "results": results,
    }
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
