"""A parity encoded from live tensors, range by range, is the parity of the image."""

from __future__ import annotations

import pytest
import torch

from reft.protect.codes import Scheme, make_code
from reft.protect.coding import encode
from reft.protect.rs import CELL_BYTES
from reft.protect.section import CodedSection
from reft.protect.stripes import StripeEncoder
from reft.protect.xor_torch import TorchBackend
from reft.state.catalogue import SectionImage

BACKEND = TorchBackend()
SIZES = (1, 3, 70_001, 900_000, 17, 2_000_003, 5)


def live_image() -> SectionImage:
    """Tensors of several dtypes and odd sizes, with padding between them."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    made = []
    for i, size in enumerate(SIZES):
        dtype = dtypes[i % 3]
        raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        made.append((f"t{i}", raw.view(dtype)))
    return SectionImage(made)


@pytest.mark.parametrize("text", ["aec", "rs:2", "rs:3", "arc+aec"])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_ranges_in_any_order_make_the_parity_of_the_whole_image(text: str, order: str) -> None:
    image = live_image()
    flat = torch.empty(image.nbytes, dtype=torch.uint8)
    image.read_into(0, flat)
    section = CodedSection(make_code(Scheme.parse(text), range(5)), image.nbytes)
    gathered = read = 0
    for piece in (p for p in section.code.pieces if not p.is_data):
        expected = torch.empty(section.piece_bytes(piece), dtype=torch.uint8)
        encode(section, piece, flat, expected, BACKEND)
        encoder = StripeEncoder(section, piece, image, BACKEND, flat, range_bytes=CELL_BYTES)
        found = torch.full_like(expected, 7)
        for start, stop in encoder.ranges if order == "forward" else encoder.ranges[::-1]:
            encoder.encode(start, stop, found[start:stop])
        assert torch.equal(found, expected)
        gathered += encoder.gathered_bytes
        read += len(piece.terms) * encoder.nbytes
    assert 0 < gathered < 0.9 * read, "what lies within one tensor is read in place"


def test_an_image_of_one_tensor_is_never_copied() -> None:
    image = SectionImage([("all", torch.arange(300_000, dtype=torch.int64))])
    section = CodedSection(make_code(Scheme.parse("rs:2"), range(5)), image.nbytes)
    piece = section.code.pieces_of(2)[-1]
    encoder = StripeEncoder(section, piece, image, BACKEND, torch.empty(0, dtype=torch.uint8))
    for start, stop in encoder.ranges:
        encoder.encode(start, stop, torch.empty(stop - start, dtype=torch.uint8))
    assert encoder.gathered_bytes == 0


def test_an_image_of_another_size_and_uneven_ranges_are_refused() -> None:
    image = live_image()
    section = CodedSection(make_code(Scheme.parse("aec"), range(3)), image.nbytes + 1)
    piece, like = section.code.pieces_of(0)[-1], torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="found an image of"):
        StripeEncoder(section, piece, image, BACKEND, like)
    right = CodedSection(section.code, image.nbytes)
    with pytest.raises(ValueError, match=f"a multiple of {CELL_BYTES}"):
        StripeEncoder(right, piece, image, BACKEND, like, range_bytes=1000)
