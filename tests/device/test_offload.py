"""A whole job on the simulated device whose optimizer is offloaded: weights on the device, masters and moments on the
host, in processes that end and come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import reft
from reft.device import VENDORS
from reft.engine.attach import find_session
from reft.snapshot import device_engine
from reft.state.adapters import adapter_for
from tests.device.accelerator import BACKEND, use_simulated
from tests.device.simulated import NAME, SimulatedVendor, missing
from tests.engine.ranks import Mlp, run_life

WIDTH, STEPS, DIES = 64, 16, 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}

ZERO: dict[str, dict[str, Any]] = {
    "zero2": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 2**12,
        "allgather_bucket_size": 2**12,
    },
    "zero3": {"stage": 3, "reduce_bucket_size": 2**12},
    # One section has bytes on the device and on the host.
    "zero3_offloaded": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 2**12,
        "stage3_param_persistence_threshold": WIDTH,
    },
}


class Life:
    """An engine that has begun at step ``begins``, or continued there, and its ``losses`` from then on."""

    def __init__(self, zero: str, block: dict[str, Any] | None) -> None:
        model: nn.Module = Mlp(WIDTH, 2 * WIDTH)
        config = {**CONFIG, "zero_optimization": dict(ZERO[zero])}
        if block is not None:
            config["reft"] = block
        self.engine, *_ = reft.initialize(
            model=model,
            config=config,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        )
        if block is not None:
            reft.resume(self.engine)
        self.begins = int(self.engine.global_steps)
        self.losses: list[float] = []

    def train(self, until: int) -> None:
        losses = []
        while self.engine.global_steps < until:
            for micro in range(2):
                number = 100 * self.engine.global_steps + 10 * micro + self.engine.global_rank
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
                loss = self.engine(x.to(torch.bfloat16).to(NAME))
                self.engine.backward(loss)
                self.engine.step()
                losses.append(loss.detach())
        self.losses += [float(loss) for loss in losses]


class Overlaps:
    """Has copies from host memory wait until training has come to the optimizer step, and counts those that are made
    while the optimizer changes the masters.

    Attributes:
        near: set while copies may be made.
    """

    def __init__(self, engine: Any) -> None:
        self.copies = self.overlaps = 0
        self.near, self._steps = threading.Event(), threading.Event()
        self._copy, device_engine.copy_on_host = device_engine.copy_on_host, self._copy_late
        self._step, engine._take_model_step = engine._take_model_step, self._come_to_step
        inner = engine.optimizer.optimizer
        inner.register_step_pre_hook(self._change_masters)  # after the hook that holds training
        inner.register_step_post_hook(lambda *_: self._steps.clear())

    def _copy_late(self, *args: Any) -> None:
        self.near.wait(5)
        time.sleep(0.002)
        self.overlaps += self._steps.is_set()
        self._copy(*args)
        self.copies += 1

    def _come_to_step(self, *args: Any, **kwargs: Any) -> Any:
        self.near.set()
        try:
            return self._step(*args, **kwargs)
        finally:
            self.near.clear()

    def _change_masters(self, *_: Any) -> None:
        self._steps.set()
        time.sleep(0.02)


def live(root: Path) -> dict[str, Any]:
    life, rank = json.loads((root / "life.json").read_text()), int(os.environ["RANK"])
    sim = use_simulated()
    VENDORS[NAME] = SimulatedVendor(sim)
    device_engine.DeviceCopyEngine.least_chunk_bytes = 0
    deepspeed.init_distributed(BACKEND, verbose=False)
    os.environ["REFT_NODE_ID"] = f"node{rank}"
    if life["killed"] is not None:
        reference = Life(life["zero"], None)
        reference.train(STEPS)
        (root / f"reference-{rank}.json").write_text(json.dumps(reference.losses))
    memory = str(root / os.environ["REFT_NODE_ID"])
    block = {"enabled": True, "job_id": "sim", "memory_dir": memory}
    job = Life(life["zero"], {**block, "has": {"chunk_bytes": 4096}})
    overlaps, session = Overlaps(job.engine), find_session(job.engine)
    sim.settings.bytes_per_sec = 4e6
    for step in range(job.begins, job.begins + 3):
        job.train(step + 1)
        overlaps.near.set()
        assert session.flush(60)
        overlaps.near.clear()
    job.train(life["until"])
    if life["killed"] is not None:
        (root / f"killed-{rank}.json").write_text(json.dumps(job.losses))
        if life["killed"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        job.train(STEPS)
    images = adapter_for(job.engine).images()
    overlaps.near.set()
    session.close()
    return {
        "begins": job.begins,
        "losses": job.losses,
        "devices": [
            sorted({part.device.type for part in image.live(0, image.nbytes)}) for image in images
        ],
        "committed": session.stats.committed,
        "copies": overlaps.copies,
        "overlaps": overlaps.overlaps,
    }


@pytest.mark.integration
@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        ("zero2", [[NAME], ["cpu"]]),
        ("zero3", [[], [NAME]]),
        ("zero3_offloaded", [[], ["cpu", NAME]]),
    ],
)
def test_p2_p3_p8_a_job_with_state_on_device_and_host_continues_bit_for_bit(
    tmp_path: Path, zero: str, devices: list[list[str]]
) -> None:
    """One trainer is killed, and its node is lost."""
    if why := missing():
        pytest.skip(why)
    with pytest.raises(AssertionError):  # ranks that are killed, or lose a peer, fail
        run_life(Path(__file__), tmp_path, until=DIES, killed=1, zero=zero)
    shutil.rmtree(tmp_path / "node1")
    after = run_life(Path(__file__), tmp_path, until=STEPS, killed=None, zero=zero)
    for rank, life in enumerate(after):
        reference, killed = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            for name in ("reference", "killed")
        )
        assert killed == reference[: 2 * DIES]
        assert life["begins"] == after[0]["begins"] >= 3
        assert life["losses"] == reference[2 * life["begins"] :]
        assert life["devices"] == devices
        assert life["committed"] > 0
        assert (life["copies"] > 0) == (zero != "zero3")
        assert life["overlaps"] == 0, "masters were copied while the optimizer changed them"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = live(folder)
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
