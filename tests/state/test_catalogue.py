"""The bytes of a section: every live byte once, in a repeatable order, copied into place (traps 12, 21)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reft.errors import LayoutError, UnsupportedStateError
from reft.grid import ALIGNMENT_BYTES
from reft.state.catalogue import Manifest, SectionImage

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


def whole(image: SectionImage) -> torch.Tensor:
    out = torch.full((image.nbytes,), 0xAB, dtype=torch.uint8)
    image.read_into(0, out)
    return out


def reference(tensors: list[torch.Tensor]) -> torch.Tensor:
    parts = [torch.empty(0, dtype=torch.uint8)]
    for t in tensors:
        raw = t.detach().reshape(-1).view(torch.uint8)
        parts += [raw, torch.zeros(-len(raw) % ALIGNMENT_BYTES, dtype=torch.uint8)]
    return torch.cat(parts)


@st.composite
def sections(draw: st.DrawFn) -> list[torch.Tensor]:
    shapes = st.lists(st.integers(0, 9), max_size=3)
    made = []
    for shape in draw(st.lists(shapes, max_size=7)):
        size = torch.Size(shape)
        raw = torch.randint(0, 2, (size.numel() * 8,), dtype=torch.uint8)
        dtype = draw(st.sampled_from(DTYPES))
        made.append(raw[: size.numel() * dtype.itemsize].view(dtype).reshape(size).clone())
    return made


@settings(max_examples=150, deadline=None)
@given(sections(), st.data())
def test_any_range_reads_and_writes_exactly_its_bytes(
    tensors: list[torch.Tensor], data: st.DataObject
) -> None:
    image = SectionImage([(str(i), t) for i, t in enumerate(tensors)])
    expected = reference(tensors)
    assert image.nbytes == len(expected)
    assert all(o % ALIGNMENT_BYTES == 0 for o in image.offsets)
    assert torch.equal(whole(image), expected)

    start = data.draw(st.integers(0, image.nbytes))
    stop = data.draw(st.integers(start, image.nbytes))
    piece = torch.full((stop - start,), 0xAB, dtype=torch.uint8)
    image.read_into(start, piece)
    assert torch.equal(piece, expected[start:stop])

    copies = [t.clone() for t in tensors]
    for copy in copies:
        copy.untyped_storage().fill_(0)  # torch.zeros_like has no float8 in torch 2.4
    other = SectionImage([(str(i), t) for i, t in enumerate(copies)])
    addresses = [t.data_ptr() for t in copies]
    source = piece.clone()
    other.write_from(start, source)
    source.fill_(0xEE)
    wanted = torch.zeros(image.nbytes, dtype=torch.uint8)
    wanted[start:stop] = expected[start:stop]
    assert torch.equal(whole(other), wanted)
    assert addresses == [t.data_ptr() for t in copies]


def test_dense_tensors_are_stored_in_memory_order() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    channels = torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    odd = torch.arange(4.0).as_strided((2, 1, 2), (2, 77, 1))
    image = SectionImage([("t", transposed), ("c", channels), ("o", odd)])
    assert [s.stride for s in image.specs] == [(1, 3), tuple(channels.stride()), (2, 77, 1)]
    copies = [torch.empty_strided(t.shape, t.stride()).zero_() for t in (transposed, channels, odd)]
    SectionImage([(n, t) for n, t in zip("tco", copies, strict=True)]).write_from(0, whole(image))
    assert torch.equal(copies[0], transposed)
    assert torch.equal(copies[1], channels)
    assert torch.equal(copies[2], odd)


def test_tied_and_shared_memory_is_stored_once() -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    flat = torch.arange(100.0)
    views = [("first", flat[:40]), ("second", flat[40:])]
    tensors = [
        ("embedding", embedding.weight),
        ("head", head.weight),
        *views,
        ("flat", flat),
        ("none", torch.empty(0)),
    ]
    image = SectionImage(tensors)
    assert [s.name for s in image.specs] == ["embedding", "flat", "none"]
    assert image.nbytes == 192 + 448
    assert [s.name for s in SectionImage(views).specs] == ["first", "second"]
    assert [s.name for s in SectionImage([("a", flat), ("b", flat.view(10, 10))]).specs] == ["a"]


def test_locate_finds_memory_inside_a_member() -> None:
    a, flat = torch.randn(5, 7), torch.arange(64.0)
    image = SectionImage([("a", a.t()), ("flat", flat)])
    data = whole(image)
    for view in (a, a[2:], a[1, 3:], a[:, 2], flat[3:9], flat.view(8, 8)[:, 5]):
        offset = image.locate(view)
        stored = data[offset:].clone()
        stored = stored[: len(stored) // 4 * 4].view(torch.float32)
        assert torch.equal(stored.as_strided(view.shape, view.stride()), view)
    assert image.locate(torch.ones(3)) is None
    assert image.locate(torch.empty(0)) is None
    part = SectionImage([("part", flat[4:8])])
    assert part.locate(flat) is None
    assert part.locate(flat[6:9]) is None
    assert part.locate(flat[6:8]) == 8


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ([("x", torch.ones(4, 4)[:, :2])], "gaps"),
        ([("x", torch.ones(1).expand(4))], "twice"),
        ([("x", torch.arange(9.0).as_strided((2, 2, 2), (1, 1, 5)))], "gaps"),
        ([("x", torch.eye(3).to_sparse())], "layout"),
        ([("x", torch.empty(3, device="meta"))], "meta"),
        ([("x", torch.ones(2, dtype=torch.complex64).conj())], "dense"),
    ],
)
def test_memory_that_cannot_be_stored_faithfully_is_refused(
    tensors: list[tuple[str, torch.Tensor]], word: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=word) as error:
        SectionImage(tensors)
    assert str(error.value).startswith("x ")


def test_partly_overlapping_tensors_are_refused() -> None:
    flat = torch.ones(10)
    with pytest.raises(UnsupportedStateError, match="a and b share a part"):
        SectionImage([("a", flat[:6]), ("b", flat[4:])])


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest.of((SectionImage(list(tensors.items())), SectionImage([])))


def test_manifests_survive_encoding_and_refuse_other_layouts() -> None:
    tensors = {"w": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    original = manifest(tensors)
    again = Manifest.decode(original.encode())
    assert again == original
    images = (SectionImage(list(tensors.items())), SectionImage([]))
    again.check(images)
    for changed, words in (
        ({**tensors, "b": torch.ones(3)}, ["b: bfloat16[3]", "b: float32[3]"]),
        ({**tensors, "w": torch.ones(3, 2)}, ["w: float32[2, 3]", "w: float32[3, 2]"]),
        ({**tensors, "w": torch.ones(3, 2).t()}, ["stride (3, 1)", "stride (1, 2)"]),
        ({"w": tensors["w"]}, ["2 tensors", "running job 1", "b: bfloat16"]),
        ({**tensors, "c": torch.ones(1)}, ["2 tensors", "running job 3", "c: float32"]),
    ):
        with pytest.raises(LayoutError) as error:
            again.check((SectionImage(list(changed.items())), SectionImage([])))
        assert all(word in str(error.value) for word in words), str(error.value)
