"""Which checkpoints on disk a load takes, in which order, and which rank reads which file; what saving survives (P3, P6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.config import PersistConfig, ReftConfig
from reft.engine.attach import find_session, save_with_host_state
from reft.engine.load_memory import write_and_hash
from reft.grid import Coordinate, Degrees, Section, VersionId
from reft.memory.arena import Arena
from reft.memory.header import checksum
from reft.memory.jobdir import JobDir
from reft.memory.stream import PlainHashingCopier, hashing_copier
from reft.relayout.checkpoint_files import CheckpointParts
from reft.relayout.element_map import WHOLE, Parameter, RankContents
from reft.state.catalogue import SectionImage
from reft.storage.load import DiskCheckpoint, find_on_disk, find_share, in_order
from reft.storage.persist import persist_label
from reft.storage.persisted import STORAGE_KEY, FileRecord
from tests.attack import test_p7_disk as disk_job
from tests.attack.jobs import asked, wait_for
from tests.engine.ranks import be_a_rank, run_ranks


class Stored(disk_job.Lives):
    def write(self, engine: Any, job: str = "one") -> None:
        step, nodes = int(engine.global_steps), [self.memory(job, rank).parent for rank in (0, 1)]

        find_session(engine).flush(60)  # type: ignore[union-attr]

        def committed() -> list[dict[str, Any]]:
            found = asked("inspect", nodes, job)["versions"]
            return [
                v for v in found if v["committed"] and v["whole_ranks"] == 2 and v["step"] == step
            ]

        wait_for(lambda: bool(committed()), f"a commit of step {step}")
        label = VersionId(committed()[0]["incarnation"], step)
        config = ReftConfig(enabled=True, persist=PersistConfig(dir=self.persist, keep=3))
        persist_label(JobDir.open(self.memory(job)), label, config)
        self.attack(lambda: None)

    def flip(self, step: int) -> None:
        def flip() -> None:
            path = self.persist / "one" / f"global_step{step}" / "pp0.dp1.tp0.arena"
            data = bytearray(path.read_bytes())
            with Arena.open(path, STORAGE_KEY) as arena:
                entries = arena.header().entries
                block = next(e for e in entries if e.key.section is Section.REPLICATED)
                data[data.index(bytes(arena.read_block(block))) + 99] ^= 4
            path.write_bytes(data)

        self.attack(flip)


def main(root: Path) -> dict[str, Any]:
    disk_job.Lives = Stored  # type: ignore[misc]
    lives = Stored(root, "stored")
    stored = str(lives.persist / "one")
    out: dict[str, Any] = {}
    losses = disk_job.first_life(lives)
    out["newest"] = disk_job.goes_on(lives, losses)
    with lives.life() as (engine, (out["memory"], _)):
        path, _ = engine.load_checkpoint(stored, tag="global_step4")
        out["back"] = [path.removeprefix(stored), engine.global_steps]
        out["equal"] = disk_job.train(engine, 10) == losses[4:]
        lives.flip(8)
        weights = [p.detach().clone() for p in engine.module.parameters()]
        for name, options in (
            ("damaged", {"tag": "global_step8"}),
            ("base", {"load_module_only": True}),
        ):
            try:
                engine.load_checkpoint(stored, **options)
            except OSError as error:
                out[name] = [type(error).__name__, str(error), engine.global_steps]
        out["untouched"] = all(map(torch.equal, weights, engine.module.parameters()))
    lives.lose_memory("one")
    with lives.life(load={"tag": None}) as (_, (out["older"], _)):
        pass
    lives.lose_memory("one")
    lives.flip(4)
    with lives.life() as (_, out["all_damaged"]):
        return out


def persisted(incarnation: int, step: int) -> DiskCheckpoint:
    return DiskCheckpoint(
        Path("/p"), f"global_step{step}", step, VersionId(incarnation, step), "job", {}
    )


def users(step: int, label: VersionId | None = None) -> DiskCheckpoint:
    return DiskCheckpoint(Path("/u"), f"global_step{step}", step, label, "job" if label else None)


def order(
    labelled: list[DiskCheckpoint], own: DiskCheckpoint | None = None
) -> tuple[list[str], int]:
    taken, left_out = in_order(labelled, own)
    return [f"{c.directory.name}{c.step}" for c in taken], len(left_out)


def test_checkpoints_are_tried_newest_first() -> None:
    assert order([persisted(1, 4), persisted(2, 12), persisted(1, 8)]) == (["p12", "p8", "p4"], 0)
    assert order([]) == ([], 0)
    assert order([], users(3)) == (["u3"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(6)) == (["p8", "u6", "p4"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(9)) == (["u9", "p8", "p4"], 0)
    assert order([persisted(1, 4), persisted(1, 8)], users(2)) == (["p8", "p4", "u2"], 0)
    assert order([persisted(2, 4), persisted(2, 6)], users(5, VersionId(2, 5))) == (
        ["p6", "u5", "p4"],
        0,
    )


def test_a_future_that_was_given_up_is_left_out() -> None:
    # Incarnation 2 went back to 4 and on to 6: what 1 had beyond is another future.
    assert order([persisted(1, 4), persisted(1, 8), persisted(2, 6)]) == (["p6", "p4"], 1)
    assert order([persisted(1, 8), persisted(2, 6)], users(9, VersionId(1, 9))) == (["p6"], 2)
    # A restart that went on from 8 gave nothing up.
    assert order([persisted(1, 8), persisted(2, 12)]) == (["p12", "p8"], 0)


def test_newer_than_memory() -> None:
    assert persisted(2, 4).newer_than(VersionId(1, 9))
    assert not persisted(1, 9).newer_than(VersionId(2, 4))
    assert not persisted(1, 9).newer_than(VersionId(1, 9))
    assert users(10).newer_than(VersionId(2, 9))
    assert not users(9).newer_than(VersionId(2, 9))


def test_every_file_is_read_by_one_rank() -> None:
    files = {f"file{i}": FileRecord(100 * (i % 7) + 1, i) for i in range(40)}
    shares = [find_share(files, rank, 6) for rank in range(6)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(f.nbytes for f in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 601
    assert find_share({}, 0, 2) == {}


@pytest.mark.integration
def test_p3_p5_versions_on_storage_are_recovered_as_those_in_memory(tmp_path: Path) -> None:
    """The newest, one by its tag from a job that trains, and none that is damaged: then nothing is written."""
    for r in run_ranks(Path(__file__), tmp_path):
        assert r["newest"] == {"step": 8, "client": r["newest"]["client"], "equal": True}
        assert r["memory"] == 10
        assert r["back"] == ["/global_step4", 4]
        assert r["equal"]
        kind, text, step = r["damaged"]
        assert (kind, "pp0.dp1.tp0.arena: replicated block" in text, step) == (
            "PersistError",
            True,
            10,
        )
        kind, text, step = r["base"]
        assert (kind, "write them with 'reft persist --from" in text, step) == (
            "PersistError",
            True,
            10,
        )
        assert r["untouched"]
        assert r["older"] == 4
        kind, text = r["all_damaged"]
        assert kind == "UnrecoverableError"
        assert text.count("every source is corrupt (pp0.dp1.tp0.arena on node") == 2


def test_p6_what_cannot_be_listed_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find_on_disk(tmp_path / "file", tmp_path / "file", "job").checkpoints == ()
    assert find_on_disk(None, tmp_path, "..").problems
    (tmp_path / "job" / "global_step4").mkdir(parents=True)
    (tmp_path / "job" / "global_step4" / "reft.json").write_text("{")
    for content in (b"{", b"\xff\xfe", b"[1]", b'{"format": null}'):
        (tmp_path / "job" / "global_step4" / "reft.json").write_bytes(content)
        found = find_on_disk(tmp_path / "nothing", tmp_path, "job")
        assert "is not a marker" in found.problems[0]


def test_p6_a_rank_whose_data_cannot_be_captured_has_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = mock.Mock(client_state=None)
    state.host_state.side_effect = TypeError("the data")
    call = {"save_dir": str(tmp_path), "tag": "mine"}
    saved = save_with_host_state(mock.Mock(), mock.Mock(), state, lambda **call: "saved", call)
    assert saved == "saved"
    assert "without random and data state: TypeError: the data" in caplog.text


@pytest.mark.parametrize(
    "stages",
    [
        [["0t", "1", "2"], ["3", "4t"]],
        [["0t"], ["1", "2", "3t"]],
        [["0t", "1", "2"], ["3t"]],
        [["0t"], ["1"], ["2t"]],
        [["0t", "1"], ["2", "3t"], ["4", "5t"]],
        [["0t", "1"], ["2t", "3"], ["4", "5t"]],
        [["0t", "1", "2", "3t"], ["4", "5t"]],
        [["0t", "1", "2"], ["3t", "4", "5t"]],
        [["0", "1t"], ["2t", "3"]],
    ],
    ids=lambda stages: "-".join(".".join(layers) for layers in stages),
)
def test_p3_what_is_not_tied_of_a_tied_module_is_the_own_stages(
    tmp_path: Path, stages: list[list[str]]
) -> None:
    """As PipelineModule writes them: a file per layer, a tied module's (t) under each of its layers."""
    held = {}
    for pp, layers in enumerate(stages):
        names = []
        for layer in layers:
            number, tied = int(layer.rstrip("t")), layer.endswith("t")
            names += ["tied_modules.embed.bias"] if tied else [f"{number}.weight"]
            content = {
                "bias" if tied else "weight": torch.full((2,), float(pp), dtype=torch.bfloat16)
            }
            torch.save(content, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
        parameters = tuple(Parameter(name, (2,), WHOLE) for name in dict.fromkeys(names))
        held[pp, 0] = RankContents(parameters, (), (), flat=True)
    tied = [int(layer[:-1]) for layers in stages for layer in layers if layer.endswith("t")]
    parts = CheckpointParts(tmp_path, Degrees(len(stages), 1, 1), held, {"embed": tied})
    for (pp, _), had in held.items():
        for part in had.parameters:
            assert parts.tensor(Coordinate(pp, 0, 0), f"model.{part.name}").tolist() == [pp] * 2, (
                pp,
                part,
            )


@pytest.mark.parametrize("make", [hashing_copier, PlainHashingCopier])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.data())
def test_p5_any_part_of_an_image_is_written_and_hashed(make, sizes, data) -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    image = SectionImage([(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
    start = data.draw(st.integers(0, image.nbytes))
    stop = data.draw(st.integers(start, image.nbytes))
    block = torch.randint(1, 256, (stop - start,), dtype=torch.uint8)
    parts = []
    image.write_from(start, block, lambda *pair: parts.append(pair))
    assert write_and_hash(parts, block, make()) == checksum(block.numpy().data)
    found = torch.empty_like(block)
    image.read_into(start, found)
    pads = torch.ones(image.nbytes, dtype=torch.bool)
    for offset, spec in zip(image.offsets, image.specs, strict=True):
        pads[offset : offset + spec.shape[0]] = False
    assert torch.equal(found, torch.where(pads[start:stop], 0, block))


if __name__ == "__main__":
    be_a_rank(main)
