"""A whole job on the simulated device: DeepSpeed's pipeline, reft around it, in processes that end and come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import reft
from reft.device import VENDORS
from reft.engine.attach import find_session
from reft.protect.backend import backend_for
from reft.snapshot.device_engine import DeviceCopyEngine
from tests.device.accelerator import BACKEND, use_simulated
from tests.device.simulated import NAME, SimulatedVendor, missing
from tests.engine.ranks import mse, run_life

WIDTH, STEPS = 64, 24
COMMITTED = 3
"""Steps of a life that wait for their versions; later the host runs ahead of all."""
SLOW = 4e5  # bytes per second of the link


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def batches(number: int) -> Any:
    while True:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(
            torch.bfloat16
        )
        number += 1
        yield x, x.roll(1, 0)


class Life:
    """An engine that has begun at step ``begins``, or gone on there, and its ``losses`` from then on."""

    def __init__(self, block: dict[str, Any] | None, stages: int) -> None:
        torch.manual_seed(1234)
        model = PipelineModule(
            [LayerSpec(Block) for _ in range(4)],
            num_stages=stages,
            loss_fn=mse,
            partition_method="uniform",
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {
                "stage": 1,
                "reduce_bucket_size": 2**16,
                "allgather_bucket_size": 2**16,
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        if block is not None:
            config["reft"] = block
        self.engine, *_ = reft.initialize(
            model=model, config=config, optimizer=lambda groups: reft.ExactAdam(groups, lr=1e-2)
        )
        if block is not None:
            reft.resume(self.engine)
        self.begins = int(self.engine.global_steps)
        self.losses: list[float] = []
        self._data = batches(1000 * self.engine.grid.get_data_parallel_rank() + 4 * self.begins)

    def train(self, until: int) -> None:
        losses = [
            self.engine.train_batch(self._data) for _ in range(self.engine.global_steps, until)
        ]
        self.losses += [float(loss) for loss in losses]


def live(root: Path) -> dict[str, Any]:
    life, rank = json.loads((root / "life.json").read_text()), int(os.environ["RANK"])
    sim = use_simulated()
    VENDORS[NAME] = vendor = SimulatedVendor(sim)
    vendor.has_cupy = True
    DeviceCopyEngine.least_chunk_bytes = 0
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    sys.modules["cupy"] = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))  # type: ignore[assignment]
    deepspeed.init_distributed(BACKEND, verbose=False)
    os.environ["REFT_NODE_ID"] = f"node{rank}"
    if life["killed"] is not None:
        reference = Life(None, life["stages"])
        reference.train(STEPS)
        (root / f"reference-{rank}.json").write_text(json.dumps(reference.losses))
    memory = str(root / os.environ["REFT_NODE_ID"])
    job = Life(
        {
            **{"enabled": True, "job_id": "sim", "memory_dir": memory, "protection": "aec+aor"},
            "has": {"overflow": "staging", "compute_share": 0.0, "chunk_bytes": 4096},
        },
        life["stages"],
    )
    session, committed = find_session(job.engine), list[int]()
    on_commit = session.worker.callbacks.on_commit
    session.worker.callbacks.on_commit = lambda label: (
        committed.append(label.step),
        on_commit(label),
    )
    sim.settings.bytes_per_sec, sim.settings.delay_secs = SLOW, 0.0005
    for step in range(job.begins, job.begins + COMMITTED):
        job.train(step + 1)
        assert session.flush(60)
    job.train(life["until"])
    if life["killed"] is not None:
        (root / f"killed-{rank}.json").write_text(
            json.dumps({"losses": job.losses, "committed": committed})
        )
        if life["killed"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        job.train(STEPS)
    synchronised = sim.settings.synchronised
    sim.settings.bytes_per_sec = 1e8  # a drain at the slow rate may take longer than the grace
    session.close()
    return {
        **{name: session.stats.to_json()[name] for name in ("staged", "recomputed")},
        **{"begins": job.begins, "losses": job.losses, "committed": committed},
        **{
            "engine": session.copying.engine.name,
            "encodes": backend_for(torch.empty(1, device=NAME)).name,
        },
        **{"synchronised": synchronised, "own_streams": sim.settings.own_streams},
    }


DIES = 10


@pytest.mark.process
@pytest.mark.parametrize(
    ("stages", "world"),
    [(1, 2), pytest.param(2, 4, marks=pytest.mark.integration)],
    ids=["DP2", "PP2xDP2"],
)
def test_p1_p3_p8_a_pipeline_on_a_device_goes_on_from_its_peers_memory_bit_for_bit(
    tmp_path: Path, stages: int, world: int
) -> None:
    """Parities and partitions recomputed, the rest staged; one trainer is killed, and its node is lost."""
    if why := missing():
        pytest.skip(why)
    lost = world - 1
    with pytest.raises(AssertionError):  # ranks that are killed, or lose a peer, fail
        run_life(Path(__file__), tmp_path, world, stages=stages, until=DIES, killed=lost)
    shutil.rmtree(tmp_path / f"node{lost}")
    after = run_life(Path(__file__), tmp_path, world, stages=stages, until=STEPS, killed=None)
    for rank, life in enumerate(after):
        reference, killed = (read(tmp_path, name, rank) for name in ("reference", "killed"))
        assert killed["losses"] == reference[:DIES]
        assert life["begins"] == after[0]["begins"] >= killed["committed"][-1] > 0
        assert life["losses"] == reference[life["begins"] :]
        assert min(life["recomputed"], len(life["committed"])) > 0
        assert (life["engine"], life["encodes"], life["synchronised"]) == ("sim", "torch", 0)
        assert life["own_streams"] == 2, "copies take streams outside of torch's pool"
    # Which ranks stage depends on their windows, and on how far the host is ahead.
    assert sum(life["staged"] for life in after) > 0


def read(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = live(folder)
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
