"""One pipeline stage on one device, replayed with the timing of 1F1B: real forward, backward and
optimizer kernels of a Llama-2 shape, and waits in the compute stream where the stage would wait for
its neighbours.

The instruction stream is DeepSpeed's ``TrainSchedule``; the waits come from ``AnalyticEstimator``,
with the forward and backward times measured here. Sends, receives and reductions do nothing: their
bytes travel over other links than a snapshot's.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from replay_savers import NoSaver

from examples.llama.model import Embedding, FinalNorm, Head, LlamaBlock
from examples.llama.model_config import LlamaConfig
from examples.llama.tensor_parallel import TensorParallel, cross_entropy
from reft.pacing.schedule import AnalyticEstimator, Window

BYTES_PER_PARAMETER = 2 + 3 * 4
"""State of a parameter: bf16 weight, fp32 master and Adam's two moments."""

_CALIBRATION_CYCLES = 20_000_000
_BUSY_SECS = 1.0  # until a device runs at the clock of training


class HostDevice:
    """The CPU as a device whose stream is the training thread itself; waits are sleeps."""

    name = "cpu"
    device = torch.device("cpu")

    def wait(self, secs: float) -> None:
        """Let the compute stream idle."""
        time.sleep(secs)

    def stamp(self) -> Any:
        """This point of the compute stream, for :meth:`between`."""
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one stamp to another; waits for the device to get there."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory to which the link is fastest."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    @staticmethod
    def facts() -> dict[str, Any]:
        """What it is; asking begins nothing on it."""
        return {"name": "cpu", "memory_bytes": None}

    def peak_bytes(self) -> int | None:
        """Most memory of the device that tensors took so far."""
        return None

    def free_unused(self) -> None:
        """Give back what dead tensors held."""
        gc.collect()


class GpuDevice(HostDevice):
    """The current CUDA or ROCm device. A wait is a kernel that spins on one thread of one
    multiprocessor: it holds the stream and leaves memory, copy units and the rest of the device
    alone."""

    name = "rocm" if torch.version.hip else "cuda"
    module: Any = torch.cuda

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_sec = 1.0
        self._cycles_per_sec = self._calibrate()

    def _calibrate(self) -> float:
        """Cycles of ``_sleep`` per second, by the difference of two lengths: launching cancels out.

        Right after products: the clock of an idle device is several times slower than that of a
        busy one."""
        factor = torch.ones(4096, 4096, dtype=torch.bfloat16, device=self.device)

        def busy(products: int) -> None:
            for _ in range(products):
                factor @ factor

        def secs(cycles: int) -> float:
            busy(50)
            begin = self.stamp()
            torch.cuda._sleep(cycles)
            return self.between(begin, self.stamp())

        until = time.monotonic() + _BUSY_SECS
        while time.monotonic() < until:
            busy(50)
            self.synchronize()
        found = [secs(3 * _CALIBRATION_CYCLES) - secs(_CALIBRATION_CYCLES) for _ in range(5)]
        return 2 * _CALIBRATION_CYCLES / sorted(found)[2]

    def wait(self, secs: float) -> None:
        torch.cuda._sleep(int(secs * self._cycles_per_sec))

    def stamp(self) -> Any:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        self.module.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()

    @staticmethod
    def facts() -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "runtime": f"ROCm {torch.version.hip}"
            if torch.version.hip
            else f"CUDA {torch.version.cuda}",
        }

    def peak_bytes(self) -> int | None:
        return int(self.module.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"])

    def free_unused(self) -> None:
        super().free_unused()
        self.module.empty_cache()


class SimulatedDevice(GpuDevice):
    """That of the tests, by which the program is tried: its times mean nothing."""

    def __init__(self) -> None:
        from reft.device import VENDORS
        from tests.device.simulated import NAME, SimulatedVendor, simulated

        self.module = simulated()
        VENDORS[NAME] = SimulatedVendor(self.module)
        self.name, self.device = NAME, torch.device(NAME, 0)

    def wait(self, secs: float) -> None:
        self.module.sleep(secs)

    @staticmethod
    def facts() -> dict[str, Any]:
        return {"name": "simulated", "memory_bytes": None}


def copy_rate(device: HostDevice, source: torch.Tensor, target: torch.Tensor, trials: int) -> float:
    """Bytes per second of plain copies from ``source`` to ``target``: the best of ``trials``."""
    best = float("inf")
    for _ in range(trials + 1):
        begin = device.stamp()
        target.copy_(source, non_blocking=True)
        best = min(best, device.between(begin, device.stamp()))
    return source.numel() * source.element_size() / best


@dataclass(frozen=True)
class Place:
    """Where the stage stands in its pipeline."""

    stages: int
    stage_id: int
    micro_batches: int

    @property
    def first(self) -> bool:
        return self.stage_id == 0

    @property
    def last(self) -> bool:
        return self.stage_id == self.stages - 1


class Stage:
    """The layers, the optimizer and the activations of one stage.

    Args:
        config: shape of the model.
        layers: transformer blocks of this stage.
        place: position in the pipeline; decides whether embedding and head are here.
        micro_batch: samples of a micro-batch, each of ``config.seq_length`` tokens.
        device: where it runs; weights are bf16, masters and moments fp32.
    """

    def __init__(
        self, config: LlamaConfig, layers: int, place: Place, micro_batch: int, device: torch.device
    ) -> None:
        self.config, self.place = config, place
        tp = TensorParallel()
        with torch.device("meta"):
            modules: list[torch.nn.Module] = [Embedding(config, tp)] if place.first else []
            modules += [LlamaBlock(config, index, tp) for index in range(layers)]
            modules += [FinalNorm(config), Head(config, tp)] if place.last else []
            model = torch.nn.Sequential(*modules)
        self.model = model.to(torch.bfloat16).to_empty(device=device)
        if config.tied and place.first and place.last:
            self.model[-1].weight = self.model[0].weight
        self.weights = list(self.model.parameters())
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(0.0, config.init_std)
        self.masters = [weight.detach().float() for weight in self.weights]
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.grad = torch.zeros_like(weight)
            master.grad = torch.zeros_like(master)
        self.adam = torch.optim.AdamW(self.masters, lr=1e-6, fused=device.type == "cuda")
        shape = (micro_batch, config.seq_length)
        self._tokens = torch.randint(0, config.vocab_size, shape, device=device)
        self._hidden = torch.randn(
            (*shape, config.hidden_size), device=device, dtype=torch.bfloat16
        )
        self._output_grad = self._hidden * 1e-3
        self._running: dict[int, torch.Tensor] = {}

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    def forward(self, micro_batch: int) -> None:
        value = self._tokens if self.place.first else self._hidden.detach().requires_grad_()
        result = self.model(value)
        if self.place.last:
            result = cross_entropy(result, self._tokens, TensorParallel())
        self._running[micro_batch] = result

    def backward(self, micro_batch: int) -> None:
        result = self._running.pop(micro_batch)
        result.backward(None if self.place.last else self._output_grad)

    def optimize(self) -> None:
        """One step of mixed-precision Adam."""
        with torch.no_grad():
            torch._foreach_copy_([m.grad for m in self.masters], [w.grad for w in self.weights])
            self.adam.step()
            torch._foreach_copy_(self.weights, self.masters)
            torch._foreach_zero_([w.grad for w in self.weights])

    def state(self) -> list[tuple[str, torch.Tensor]]:
        """All state, by name. The optimizer must have stepped once."""
        named = [(f"model.{i}", w) for i, w in enumerate(self.weights)]
        named += [(f"master.{i}", m) for i, m in enumerate(self.masters)]
        for key in ("exp_avg", "exp_avg_sq"):
            named += [(f"{key}.{i}", self.adam.state[m][key]) for i, m in enumerate(self.masters)]
        return named

    def hbm_bytes(self, micro_batches: int) -> int:
        """Estimate of what a training step reads and writes in device memory.

        Per micro-batch and parameter 12 B: the weight is read forward and backward, its gradient is
        written, read and added. Per micro-batch, block, token and hidden unit 34 B of activations
        are written forward, and twice as many bytes move backward. Optimizer: 42 B a parameter.
        """
        samples, seq = self._tokens.shape
        blocks = sum(isinstance(m, LlamaBlock) for m in self.model)
        activations = 3 * 34 * samples * seq * self.config.hidden_size * blocks
        return micro_batches * (12 * self.parameters + activations) + 42 * self.parameters


class Replay:
    """Repeats the steps of one stage.

    Args:
        stage: what computes.
        device: where.
        windows: where the stage waits, and how long: always the full length, so that a delay is
            never hidden in the wait that follows.
    """

    def __init__(self, stage: Stage, device: HostDevice, windows: Sequence[Window]) -> None:
        self._stage = stage
        self.device = device
        self._waits = {w.position: w.length_secs for w in windows}
        self._stream = tuple(instructions(stage.place))
        self._names = tuple(name for name, _ in self._stream)

    def step(self, saver: NoSaver) -> float:
        """One training step. Returns its seconds, by the device's clock, from the end of the
        optimizer before to the end of its own."""
        device = self.device
        device.synchronize()
        begin = device.stamp()
        self._queue(saver)
        secs = device.between(begin, device.stamp())
        saver.finish()
        return secs

    def run(self, saver: NoSaver, steps: int) -> float:
        """Steps in a row, as a job makes them: the host is ahead of the device, nothing waits for a
        commit. Returns seconds of a step, by the device's clock."""
        self.device.synchronize()
        begin = self.device.stamp()
        for _ in range(steps):
            self._queue(saver)
            saver.finish()
        return self.device.between(begin, self.device.stamp()) / steps

    def _queue(self, saver: NoSaver) -> None:
        device = self.device
        saver.begin()
        for position, (name, micro_batch) in enumerate(self._stream):
            if position in self._waits:
                saver.window(position)
                device.wait(self._waits[position])
                saver.gap(position)
            if name == "ForwardPass":
                self._stage.forward(micro_batch)
            elif name == "BackwardPass":
                self._stage.backward(micro_batch)
            elif name == "OptimizerStep":
                saver.fence()
                self._stage.optimize()
                saver.stepped(self._names)


def instructions(place: Place) -> Iterator[tuple[str, int]]:
    """``(class name, micro-batch or -1)`` of every instruction of DeepSpeed's 1F1B schedule.
    Buffers are reused in turn, so micro-batches are counted here."""
    with redirect_stdout(sys.stderr):  # what it logs on import
        from deepspeed.runtime.pipe.schedule import TrainSchedule

    counted: dict[str, int] = {}
    for commands in TrainSchedule(place.micro_batches, place.stages, place.stage_id):
        for command in commands:
            name = type(command).__name__
            number = counted.get(name, 0)
            counted[name] = number + 1
            yield name, number if name in ("ForwardPass", "BackwardPass") else -1


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, and of the optimizer, on this stage: medians."""

    forward_secs: float
    backward_secs: float
    optimizer_secs: float

    def estimator(self, place: Place) -> AnalyticEstimator:
        return AnalyticEstimator(
            place.stages, place.micro_batches, self.forward_secs, self.backward_secs
        )


def measure_times(stage: Stage, device: HostDevice, trials: int) -> StageTimes:
    """Time the parts of a step, alone, after a warm-up."""

    def median(call: Callable[[], None]) -> float:
        found = []
        for _ in range(trials):
            begin = device.stamp()
            call()
            found.append(device.between(begin, device.stamp()))
        return sorted(found)[len(found) // 2]

    for _ in range(2):
        stage.forward(0)
        stage.backward(0)
        stage.optimize()
    forwards, backwards = [], []
    for _ in range(trials):
        begin = device.stamp()
        stage.forward(0)
        middle = device.stamp()
        stage.backward(0)
        end = device.stamp()
        forwards.append(device.between(begin, middle))
        backwards.append(device.between(middle, end))
    half = trials // 2
    return StageTimes(sorted(forwards)[half], sorted(backwards)[half], median(stage.optimize))
