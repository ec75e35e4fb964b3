"""reft.data.stream: shards of tar and JSON lines, every sample once, from any position and at every degree (P8)."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reft
from reft.data import shards as shards_module
from reft.data.order import Deal, JobPosition
from reft.data.shards import count_samples
from reft.data.streaming import StreamOrder

SIZES = (7, 0, 11, 5, 9, 2)


def write_tar(path: Path, samples: list[int]) -> None:
    with tarfile.open(path, "w") as tar:
        for number in samples:
            for kind, data in (("txt", str(number)), ("seg.bin", "x" * (number % 5))):
                info = tarfile.TarInfo(f"part/{number:06d}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data.encode()))


def write_lines(path: Path, samples: list[int]) -> None:
    lines = "".join(json.dumps({"n": number}) + "\n" + "\n" * (number % 2) for number in samples)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


@pytest.fixture(params=["tar", "jsonl", "jsonl.gz"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    numbers = itertools.count()
    for shard, size in enumerate(SIZES):
        samples = list(itertools.islice(numbers, size))
        path = tmp_path / f"shard-{shard:03d}.{request.param}"
        (write_tar if request.param == "tar" else write_lines)(path, samples)
    return str(tmp_path / f"*.{request.param}")


def number_of(sample: Any) -> int:
    return int(sample["txt"]) if "txt" in sample else sample["n"]


def with_noise(sample: Any) -> tuple[int, float, float]:
    return number_of(sample), random.random(), float(torch.rand(()))


def made(files: str, **options: Any) -> Any:
    return reft.data.stream(files, 4, **{"decode": with_noise, "collate_fn": list, "seed": 5} | options)


def numbers(batches: Any) -> list[int]:
    return [sample[0] for batch in batches for sample in batch]


@pytest.mark.parametrize("lanes", [1, 4])
def test_every_sample_of_every_shard_once(files: str, lanes: int) -> None:
    one = made(files, lanes=lanes, shuffle=True, block=3)
    orders = [numbers(one) for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(sum(SIZES)))] * 2
    assert orders[0] != orders[1]
    assert numbers(made(files)) == list(range(sum(SIZES)))


@pytest.mark.integration
def test_p8_workers_and_resumptions_give_the_undisturbed_bits(files: str) -> None:
    options: dict[str, Any] = {"lanes": 3, "shuffle": True, "block": 4}
    one, wanted, states = made(files, **options), [], []
    for batch in itertools.chain(one, one):
        wanted.append(batch)
        states.append(one.state_dict())
    assert list(itertools.chain(*[made(files, num_workers=3, **options)])) == wanted[: len(one)]
    for stop in (0, 4, 8, 9, 12):
        for workers in (0, 3):
            again = made(files, num_workers=workers, **options)
            again.load_state_dict(states[stop])
            assert [b for _ in range(again.epoch, 2) for b in again] == wanted[stop + 1 :]


def test_p8_the_rest_of_an_epoch_is_dealt_out_to_other_degrees(files: str) -> None:
    state, seen = None, []
    for degree, micro_batches in ((4, 1), (3, 1), (4, 0), (2, 9)):
        ranks = [
            made(files, lanes=2, shuffle=True, dp_rank=rank, dp_size=degree, name=f"rank {rank}")
            for rank in range(degree)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
            seen += numbers(itertools.islice(one, micro_batches))
        state = ranks[0].state_dict()
    assert sorted(seen) == list(range(sum(SIZES)))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(lambda counts: sum(counts) >= 6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)
def test_an_order_of_a_stream_holds_every_sample_once(
    counts: list[int], lanes: int, block: int, dp: int, shuffle: bool
) -> None:
    names = [f"{n}.tar" for n in range(len(counts))]
    order = StreamOrder(names, counts, seed=1, shuffle=shuffle, lanes=lanes, block=block)
    size = sum(counts)
    for epoch in (0, 1):
        found = order.part(epoch * size, size, slice(None))
        assert Counter(found) == Counter((epoch, sample) for sample in range(size))
    # Across the end of an epoch, and dealt out: the same samples as position by position.
    deal, at, dealt = Deal(size, 2, dp, False), JobPosition(), []
    while count := deal.next(at):
        for rank in range(dp):
            dealt += order.part(at.consumed, count, deal.part(count, rank))
        at = deal.behind(at)
    assert Counter(dealt) == Counter(order.part(0, at.consumed, slice(None)))
    straddling = order.part(size - 2, 4, slice(None))
    assert Counter(straddling) == Counter(
        order.part(size - 2, 2, slice(None)) + order.part(size, 2, slice(None))
    )


def test_with_a_lane_for_each_replica_a_shard_is_read_by_one() -> None:
    counts = [12] * 8
    names = [f"{n}.tar" for n in range(8)]
    order = StreamOrder(names, counts, seed=1, shuffle=True, lanes=4, block=3)
    for dp in (1, 2, 4):
        deal, at = Deal(96, 8 // dp, dp, True), JobPosition()
        readers: dict[int, set[int]] = {}
        while count := deal.next(at):
            for rank in range(dp):
                for _, sample in order.part(at.consumed, count, deal.part(count, rank)):
                    readers.setdefault(sample // 12, set()).add(rank)
            at = deal.behind(at)
        assert all(len(ranks) == 1 for ranks in readers.values())


@pytest.mark.process
def test_what_the_trainer_has_open_is_not_its_workers(tmp_path: Path) -> None:
    """More than is read at once: files that are forked share their offsets."""
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"n": number, "text": "x" * 400}) + "\n" for number in range(2000)))
    one = made(str(path), num_workers=2)
    assert one.dataset[0][0] == 0
    assert numbers(one) == list(range(2000))


def test_a_position_is_a_shard_and_an_offset() -> None:
    order = StreamOrder(["a.tar", "b.tar"], [3, 4], seed=1, shuffle=False, lanes=1, block=1)
    assert [order.where(at) for at in (0, 2, 3, 6, 7)] == [
        *(("a.tar", 0), ("a.tar", 2), ("b.tar", 0), ("b.tar", 3), ("a.tar", 0)),
    ]


def test_of_the_shards_before_the_position_nothing_is_opened(
    files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(files)
    state = {**one.state_dict(), "consumed": sum(SIZES[:4]) + 3}
    opened: list[str] = []
    for kind in (shards_module.TarShard, shards_module.LinesShard):
        begin = kind.__init__
        monkeypatch.setattr(
            kind, "__init__", lambda self, path, *a, b=begin: opened.append(path.stem) or b(self, path, *a)
        )
    one.load_state_dict(state)
    assert numbers(one) == list(range(sum(SIZES[:4]) + 3, sum(SIZES)))
    assert [name.split(".")[0] for name in opened] == ["shard-004", "shard-005"]


def test_what_was_counted_is_kept_and_counted_anew_where_a_shard_has_changed(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Path] = []
    monkeypatch.setattr(
        shards_module, "count_samples", lambda path: counted.append(path) or count_samples(path)
    )
    index = tmp_path / "index.json"
    state = made(files, index=index).state_dict()
    assert len(counted) == len(SIZES)
    made(files, index=index).load_state_dict(state)
    assert len(counted) == len(SIZES)
    last = sorted(tmp_path.glob("shard-*"))[-1]
    (write_tar if last.suffix == ".tar" else write_lines)(last, list(range(100, 150)))
    with pytest.raises(reft.ConfigError, match="samples 34"):
        made(files, index=index).load_state_dict(state)
    assert counted[len(SIZES) :] == [last]


def test_a_shard_that_was_written_anew_with_the_same_size_is_counted_anew(tmp_path: Path) -> None:
    """Tars are filled up to 10,240 bytes."""
    shard, index = tmp_path / "a.tar", tmp_path / "index.json"
    write_tar(shard, [0, 1])
    size = shard.stat().st_size
    assert len(made(str(shard), index=index).dataset) == 2
    write_tar(shard, [0, 1, 2])
    assert shard.stat().st_size == size
    assert len(made(str(shard), index=index).dataset) == 3


@pytest.mark.parametrize("now", [1, 3])
def test_a_tar_that_changes_after_it_was_counted_is_refused_when_it_is_opened(
    tmp_path: Path, now: int
) -> None:
    shard = tmp_path / "a.tar"
    write_tar(shard, [0, 1])
    loader = reft.data.stream(str(shard), batch_size=1, collate_fn=list)
    write_tar(shard, list(range(now)))
    with pytest.raises(reft.ConfigError, match=rf"holds {now} samples; 2 were counted"):
        list(loader)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"n": 1}\n' * 99)[:-12])
    (tmp_path / "b.tar").write_bytes(b"no tar")
    (tmp_path / "c.tar.gz").touch()
    for paths, said in (
        ("*.no", "no shard"),
        ("a.*", "cannot be read"),
        ("b.tar", "cannot be read"),
        ("c.*", "decompress it"),
    ):
        with pytest.raises(reft.ConfigError, match=said):
            reft.data.stream(tmp_path / paths)
    with pytest.raises(reft.ConfigError, match="is no file"):
        reft.data.stream([tmp_path / "d.tar"])
