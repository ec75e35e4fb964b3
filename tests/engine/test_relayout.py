"""A job goes on in another layout from what reft persisted, as a job of that layout would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reft.config import PersistConfig, ReftConfig
from reft.grid import BlockKey, Degrees, Section
from reft.memory.arena import Arena
from reft.memory.jobdir import JobDir, read_secret
from reft.recover.offline import persist_offline
from reft.storage.persist import persist_label
from reft.storage.persister import committed_labels
from tests.engine.ranks import run_life
from tests.engine.relayout_job import CASES, STEPS, TIED, TIED_CASES
from tests.engine.test_resizing import to_universal
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE, GRADIENTS_ARE_NOT_AVERAGED

JOB = Path(__file__).with_name("relayout_job.py")
SMALLER = Degrees(2, 2, 1), Degrees(1, 2, 1)
REPLICAS = (*(Degrees(*d) for d in ((2, 2, 1), (2, 1, 1), (2, 2, 1))),)
MANY_REPLICAS = (*(Degrees(*d) for d in ((1, 3, 1), (1, 2, 1), (1, 4, 1))),)
LONG = (*(Degrees(*d) for d in ((2, 2, 1), (1, 2, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2), (2, 1, 1))),)
"""Of every life."""
TIED_LAYOUTS = Degrees(2, 2, 1), Degrees(1, 2, 1), Degrees(2, 2, 1)
SECOND = {"until": 2 * STEPS, "since": f"step{STEPS}", "pp": 1, "tp": 1, "cases": ["zero1"]}
Lives = list[list[dict[str, Any]]]


def lives_of(
    root: Path,
    layouts: tuple[Degrees, ...],
    cases: Sequence[str],
    *,
    nodes: int = 0,
    between: Callable[[], object] = lambda: None,
    **block: Any,
) -> Lives:
    """Per life what every rank saw. ``nodes``: that keep the memory for the next life; 0: each life has nodes
    of its own, and its newest version goes to storage. ``between``: what happens between two lives.
    ``block``: more of reft's."""
    found, before, was = [], "", [0, 0]
    for number, degrees in enumerate(layouts, 1):
        until = number * STEPS
        now = {"until": until, "since": before, "pp": degrees.pp, "tp": degrees.tp, "was": was}
        found.append(run_life(JOB, root, degrees.world_size, **now, cases=cases, nodes=nodes, block=block))
        before, was = f"step{until}", [degrees.pp, degrees.tp]
        to_universal(root, before)
        for case in () if nodes else cases:
            folders = sorted((root / case / f"memory-{until}").glob("node*"))
            stored([node / case for node in folders], root / case / "persisted")
        between()
    return found


def stored(folders: Sequence[Path], directory: Path) -> None:
    """The newest version of these nodes, as their daemons write it."""
    (label,) = {max(committed_labels(JobDir.open(folder))) for folder in folders}
    config = ReftConfig(enabled=True, persist=PersistConfig(dir=directory))
    with ThreadPoolExecutor(len(folders)) as pool:
        list(pool.map(lambda folder: persist_label(JobDir.open(folder), label, config), folders))


def are_of_their_layouts(
    lives: Lives, layouts: tuple[Degrees, ...], case: str, path: str = "persisted"
) -> None:
    for number, (degrees, ranks) in enumerate(zip(layouts[1:], lives[1:], strict=True), 1):
        for rank in ranks:
            assert path in rank[case]["path"]
            assert rank[case]["begins"] == number * STEPS
            assert rank[case]["losses"] == rank[case]["reference"]["losses"], degrees
            assert rank[case]["images"] == rank[case]["reference"]["images"], degrees


@pytest.mark.nightly
@pytest.mark.parametrize("layouts", [REPLICAS, MANY_REPLICAS], ids=["two-stages", "one-stage"])
def test_p1_a_job_goes_on_with_other_replicas_that_each_have_the_whole_state(
    tmp_path: Path, layouts: tuple[Degrees, ...]
) -> None:
    """DeepSpeed loads its files itself there, and is what the job is compared with."""
    lives = lives_of(tmp_path, layouts, ["zero0"])
    are_of_their_layouts(lives, layouts, "zero0")
    for rank in lives[1]:
        assert "model.pp0.tp0: was" in rank["zero0"]["refused"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layouts", "case"),
    [
        (SMALLER, "zero1"),
        (MANY_REPLICAS[:2], "zero1"),
        pytest.param(SMALLER, "zero0", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_p1_a_job_goes_on_in_another_layout_from_what_its_daemons_wrote(
    tmp_path: Path, layouts: tuple[Degrees, ...], case: str
) -> None:
    are_of_their_layouts(lives_of(tmp_path, layouts, [case]), layouts, case)


@pytest.mark.integration
@pytest.mark.parametrize("layouts", [SMALLER, pytest.param(REPLICAS, marks=pytest.mark.nightly)], ids=str)
def test_p3_so_it_does_from_memory(tmp_path: Path, layouts: tuple[Degrees, ...]) -> None:
    """No storage: two nodes keep what PP2xDP2 committed."""
    lives = lives_of(tmp_path, layouts, ["zero1"], nodes=2)
    are_of_their_layouts(lives, layouts, "zero1", "memory:zero1/")
    for rank in lives[1] if layouts is SMALLER else ():
        assert "the running job alone has 6.down.weight" in rank["zero1"]["refused"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dp", "protection", "point"),
    [(2, "arc", "during_recovery"), (3, "aec", "during_recovery"), (2, "arc", "before_commit")],
)
def test_p3_a_node_lost_and_a_rank_killed_while_it_takes_up_cost_nothing(
    tmp_path: Path, dp: int, protection: str, point: str
) -> None:
    """Its peer has copies of what the node had, or a parity; the next start has all of it again."""
    lost = tmp_path / "zero1" / "memory" / "node1"
    block = {"tolerance": 1, "protection": protection}
    fault = {"point": point, "step": STEPS, "dp": 1, "incarnation": None}

    def killed() -> None:
        if (tmp_path / "killed").exists():
            return
        (tmp_path / "killed").touch()
        shutil.rmtree(lost)
        with pytest.raises(
            AssertionError, match=r"a peer died|PeerLostError|Connection (closed|reset) by peer"
        ):
            run_life(JOB, tmp_path, dp, **SECOND, nodes=dp, block={**block, "faults": [fault]})
        decoded = list(lost.parent.glob("node*/zero1/decoded-*"))
        assert bool(decoded) == (protection == "aec")

    layouts = Degrees(2, dp, 1), Degrees(1, dp, 1)
    lives = lives_of(tmp_path, layouts, ["zero1"], nodes=dp, between=killed, **block)
    are_of_their_layouts(lives, layouts, "zero1", "memory:zero1/3")


def flip(job: Path) -> None:
    """One bit of what every arena of a node has of the second replica's shard."""
    paths = sorted(job.glob("*.arena"))
    assert paths
    for path in paths:
        with Arena.open(path, read_secret(job), writable=True) as arena:
            header = arena.header()
            entry = next(e for e in header.entries if e.key == BlockKey(Section.REPLICATED, 1, 0))
            arena.data[entry.arena_offset + entry.nbytes // 2] ^= 0x40


@pytest.mark.nightly
def test_p5_corrupt_memory_is_replaced_or_refused(tmp_path: Path) -> None:
    """What is corrupt on one node comes from its peer; on both, the start is refused and the memory kept."""
    memory, aside = tmp_path / "zero1" / "memory", tmp_path / "aside"

    def corrupted() -> None:
        if aside.exists():
            return
        shutil.copytree(memory, aside)
        for node in ("node1", "node0"):
            flip(memory / node / "zero1")
            if node == "node1":
                shutil.copytree(memory, tmp_path / "once")
        with pytest.raises(AssertionError, match="not whole"):
            run_life(JOB, tmp_path, **SECOND, nodes=2, block={"tolerance": 1})
        shutil.rmtree(memory)
        shutil.copytree(tmp_path / "once", memory)

    lives = lives_of(tmp_path, SMALLER, ["zero1"], nodes=2, between=corrupted, tolerance=1)
    are_of_their_layouts(lives, SMALLER, "zero1", "memory:zero1/3")


def are_tied(lives: Lives) -> None:
    """What is on the first stage and on the last is one and the same."""
    for ranks in lives:
        for case in TIED_CASES:
            assert len({json.dumps(rank[case]["tied"]) for rank in ranks if rank[case]["tied"]}) == 1
            assert ranks[0][case]["tied"]
            assert ranks[-1][case]["tied"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nodes", "path"), [(0, "persisted"), (2, "memory:")], ids=["storage", "memory"])
def test_p1_tied_modules_come_together_on_one_stage_and_part_again(
    tmp_path: Path, nodes: int, path: str
) -> None:
    lives = lives_of(tmp_path, TIED_LAYOUTS, list(TIED_CASES), nodes=nodes)
    for case in TIED_CASES:
        are_of_their_layouts(lives, TIED_LAYOUTS, case, path)
    are_tied(lives)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [0, 2], ids=["storage", "memory"])
def test_p7_what_a_tied_module_does_not_keep_equal_is_refused_by_name(tmp_path: Path, nodes: int) -> None:
    """DeepSpeed adds up the gradients of what it is told is tied: the rest of such a module is another one on
    each stage."""
    for number, degrees in enumerate(TIED_LAYOUTS[:2], 1):
        until = number * STEPS
        now = {"until": until, "since": "", "pp": degrees.pp, "tp": 1, "refuse": number == 2}
        now |= {"cases": ["tied-zero1"], "tied": TIED[2:], "nodes": nodes, "block": {}}
        ranks = run_life(JOB, tmp_path, degrees.world_size, **now)
        folders = () if nodes or number == 2 else sorted(tmp_path.glob(f"*/memory-{until}/node*/*"))
        if folders:
            persist_offline(folders, tmp_path / "tied-zero1" / "persisted")
    for rank in ranks:
        assert "tied_modules.ends.norm.weight" in rank["tied-zero1"]
        assert "tied_modules.ends.up.weight" not in rank["tied-zero1"]
        assert "tied_weight_attr" in rank["tied-zero1"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    BF16_OPTIMIZER_IS_NEVER_MADE or GRADIENTS_ARE_NOT_AVERAGED,
    reason="this DeepSpeed has no gradients for aor",
)
@pytest.mark.parametrize("lost", [False, True], ids=["whole", "node-lost"])
def test_p3_recomputed_partitions_go_to_another_layout(tmp_path: Path, lost: bool) -> None:
    """What a lost node had of the optimizer is what its peer had recomputed."""
    case, block = "zero1-bf16", {"tolerance": 1, "protection": {"scheme": "arc", "recompute": True}}

    def lose() -> None:
        if lost:
            shutil.rmtree(tmp_path / case / "memory" / "node1")

    lives = lives_of(tmp_path, SMALLER, [case], nodes=2, between=lose, **block)
    are_of_their_layouts(lives, SMALLER, case, "memory:")
    for ranks in lives:
        for rank in ranks:
            assert rank[case]["recomputed"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nodes", "path"), [(0, "persisted"), (2, "memory:")], ids=["storage", "memory"])
def test_p1_so_it_does_through_many_layouts(tmp_path: Path, nodes: int, path: str) -> None:
    lives = lives_of(tmp_path, LONG, list(CASES), nodes=nodes)
    for case in CASES:
        are_of_their_layouts(lives, LONG, case, path)
