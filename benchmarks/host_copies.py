"""What one core copies and hashes in host memory: the limit of what a version, or a restore, costs
there.

Source and target are larger than the caches, the target is in shared memory as an arena is. The
ways take turns; times are the process's processor time, ratios are to ``plain`` in the same round:

- plain: torch's copy, on one thread;
- past_caches: reft's copy, without a checksum;
- hash: xxh3_64 of the source, by the xxhash package;
- copy_then_hash: past the caches, piece by piece, each hashed by the package while it is in the
  cache;
- copy_and_hash: reft's one pass, as versions are copied and blocks restored;
- copy_and_hash_sse2: the same on a processor without AVX2;
- mapped_anew: the same from a file that is mapped for it, as a restore reads an arena;
- written_to_file: to a new file in shared memory, as a newcomer's arena is filled;
- over_loopback: from a thread that sends to one that receives, both counted.

Then ``memmove`` and the loops that copy, hash and look for NaN, in GB/s, by where the target lies
in its page relative to the source, ``(target - source) mod 4096``: one of them may be slow where
they lie alike.

    python benchmarks/host_copies.py [--json] [--mib 512] [--rounds 9]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import MIB
from results import estimate, machine

from reft.device import compiled
from reft.memory.header import checksum
from reft.memory.stream import (
    EXPONENTS,
    PlainHashingCopier,
    choose_loop,
    compiled_hash,
    copier,
    find_ranges,
    hashing_copier,
)

BLOCK_BYTES = 4 * MIB
PAGE_BYTES = 4096
OFFSETS = (0, 64, 128, 2048, 17)
LOOPS = {"pages": 0, "pieces_4k": PAGE_BYTES, "pieces_16k": 4 * PAGE_BYTES}


@contextmanager
def new_file(folder: Path) -> Iterator[int]:
    """A file without a name."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def write_to_file(source: memoryview, folder: Path) -> None:
    with new_file(folder) as fd:
        write(fd, source)


def write(fd: int, source: memoryview) -> None:
    for at in range(0, len(source), BLOCK_BYTES):
        os.pwrite(fd, source[at : at + BLOCK_BYTES], at)


def copy_mapped_anew(target: torch.Tensor, fd: int) -> None:
    nbytes = target.numel()
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as mapping:
        mapping.madvise(mmap.MADV_SEQUENTIAL)
        source, hasher = np.frombuffer(mapping, np.uint8), hashing_copier()
        for at in range(0, nbytes, BLOCK_BYTES):
            part = min(BLOCK_BYTES, nbytes - at)
            hasher.copy(find_ranges([(target.data_ptr() + at, source.ctypes.data + at, part)]))
            hasher.take()
        del source


def send_over_loopback(target: memoryview, source: memoryview) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with closing(sender), closing(receiver):
        sending = threading.Thread(target=sender.sendall, args=(source,))
        sending.start()
        at = 0
        while at < len(target):
            at += receiver.recv_into(target[at : at + BLOCK_BYTES])
        sending.join()


def ways(
    target: torch.Tensor, source: torch.Tensor, folder: Path, fd: int
) -> dict[str, Callable[[], object]]:
    """Each copies or hashes all bytes, block by block as versions are cut. ``fd``: a file that
    holds them."""
    to, at, nbytes = target.data_ptr(), source.data_ptr(), source.numel()
    blocks = [
        find_ranges([(to + x, at + x, min(BLOCK_BYTES, nbytes - x))])
        for x in range(0, nbytes, BLOCK_BYTES)
    ]
    numbers = [block.copy() for block in blocks]
    for block in numbers:
        block[:, 3] = EXPONENTS["float32"]  # NaN and infinity are looked for
    fused, apart = hashing_copier(), PlainHashingCopier()

    def hashed(hasher: Any, blocks: Sequence[Any] = blocks) -> Callable[[], object]:
        def run() -> None:
            for block in blocks:
                hasher.copy(block)
                hasher.take()

        return run

    def without_avx2() -> None:
        use_avx2 = compiled("reft.memory._stream", "reft_use_avx2")
        use_avx2(False)
        hashed(fused)()
        use_avx2(True)

    return {
        "plain": lambda: target.copy_(source),
        "past_caches": lambda: copier()(to, at, nbytes),
        "hash": lambda: checksum(source.numpy().data),
        "copy_then_hash": hashed(apart),
        "copy_and_hash": hashed(fused),
        "copy_and_hash_sse2": without_avx2,
        "copy_hash_and_look": hashed(fused, numbers),
        "mapped_anew": lambda: copy_mapped_anew(target, fd),
        "written_to_file": lambda: write_to_file(source.numpy().data, folder),
        "over_loopback": lambda: send_over_loopback(target.numpy().data, source.numpy().data),
    }


def measure(nbytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Bytes per second and the ratio to a plain copy, by way."""
    torch.set_num_threads(1)
    path = folder / f"reft-host-copies-{os.getpid()}"
    try:
        target = torch.from_file(str(path), True, nbytes, dtype=torch.uint8).fill_(1)
    finally:
        path.unlink(missing_ok=True)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    secs: dict[str, list[float]] = {}
    with new_file(folder) as fd:
        write(fd, source.numpy().data)
        for number in range(rounds + 1):
            for name, run in ways(target, source, folder, fd).items():
                began = time.process_time()
                run()
                took = max(time.process_time() - began, 1e-9)
                if number:  # the first round touches memory
                    secs.setdefault(name, []).append(took)
    plain = secs["plain"]
    return {
        name: {
            "bytes_per_sec": nbytes / estimate(taken).median,
            "secs_to_plain": estimate([a / b for a, b in zip(taken, plain, strict=True)]).to_json(),
        }
        for name, taken in secs.items()
    }


def use_pieces(nbytes: int) -> None:
    """Copy in pieces of the given bytes; 0: pages side by side."""
    function = compiled("reft.memory._stream", "reft_use_pieces")
    function.argtypes = [ctypes.c_size_t]
    function(nbytes)


def measure_alignments(nbytes: int, rounds: int) -> dict[str, dict[str, Any]]:
    """GB/s by offset within the page and by loop; the loops take turns."""
    hasher = hashing_copier()
    memory = torch.ones(2 * nbytes + 4 * PAGE_BYTES, dtype=torch.uint8)
    source = -(-memory.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    found: dict[str, dict[str, Any]] = {}
    for offset in OFFSETS:
        # The target stays aligned to a cache line, as blocks of an arena are; the source moves.
        target, at = (
            source + nbytes // PAGE_BYTES * PAGE_BYTES + 2 * PAGE_BYTES,
            source + PAGE_BYTES - offset,
        )
        row = find_ranges([(target, at, nbytes, EXPONENTS["float32"])])
        taken: dict[str, list[float]] = {name: [] for name in ("memmove", *LOOPS)}
        for _ in range(rounds):
            for name, secs in taken.items():
                began = time.process_time()
                if name == "memmove":
                    ctypes.memmove(target, at, nbytes)
                else:
                    use_pieces(LOOPS[name])
                    hasher.copy(row)
                secs.append(max(time.process_time() - began, 1e-9))
                hasher.take()
        rates = {
            name: estimate([nbytes / s / 1e9 for s in secs]).to_json()
            for name, secs in taken.items()
        }
        found[str(offset)] = rates
    use_pieces(choose_loop())
    return found


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--mib", type=int, default=512, help="MiB of the source (default 512)")
    made.add_argument("--rounds", type=int, default=9, help="(default 9)")
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs of the target")
    made.add_argument(
        "--quick", action="store_true", help="little memory and few rounds: for the tests"
    )
    options = made.parse_args()
    nbytes, rounds = (8 * MIB + 123, 2) if options.quick else (options.mib * MIB, options.rounds)
    found = measure(nbytes, rounds, options.shm)
    alignments = measure_alignments(min(nbytes, 64 * MIB), rounds) if compiled_hash() else {}
    if options.json:
        head = {
            "benchmark": "host_copies",
            "date": date.today().isoformat(),
            "command": " ".join(["python", "benchmarks/host_copies.py", *sys.argv[1:]]),
            "machine": machine(),
            "bytes": nbytes,
        }
        chosen = choose_loop() if alignments else None
        result = {**head, "ways": found, "alignments": alignments, "chosen_piece_bytes": chosen}
        print(json.dumps(result, indent=2))
        return 0
    for name, way in found.items():
        ratio = way["secs_to_plain"]
        low, high = ratio["ci95"]
        print(
            f"{name:20}{way['bytes_per_sec'] / 1e9:6.1f} GB/s, {ratio['median']:.2f} [{low:.2f}, "
            f"{high:.2f}]"
        )
    for offset, rates in alignments.items():
        shown = (
            f"{name} {r['median']:.1f} [{r['ci95'][0]:.1f}, {r['ci95'][1]:.1f}]"
            for name, r in rates.items()
        )
        print(f"offset {offset:>4}: {', '.join(shown)} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
