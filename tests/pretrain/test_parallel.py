"""One model, every layout: the same initial weights, losses and updates.

All layouts train one after the other in a single launch of four processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.llama import train
from examples.llama.model_config import degrees_for
from examples.llama.options import parse
from examples.llama.tensor_parallel import RowParallelLinear, sharded_parameters
from reft.tools.planning.job import JobLayout
from tests.pretrain.conftest import run_bounded

pytestmark = pytest.mark.nightly


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in module.named_parameters()}


def shard_dims(module: torch.nn.Module) -> dict[str, int]:
    rows = {m.weight for m in module.modules() if isinstance(m, RowParallelLinear)}
    sharded = sharded_parameters(module)
    return {n: int(p in rows) for n, p in module.named_parameters() if p in sharded}


def run(case: dict, out: Path) -> None:
    options = parse(case["argv"])
    config = options.model_config()
    layout: JobLayout = train.choose_layout(
        options, degrees_for(dist.get_world_size(), options.pp, options.tp, options.dp)
    )
    samples = train.training_samples(options, config)
    engine = train.build_engine(options, config, layout)
    data = train.micro_batch_iterator(engine, options, config, layout, samples)
    result = {
        "at": layout.coordinate(dist.get_rank()),
        "initial": weights(engine.module),
        "shards": shard_dims(engine.module),
        "losses": [float(engine.train_batch(data)) for _ in range(case["steps"])],
        "final": weights(engine.module),
    }
    torch.save(result, out / f"{case['name']}-{dist.get_rank()}.pt")


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    train.import_deepspeed(verbose=False)
    options = parse(cases[0]["argv"])
    samples = train.training_samples(options, options.model_config())
    train.init_processes(options, samples)
    for case in cases:
        try:
            run(case, out)
        except Exception:
            print(f"rank {os.environ['RANK']}: case {case['name']} failed", file=sys.stderr)
            raise
    dist.barrier()
    dist.destroy_process_group()


WORKER = Path(__file__)
STEPS = 3
SHAPE = ["--layers", "3", "--hidden", "32", "--ffn", "48", "--seq", "16", "--seed", "11"]
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "scheduler": None,
    "gradient_clipping": 0.2,
}

# name: (micro-batch, micro-batches, options); plain gradient descent shows any error of the clipped norm.
LAYOUTS: dict[str, tuple[int, int, list[str]]] = {
    "dp4": (1, 2, []),
    "pp2-dp2": (2, 2, ["--pp", "2"]),
    "tp2-dp2": (2, 2, ["--tp", "2"]),
    "pp2-tp2": (2, 4, ["--pp", "2", "--tp", "2"]),
    "model-first": (2, 4, ["--pp", "2", "--tp", "2", "--rank-order", "model-data-pipe"]),
    "recomputed": (2, 2, ["--pp", "2", "--checkpoint-activations"]),
    "tied-dp4": (1, 2, ["--tied"]),
    "tied-pp2-tp2": (2, 4, ["--tied", "--pp", "2", "--tp", "2"]),
}


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, text_folder: Path
) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "sgd.json").write_text(json.dumps(SGD))
    base = [
        *SHAPE,
        "--data",
        str(text_folder),
        "--cache-dir",
        str(folder / "cache"),
        "--steps",
        str(STEPS),
    ]
    sgd = [*base, "--deepspeed-config", str(folder / "sgd.json")]
    cases = [
        {
            "name": name,
            "argv": [*sgd, "--micro-batch", str(micro), "--micro-batches", str(count), *options],
            "steps": STEPS,
        }
        for name, (micro, count, options) in LAYOUTS.items()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--standalone",
    ]
    command += [str(WORKER), str(folder / "cases.json"), str(folder)]
    done = run_bounded(command, 240, folder)
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        case["name"]: [
            torch.load(folder / f"{case['name']}-{r}.pt", weights_only=False) for r in range(4)
        ]
        for case in cases
    } | {"folder": folder}  # type: ignore[dict-item]


def whole(ranks: list[dict[str, Any]], when: str) -> dict[str, torch.Tensor]:
    """Full weights of replica 0, tensor slices put together."""
    slices: dict[str, dict[int, torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for rank in ranks:
        if rank["at"].dp == 0:
            dims |= rank["shards"]
            for name, value in rank[when].items():
                slices.setdefault(name, {})[rank["at"].tp] = value
    return {
        name: torch.cat([parts[t] for t in sorted(parts)], dim=dims[name])
        if name in dims
        else parts[0]
        for name, parts in slices.items()
    }


def test_initial_weights_are_the_same_in_every_layout(results) -> None:
    for tied in (False, True):
        names = [name for name in LAYOUTS if name.startswith("tied") == tied]
        first = whole(results[names[0]], "initial")
        for name in names[1:]:
            other = whole(results[name], "initial")
            assert first.keys() == other.keys()
            assert all(torch.equal(first[key], other[key]) for key in first), name


@pytest.mark.parametrize("first", ["dp4", "tied-dp4"])
def test_losses_and_clipped_updates_are_those_without_a_pipeline_and_slices(
    results: dict[str, list[dict[str, Any]]], first: str
) -> None:
    wanted = whole(results[first], "final")
    for name in LAYOUTS:
        if name.startswith("tied") == first.startswith("tied"):
            assert results[name][0]["losses"] == pytest.approx(
                results[first][0]["losses"], rel=4e-6
            ), name
            for key, value in whole(results[name], "final").items():
                torch.testing.assert_close(
                    value, wanted[key], rtol=1e-4, atol=6e-6, msg=f"{name} {key}"
                )


def test_what_should_be_equal_is_bit_identical(results) -> None:
    for name in LAYOUTS:
        ranks = results[name]
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), name
        for a in ranks:
            for b in ranks:
                slices = a["shards"].keys() if a["at"].tp != b["at"].tp else set()
                for key in a["final"].keys() & b["final"].keys() - slices:
                    # Replicas, norms on all tensor ranks, tied weights on both stages.
                    assert torch.equal(a["final"][key], b["final"][key]), (
                        name,
                        key,
                        a["at"],
                        b["at"],
                    )


def test_the_order_of_ranks_and_recomputation_change_no_bit(results) -> None:
    for one, other in (("pp2-dp2", "recomputed"), ("pp2-tp2", "model-first")):
        assert results[one][0]["losses"] == results[other][0]["losses"]
        before, after = whole(results[one], "final"), whole(results[other], "final")
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert [r["at"].tp for r in results["model-first"]] == [0, 0, 1, 1]


if __name__ == "__main__":
    main()
