"""A job goes on in another layout from what reft persisted, as a job of that layout would."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reft
from reft.config import PersistConfig, ReftConfig
from reft.engine.attach import find_session
from reft.grid import BlockKey, Degrees, Section
from reft.memory.arena import Arena
from reft.memory.job_secret import read_secret
from reft.memory.jobdir import JobDir
from reft.storage.offline import persist_offline
from reft.storage.persist import persist_label
from reft.storage.persister import committed_labels
from tests.engine.ranks import be_a_rank, commit_every_version, images_of, run_life
from tests.engine.test_resizing import to_universal
from tests.job.grid_job import BATCH, CONFIG, MICRO, RANK, Samples, engine_of
from tests.old_deepspeed import BF16_OPTIMIZER_IS_NEVER_MADE, GRADIENTS_ARE_NOT_AVERAGED

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {},
    "zero1-bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
if BF16_OPTIMIZER_IS_NEVER_MADE:
    del CASES["zero1-bf16"]
TIED = ("norm.weight", "norm.bias", "up.weight", "down.weight")
"""Parameters of the block that is the first and the last one."""
TIED_CASES = {f"tied-{case}": settings for case, settings in CASES.items()}
SETTINGS = CASES | TIED_CASES
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40}}}


def train(engine: Any, said: Any, until: int) -> list[str]:
    losses: list[str] = []
    said.tell = lambda ids, of_step: losses.append(" ".join(of_step))
    data, dp = Samples(), engine.grid.get_data_parallel_id()
    replicas = BATCH // MICRO // engine.gradient_accumulation_steps()
    means = []
    while engine.global_steps < until:
        first = BATCH * engine.global_steps
        micro = [
            range(first + MICRO * m, first + MICRO * (m + 1))
            for m in range(dp, BATCH // MICRO, replicas)
        ]
        batches = [
            torch.utils.data.default_collate([data[i % len(data)] for i in ids]) for ids in micro
        ]
        mean = float(engine.train_batch(iter(batches)))
        means.append(f"{mean.hex()} {engine.global_samples} {engine.get_lr()}")
    return [*means, *losses]


def said_of_parameters(engine: Any) -> dict[str, Any]:
    """Of an optimizer whose parameters are the model's own: each with its state, by name."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer = engine.optimizer
    return {
        "stage": engine.grid.get_stage_id(),
        "state": {
            names[id(p)]: (p.detach(), optimizer.state[p])
            for g in optimizer.param_groups
            for p in g["params"]
        },
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "engine": {n: vars(engine)[n] for n in ("global_steps", "global_samples")},
        "scheduler": engine.lr_scheduler.state_dict(),
    }


def set_parameters(engine: Any, said: list[dict[str, Any]], tp: int) -> None:
    """Cut each parameter, and what the optimizer has for it, for this rank."""
    slices: dict[str, list[Any]] = {}
    first: dict[str, int] = {}
    for rank in said:
        for name, value in rank["state"].items():
            if first.setdefault(name, rank["stage"]) == rank["stage"]:  # what is tied is on several
                slices.setdefault(name, []).append(value)
    part = RANK % tp

    def cut(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        if ".down." in name:
            return torch.cat(tensors, 1).chunk(tp, 1)[part].contiguous()
        if ".up." not in name:
            return tensors[0]
        both = zip(*(t.chunk(2) for t in tensors), strict=True)
        return torch.cat([torch.cat(matrix).chunk(tp)[part] for matrix in both])

    for name, p in engine.module.named_parameters():
        p.data.copy_(cut(name, [value for value, _ in slices[name]]))
        states = [state for _, state in slices[name]]
        engine.optimizer.state[p] = {
            key: value.clone() if value.dim() == 0 else cut(name, [state[key] for state in states])
            for key, value in states[0].items()
        }
    for live, group in zip(engine.optimizer.param_groups, said[0]["groups"], strict=True):
        live.update(group)
    vars(engine).update(said[0]["engine"])
    engine.lr_scheduler.load_state_dict(said[0]["scheduler"])
    vars(engine.lr_scheduler)["_last_lr"] = [g["lr"] for g in said[0]["groups"]]


def reference(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    universal = not case.endswith("zero0")
    more = {"checkpoint": {"load_universal": True}} if universal else {}
    config = {**CONFIG, **SCHEDULER, **SETTINGS[case], **more}
    engine, said = engine_of(config, life["pp"], life["tp"], tied=tied_in(case, life))
    if universal or life["was"] == [life["pp"], life["tp"]]:
        engine.load_checkpoint(
            str(root / case / "checkpoint"), tag=life["since"] + "-universal" * universal
        )
    else:
        files = sorted((root / case / f"said-{life['since']}").glob("*.pt"))
        told = [torch.load(file, weights_only=False) for file in files]
        set_parameters(engine, told, life["tp"])
    return {"losses": train(engine, said, life["until"]), "images": images_of(engine)}


def tied_in(case: str, life: dict[str, Any]) -> tuple[str, ...]:
    return life.get("tied", TIED) if case in TIED_CASES else ()


def with_reft(root: Path, case: str, life: dict[str, Any], **model: Any) -> tuple[Any, Any]:
    torch.manual_seed(100)
    world = dist.get_world_size()
    nodes = life["nodes"] or world
    node, local = divmod(RANK, world // nodes)
    os.environ |= {"REFT_NODE_ID": f"node{node}", "LOCAL_RANK": str(local)}
    of = "memory" if life["nodes"] else f"memory-{life['until']}"
    block = {"enabled": True, "job_id": case, "memory_dir": str(root / case / of / f"node{node}")}
    block |= {"tolerance": 0, "block_bytes": 4096} | life["block"]
    if not life["nodes"]:
        block["persist"] = {"dir": str(root / case / "persisted")}
    config = {**CONFIG, **SCHEDULER, **SETTINGS[case], "reft": block}
    engine, said = engine_of(
        config, life["pp"], life["tp"], **{"tied": tied_in(case, life), **model}
    )
    reft.attach(engine)
    return engine, said


def refused(root: Path, case: str, life: dict[str, Any], **model: Any) -> str:
    engine, _ = with_reft(root, case, life, **model)
    before = images_of(engine)
    with pytest.raises(reft.ReftError) as error:
        engine.load_checkpoint(str(root / "none"))
    assert images_of(engine) == before, "nothing was written"
    find_session(engine).close()
    dist.barrier()
    return str(error.value)


def digest_of_tied(engine: Any) -> dict[str, str]:
    """Of what this stage has of the block that is the first and the last one."""
    return {
        name: hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()
        for name, p in engine.module.tied_modules.named_parameters()
    }


def live(root: Path, case: str, life: dict[str, Any]) -> dict[str, Any]:
    told = refused(root, case, life, blocks=8) if life["since"] else ""
    engine, said = with_reft(root, case, life)
    path, _ = engine.load_checkpoint(str(root / "none"))
    session = find_session(engine)
    if session.context.config.recompute:
        commit_every_version(session)
    out = {
        "refused": told,
        "path": path,
        "begins": engine.global_steps,
        "losses": train(engine, said, life["until"]),
    }
    out["images"] = images_of(engine)
    out["tied"] = digest_of_tied(engine)
    session.flush(60)
    out["recomputed"] = session.stats.to_json()["recomputed"]
    session.close()
    dist.barrier()
    tag = f"step{life['until']}"
    engine.save_checkpoint(str(root / case / "checkpoint"), tag=tag)
    if case.endswith("zero0") and engine.grid.get_data_parallel_id() == 0:
        folder = root / case / f"said-{tag}"
        folder.mkdir(exist_ok=True)
        torch.save(
            said_of_parameters(engine), folder / f"{engine.grid.get_stage_id():02d}-{RANK:02d}.pt"
        )
    dist.barrier()
    if life["since"]:
        out["reference"] = reference(root, case, life)
    return out


def main(root: Path) -> dict[str, Any]:
    life = json.loads((root / "life.json").read_text())
    if life.get("refuse"):
        return {case: refused(root, case, life) for case in life["cases"]}
    return {case: live(root, case, life) for case in life["cases"]}


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
        found.append(
            run_life(
                Path(__file__),
                root,
                degrees.world_size,
                **now,
                cases=cases,
                nodes=nodes,
                block=block,
            )
        )
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


@pytest.mark.integration
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(REPLICAS[:2], id="fewer"),
        pytest.param(REPLICAS, id="two-stages", marks=pytest.mark.nightly),
        pytest.param(MANY_REPLICAS, id="one-stage", marks=pytest.mark.nightly),
    ],
)
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
@pytest.mark.parametrize(
    "layouts", [SMALLER, pytest.param(REPLICAS, marks=pytest.mark.nightly)], ids=str
)
def test_p3_so_it_does_from_memory(tmp_path: Path, layouts: tuple[Degrees, ...]) -> None:
    """No storage: two nodes keep what PP2xDP2 committed."""
    lives = lives_of(tmp_path, layouts, ["zero1"], nodes=2)
    are_of_their_layouts(lives, layouts, "zero1", "memory:zero1/")
    for rank in lives[1] if layouts is SMALLER else ():
        assert "the running job alone has 6.down.weight" in rank["zero1"]["refused"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("dp", "protection", "point"),
    [
        (2, "arc", "during_recovery"),
        pytest.param(3, "aec", "during_recovery", marks=pytest.mark.nightly),
        pytest.param(2, "arc", "before_commit", marks=pytest.mark.nightly),
    ],
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
            run_life(
                Path(__file__), tmp_path, dp, **SECOND, nodes=dp, block={**block, "faults": [fault]}
            )
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


@pytest.mark.integration
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
            run_life(Path(__file__), tmp_path, **SECOND, nodes=2, block={"tolerance": 1})
        shutil.rmtree(memory)
        shutil.copytree(tmp_path / "once", memory)

    lives = lives_of(tmp_path, SMALLER, ["zero1"], nodes=2, between=corrupted, tolerance=1)
    are_of_their_layouts(lives, SMALLER, "zero1", "memory:zero1/3")


def are_tied(lives: Lives, cases: Sequence[str]) -> None:
    """What is on the first stage and on the last is one and the same."""
    for ranks in lives:
        for case in cases:
            assert (
                len({json.dumps(rank[case]["tied"]) for rank in ranks if rank[case]["tied"]}) == 1
            )
            assert ranks[0][case]["tied"]
            assert ranks[-1][case]["tied"]


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("nodes", "path", "cases"),
    [
        pytest.param(2, "memory:", ["tied-zero1"], id="zero1"),
        pytest.param(0, "persisted", list(TIED_CASES), id="storage", marks=pytest.mark.nightly),
        pytest.param(2, "memory:", list(TIED_CASES), id="memory", marks=pytest.mark.nightly),
    ],
)
def test_p1_tied_modules_come_together_on_one_stage_and_part_again(
    tmp_path: Path, nodes: int, path: str, cases: list[str]
) -> None:
    lives = lives_of(tmp_path, TIED_LAYOUTS, cases, nodes=nodes)
    for case in cases:
        are_of_their_layouts(lives, TIED_LAYOUTS, case, path)
    are_tied(lives, cases)


@pytest.mark.integration
@pytest.mark.parametrize(
    "nodes",
    [pytest.param(0, id="storage", marks=pytest.mark.nightly), pytest.param(2, id="memory")],
)
def test_p7_what_a_tied_module_does_not_keep_equal_is_refused_by_name(
    tmp_path: Path, nodes: int
) -> None:
    """DeepSpeed adds up the gradients of what it is told is tied: the rest of such a module is another one on
    each stage."""
    for number, degrees in enumerate(TIED_LAYOUTS[:2], 1):
        until = number * STEPS
        now = {"until": until, "since": "", "pp": degrees.pp, "tp": 1, "refuse": number == 2}
        now |= {"cases": ["tied-zero1"], "tied": TIED[2:], "nodes": nodes, "block": {}}
        ranks = run_life(Path(__file__), tmp_path, degrees.world_size, **now)
        folders = () if nodes or number == 2 else sorted(tmp_path.glob(f"*/memory-{until}/node*/*"))
        if folders:
            persist_offline(folders, tmp_path / "tied-zero1" / "persisted")
    for rank in ranks:
        assert "tied_modules.ends.norm.weight" in rank["tied-zero1"]
        assert "tied_modules.ends.up.weight" not in rank["tied-zero1"]
        assert "tied_weight_attr" in rank["tied-zero1"]


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    BF16_OPTIMIZER_IS_NEVER_MADE or GRADIENTS_ARE_NOT_AVERAGED,
    reason="this DeepSpeed has no gradients for aor",
)
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(False, id="whole", marks=pytest.mark.nightly),
        pytest.param(True, id="node-lost"),
    ],
)
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
@pytest.mark.parametrize(
    ("nodes", "path"), [(0, "persisted"), (2, "memory:")], ids=["storage", "memory"]
)
def test_p1_so_it_does_through_many_layouts(tmp_path: Path, nodes: int, path: str) -> None:
    lives = lives_of(tmp_path, LONG, list(CASES), nodes=nodes)
    for case in CASES:
        are_of_their_layouts(lives, LONG, case, path)


if __name__ == "__main__":
    be_a_rank(main)
