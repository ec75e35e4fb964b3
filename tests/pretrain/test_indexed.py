"""Megatron's .bin/.idx format: exact bytes, foreign readers, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from examples.llama.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from examples.llama.samples import SampleDataset, open_samples
from examples.llama.tokenizer import ByteTokenizer
from reft.errors import ConfigError

DOCUMENTS = [np.arange(5), np.array([], dtype=np.int64), np.array([300]), np.arange(7) + 100]


def write(prefix: Path, dtype: str = "<u2") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return prefix


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a.b")
    tokens = [0, 1, 2, 3, 4, 300, 100, 101, 102, 103, 104, 105, 106]
    assert bin_path(prefix).name == "a.b.bin"
    assert bin_path(prefix).read_bytes() == struct.pack("<13H", *tokens)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 5, 1, 7) + struct.pack("<3q", 0, 10, 12) + struct.pack("<4q", 0, 1, 2, 3)
    assert idx_path(prefix).read_bytes() == expected


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<u2", "<i4", "<i8"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    documents = [d % 100 for d in DOCUMENTS]
    with IndexedWriter(tmp_path / "x", np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == np.dtype(dtype)
    assert [d.tolist() for d in dataset] == [d.tolist() for d in documents if len(d)]
    assert dataset.documents.tolist() == [0, 1, 2, 3]


def test_deepspeeds_reader_and_writer_agree_with_ours(tmp_path: Path) -> None:
    # With int32: DeepSpeed numbers its unsigned types differently from Megatron, whose format this is.
    torch = pytest.importorskip("torch")
    foreign = pytest.importorskip("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
    theirs = foreign.MMapIndexedDataset(str(write(tmp_path / "ours", "<i4")), skip_warmup=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == [d.tolist() for d in DOCUMENTS if len(d)]
    assert theirs.doc_idx.tolist() == [0, 1, 2, 3]
    builder = foreign.MMapIndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=np.int32)
    for document in DOCUMENTS:
        if len(document):
            builder.add_item(torch.from_numpy(document))
            builder.end_document()
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    ours = IndexedDataset(tmp_path / "theirs")
    assert [d.tolist() for d in ours] == [d.tolist() for d in DOCUMENTS if len(d)]


def test_type_is_the_one_megatron_would_choose() -> None:
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda b: b"TNTIDX\0\0\0" + b[9:], "MMIDIDX"),
        (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2"),
        (lambda b: b[:17] + b"\x07" + b[18:], "no integer type"),
        (lambda b: b[:-1], "truncated"),
        (lambda b: b[:20], "MMIDIDX"),
        (lambda b: b[:34] + struct.pack("<i", 6) + b[38:], "its index describes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage, says: str) -> None:
    prefix = write(tmp_path / "x")
    idx_path(prefix).write_bytes(damage(idx_path(prefix).read_bytes()))
    with pytest.raises(ConfigError, match=says):
        IndexedDataset(prefix)


def test_truncated_tokens_and_a_missing_half_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-2])
    with pytest.raises(ConfigError, match="24 bytes, but its index describes 26"):
        IndexedDataset(prefix)
    bin_path(prefix).unlink()
    with pytest.raises(ConfigError, match="expected"):
        IndexedDataset(prefix)


def test_trailing_modes_of_multimodal_files_are_ignored(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes() + b"\0\0\0")
    assert len(IndexedDataset(prefix)) == 3


def test_samples_cover_each_stream_and_name_it_with_or_without_suffix(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x")
    samples = SampleDataset([IndexedDataset(prefix), IndexedDataset(prefix)], 4)
    assert len(samples) == 6
    assert samples[0].tolist() == [0, 1, 2, 3, 4]
    assert samples[1].tolist() == [4, 300, 100, 101, 102]
    assert samples[3].tolist() == samples[0].tolist()
    for name in (prefix, bin_path(prefix), idx_path(prefix)):
        assert len(open_samples([name], ByteTokenizer(), tmp_path / "cache", 4)) == 3
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="too few for one sample"):
        open_samples([prefix], ByteTokenizer(), tmp_path / "cache", 13)
