"""reft's decoder of lost blocks against the erasure-coding libraries of PyPI, on one core.

The two lost blocks of a stripe of ``rs:2`` (six blocks, two parities) are decoded from four blocks
and both parities, as a recovery does: into memory that is there. Each library decodes what it
encoded itself, by its own call, with the copies that the call makes; its parities are not reft's
(rs.py). Rounds alternate; times are the thread's processor time, ratios to a copy in the same round
that moves as many bytes. What is not installed is left out:

    pip install zfec pyeclib reedsolo galois
    python benchmarks/decoders.py [--json] [--block-mib 4] [--rounds 15] [--isal libisal.so.2]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes.util import find_library
from datetime import date
from importlib.metadata import version
from statistics import median
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import MIB, progress
from results import machine

from reft.protect.backend import NumpyBackend, compiled_run, solve_ragged
from reft.protect.rs import parity_rows

DATA, PARITIES = 6, 2
LOST = (1, 2)
SLOW_BYTES = 64 * 2**10
"""Of a block, for libraries that would take minutes for a whole one; their times are scaled up."""

Way = tuple[str, Callable[[], object], int]
"""Name, call, and the bytes of a block."""


def blocks_of(nbytes: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, nbytes, np.uint8) for _ in range(DATA)]


def reft_ways(nbytes: int) -> Iterator[Way]:
    data, rows = blocks_of(nbytes), parity_rows(PARITIES, DATA)
    parities = [np.zeros(nbytes, np.uint8) for _ in rows]
    NumpyBackend().combine(rows, data, parities)
    known = [j for j in range(DATA) if j not in LOST]
    # parity + sum of the known = sum of the lost
    sums = tuple(
        (*(row[j] for j in known), *(int(r == q) for q in range(PARITIES)))
        for r, row in enumerate(rows)
    )
    matrix = tuple(tuple(row[j] for j in LOST) for row in rows)
    sources = [*(data[j] for j in known), *parities]
    targets = [np.zeros(nbytes, np.uint8) for _ in LOST]

    def decode() -> None:
        solve_ragged(sums, matrix, sources, targets)

    def decode_with_numpy() -> None:
        with mock.patch("reft.protect.backend.compiled_run", return_value=None):
            decode()

    for name, way in (("reft, NumPy", decode_with_numpy), ("reft, compiled", decode)):
        if name == "reft, compiled" and compiled_run() is None:
            continue
        way()
        assert all(np.array_equal(targets[i], data[j]) for i, j in enumerate(LOST))
        yield name, way, nbytes


def zfec_ways(nbytes: int) -> Iterator[Way]:
    import zfec

    data = [block.tobytes() for block in blocks_of(nbytes)]
    coded = zfec.Encoder(DATA, DATA + PARITIES).encode(data)
    kept = [j for j in range(DATA + PARITIES) if j not in LOST]
    decoder = zfec.Decoder(DATA, DATA + PARITIES)

    def decode() -> list[bytes]:
        return list(decoder.decode([coded[j] for j in kept], kept))

    assert decode() == data
    yield f"zfec {version('zfec')}", decode, nbytes


def pyeclib_ways(nbytes: int) -> Iterator[Way]:
    from pyeclib.ec_iface import VALID_EC_TYPES, ECDriver

    data = b"".join(block.tobytes() for block in blocks_of(nbytes))
    for kind in ("isa_l_rs_vand", "isa_l_rs_cauchy", "liberasurecode_rs_vand"):
        if kind not in VALID_EC_TYPES:
            continue
        driver = ECDriver(k=DATA, m=PARITIES, ec_type=kind)
        coded = driver.encode(data)
        kept = [coded[j] for j in range(DATA + PARITIES) if j not in LOST]

        def decode(driver: ECDriver = driver, kept: list[bytes] = kept) -> bytes:
            return bytes(driver.decode(kept))

        assert decode() == data
        yield f"pyeclib {version('pyeclib')}, {kind}", decode, nbytes


def isal_ways(library: str, nbytes: int) -> Iterator[Way]:
    """ISA-L's own loop, without a Python package around it: one pass with the inverted matrix."""
    isal = ctypes.CDLL(library)
    data = blocks_of(nbytes)
    rows = np.array(parity_rows(PARITIES, DATA), np.uint8)
    generator = np.vstack([np.eye(DATA, dtype=np.uint8), rows])
    parities = [np.zeros(nbytes, np.uint8) for _ in rows]
    _isal_call(isal, rows, data, parities)()
    kept = [j for j in range(DATA + PARITIES) if j not in LOST]
    square, inverse = generator[kept].copy(), np.zeros((DATA, DATA), np.uint8)
    assert (
        isal.gf_invert_matrix(square.ctypes.data_as(_BYTES), inverse.ctypes.data_as(_BYTES), DATA)
        == 0
    )
    targets = [np.zeros(nbytes, np.uint8) for _ in LOST]
    sources = [(data + parities)[j] for j in kept]
    decode = _isal_call(isal, inverse[list(LOST)].copy(), sources, targets)
    decode()
    assert all(np.array_equal(targets[i], data[j]) for i, j in enumerate(LOST))
    yield "ISA-L, ec_encode_data", decode, nbytes


_BYTES = ctypes.POINTER(ctypes.c_ubyte)


def _isal_call(
    isal: ctypes.CDLL, rows: np.ndarray, sources: list[np.ndarray], targets: list[np.ndarray]
) -> Callable[[], object]:
    tables = np.zeros(32 * rows.size, np.uint8)
    isal.ec_init_tables(
        len(sources), len(targets), rows.ctypes.data_as(_BYTES), tables.ctypes.data_as(_BYTES)
    )
    pointers = [
        (_BYTES * len(buffers))(*(b.ctypes.data_as(_BYTES) for b in buffers))
        for buffers in (sources, targets)
    ]

    def call() -> None:
        counts = len(sources[0]), len(sources), len(targets)
        isal.ec_encode_data(*counts, tables.ctypes.data_as(_BYTES), *pointers)

    return call


def reedsolo_ways(_: int) -> Iterator[Way]:
    import reedsolo

    data = np.stack(blocks_of(SLOW_BYTES))
    codec = reedsolo.RSCodec(PARITIES, nsize=DATA + PARITIES)
    words = [bytes(codec.encode(data[:, i].tobytes())) for i in range(256)]

    def decode() -> list[bytearray]:
        return [codec.decode(word, erase_pos=list(LOST))[0] for word in words]

    assert b"".join(decode()) == data[:, :256].T.tobytes()
    yield f"reedsolo {version('reedsolo')}", decode, 256


def galois_ways(_: int) -> Iterator[Way]:
    import galois

    field, rows = galois.GF(2**8), parity_rows(PARITIES, DATA)
    data = field(np.stack(blocks_of(SLOW_BYTES)))
    generator = field(np.vstack([np.eye(DATA, dtype=np.uint8), np.array(rows, np.uint8)]))
    kept = [j for j in range(DATA + PARITIES) if j not in LOST]
    coded = (generator @ data)[kept]

    def decode() -> object:
        return (np.linalg.inv(generator[kept])[list(LOST)]) @ coded

    assert np.array_equal(np.asarray(decode()), np.asarray(data)[list(LOST)])
    yield f"galois {version('galois')}", decode, SLOW_BYTES


def ways(nbytes: int, isal: str | None) -> Iterator[Way]:
    if isal is not None:
        yield from isal_ways(isal, nbytes)
    for made in (reft_ways, zfec_ways, pyeclib_ways, reedsolo_ways, galois_ways):
        with suppress(ImportError):
            yield from made(nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--block-mib", type=int, default=4, help="bytes of a block (default: %(default)s MiB)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--isal", default=find_library("isal"), help="file of Intel's ISA-L, if there is one"
    )
    options = parser.parse_args()
    nbytes = options.block_mib * MIB
    source, target = np.ones(DATA * nbytes, np.uint8), np.ones(DATA * nbytes, np.uint8)

    def copy() -> None:
        """Moves as many bytes as decoding must: six blocks are read and two written."""
        np.copyto(
            target[: nbytes * (DATA + len(LOST)) // 2], source[: nbytes * (DATA + len(LOST)) // 2]
        )

    all_ways: list[Way] = [("copy", copy, nbytes), *ways(nbytes, options.isal)]
    secs: dict[str, list[float]] = {name: [] for name, *_ in all_ways}
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        for name, call, size in all_ways:
            began = time.thread_time()
            call()
            secs[name].append((time.thread_time() - began) * nbytes / size)
    result = {
        "benchmark": "decoders",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/decoders.py", *sys.argv[1:]]),
        "machine": machine(),
        "block_bytes": nbytes,
        "rounds": options.rounds,
        "ways": {
            name: {
                "lost_bytes_per_cpu_sec": round(len(LOST) * nbytes / median(taken)),
                "of_a_copy": round(
                    median(c / t for c, t in zip(secs["copy"], taken, strict=True)), 4
                ),
            }
            for name, taken in secs.items()
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, found in result["ways"].items():
        rate = found["lost_bytes_per_cpu_sec"] / MIB
        print(f"{name:40} {rate:10.1f} MiB/s {found['of_a_copy']:8.2%} of a copy")


if __name__ == "__main__":
    main()
