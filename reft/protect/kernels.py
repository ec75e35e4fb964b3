"""Source of the fused device kernels, in the subset of C++ that NVRTC and hipRTC share. Pure.

One kernel per coefficient matrix and word width. It reads every source once, keeps all targets in
registers and writes each once, so that it runs at the speed of the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from reft.protect.gf256 import Row, bit_matrix
from reft.protect.rs import PACKET_BYTES, PACKETS, needs_packets

THREADS = 256
"""Threads of a block. With coefficients above 1, a block takes so many columns of a cell.

The kernels say it to the compiler. HIP's compilers otherwise keep room for blocks of 1,024 threads: 128
registers for a thread, so that from three targets on accumulators are spilled to memory."""

NAME = "reft_combine"

_WORDS = {
    16: (
        "typedef uint4 Word;\n"
        "static __device__ __forceinline__ Word mix(Word a, Word b) "
        "{ a.x ^= b.x; a.y ^= b.y; a.z ^= b.z; a.w ^= b.w; return a; }\n"
        "static __device__ __forceinline__ Word zero() { Word a; a.x = a.y = a.z = a.w = 0; return a; }\n"
    ),
    **{
        width: (
            f"typedef {name} Word;\n"
            "static __device__ __forceinline__ Word mix(Word a, Word b) { return a ^ b; }\n"
            "static __device__ __forceinline__ Word zero() { return 0; }\n"
        )
        for width, name in (
            (8, "unsigned long long"),
            (4, "unsigned int"),
            (2, "unsigned short"),
            (1, "unsigned char"),
        )
    },
}


@dataclass(frozen=True)
class Launch:
    """How to start a kernel.

    Attributes:
        items: blocks that have work; fewer blocks may be started, each then takes several.
        numbers: the two leading arguments (unsigned 64-bit), before the pointers of sources and targets.
    """

    items: int
    numbers: tuple[int, int]


def launch_of(rows: Sequence[Row], width: int, nbytes: int) -> Launch:
    """Grid and leading arguments for buffers of ``nbytes`` bytes and words of ``width`` bytes."""
    words = nbytes // width
    if not needs_packets(rows):
        return Launch(max(1, -(-words // THREADS)), (words, nbytes))
    whole, rest = divmod(words, PACKETS * (PACKET_BYTES // width))
    return Launch((whole + bool(rest)) * _tiles(width), (whole, rest // PACKETS))


def _tiles(width: int) -> int:
    """Blocks that share a cell."""
    return PACKET_BYTES // width // THREADS


@lru_cache(maxsize=256)
def kernel_source(rows: tuple[Row, ...], width: int) -> str:
    """Source of ``reft_combine`` for a coefficient matrix.

    Its arguments are two numbers (see :func:`launch_of`), the sources and the targets as byte pointers.

    Args:
        rows: coefficients, one row per target; every row has one that is not 0.
        width: bytes of a word: 16, 8, 4, 2 or 1; all pointers are multiples of it.
    """
    sources = range(len(rows[0]))
    pointers = [f"const unsigned char* __restrict__ s{j}" for j in sources]
    pointers += [f"unsigned char* __restrict__ t{r}" for r in range(len(rows))]
    body = _packet_body(rows, width) if needs_packets(rows) else _plain_body(rows)
    return (
        "typedef unsigned long long Count;\n"
        + _WORDS[width]
        + f'extern "C" __global__ void __launch_bounds__({THREADS}) '
        + f"{NAME}(Count m, Count n, {', '.join(pointers)}) {{\n{body}}}\n"
    )


def _plain_body(rows: Sequence[Row]) -> str:
    """m words and n bytes; the bytes after the last word go one by one."""

    def xor(row: Row, pattern: str, joint: str) -> str:
        terms = [pattern.format(j=j) for j, c in enumerate(row) if c]
        text = terms[0]
        for term in terms[1:]:
            text = joint.format(text, term)
        return text

    used = [j for j in range(len(rows[0])) if any(row[j] for row in rows)]
    lines = [
        "  const Count stride = (Count)gridDim.x * blockDim.x;",
        "  const Count first = (Count)blockIdx.x * blockDim.x + threadIdx.x;",
        "  for (Count i = first; i < m; i += stride) {",
        *(f"    const Word x{j} = ((const Word*)s{j})[i];" for j in used),
        *(f"    ((Word*)t{r})[i] = {xor(row, 'x{j}', 'mix({}, {})')};" for r, row in enumerate(rows)),
        "  }",
        "  for (Count i = m * sizeof(Word) + first; i < n; i += stride) {",
        *(f"    t{r}[i] = {xor(row, 's{j}[i]', '{} ^ {}')};" for r, row in enumerate(rows)),
        "  }",
    ]
    return "\n".join(lines) + "\n"


def _packet_body(rows: Sequence[Row], width: int) -> str:
    """m whole cells, then, if n is not 0, one whose packets have n words."""
    words = PACKET_BYTES // width
    bits = range(PACKETS)
    lines = [
        "  const Count cells = m + (n ? 1 : 0);",
        f"  for (Count tile = blockIdx.x; tile < cells * {_tiles(width)}; tile += gridDim.x) {{",
        f"    const Count c = tile / {_tiles(width)};",
        f"    const Count w = tile % {_tiles(width)} * {THREADS} + threadIdx.x;",
        f"    const Count words = c < m ? {words} : n;",
        "    if (w < words) {",
        f"      const Count at = c * {words * PACKETS} + w;",
        *(f"      Word a{r}_{i} = zero();" for r in range(len(rows)) for i in bits),
    ]
    for j in range(len(rows[0])):
        if not any(row[j] for row in rows):
            continue
        lines.append("      {")
        lines += [f"        const Word x{i} = ((const Word*)s{j})[at + {i} * words];" for i in bits]
        for r, row in enumerate(rows):
            lines += _accumulate(r, row[j])
        lines.append("      }")
    lines += [f"      ((Word*)t{r})[at + {i} * words] = a{r}_{i};" for r in range(len(rows)) for i in bits]
    return "\n".join([*lines, "    }", "  }"]) + "\n"


def _accumulate(target: int, coefficient: int) -> list[str]:
    lines = []
    for i, factors in enumerate(bit_matrix(coefficient)):
        text = f"a{target}_{i}"
        for j in factors:
            text = f"mix({text}, x{j})"
        if factors:
            lines.append(f"        a{target}_{i} = {text};")
    return lines
