"""What snapshots cost on a GPU: one stage of a Llama-2 pipeline, replayed with the true timing of
1F1B.

Real forward, backward and optimizer kernels; where the stage would wait for its neighbours, its
stream waits as long. Every round takes one step with each way of saving, in random order, and
compares it with the round's step without one:

- blocking: the training thread copies everything before the step begins;
- host: a thread copies, tensor by tensor, with ordinary blocking copies into ordinary memory, on
  the stream that it finds: what CheckFreq and TorchSnapshot do;
- host_device: everything is queued on a side stream at once, straight into the pinned arena;
- has: the same engine, but each chunk waits for its bubble, what is left runs beside computation.

Before the rounds steps run freely with ``has``: nothing waits for a commit, the host is ahead of
the device, as in a job. Every row is shown on standard error when it is measured.

Copied are the bytes that one of ``--dp`` replicas keeps: its shard of the state and a copy of its
neighbour's. Each way is checked once, byte by byte. Waits keep their full length whatever happened
before them, so no delay is hidden; checksums and commit, which take host time only, are not part of
it. A shape that does not fit gets fewer layers, and the result says so.

``--self-test`` runs all of it with a tiny shape, on the CPU or, with ``--device sim``, on the
simulated device of the tests; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import MIB, Scratch, progress, scratch
from replay_savers import NONE, HostSaver, NoSaver, Version, make_plan
from replay_stage import (
    BYTES_PER_PARAMETER,
    GpuDevice,
    HostDevice,
    Place,
    Replay,
    SimulatedDevice,
    Stage,
    StageTimes,
    copy_rate,
    measure_times,
)
from replay_worker import WARM_UP_STEPS, FreeSaver, Production, WorkerSaver
from results import estimate, machine, plan_text

from examples.llama.model_config import LlamaConfig, load_model
from reft.config import Variant
from reft.errors import OutOfMemoryError
from reft.memory.files import free_bytes
from reft.snapshot.device_engine import copy_engine_for

GOAL_OVERHEAD = 0.01
GOAL_LINK = 0.9
LAYER_FRACTIONS = (1.0, 0.75, 0.5, 0.25)
LINK_BYTES = 2**30
ARENAS = 2
SHM_RESERVE = 1.1
CHECK_STEPS = 20


# --- measuring ------------------------------------------------------------------------------------


def fitting_stage(
    options: argparse.Namespace, config: LlamaConfig, place: Place, device: HostDevice
) -> tuple[Stage, StageTimes, int]:
    """The stage with as many layers as fit, its times, and the layers that were wanted.

    Raises:
        SystemExit: not even the smallest share of the layers fits.
    """
    wanted = max(1, config.layers // place.stages)
    for layers in dict.fromkeys(max(1, int(wanted * fraction)) for fraction in LAYER_FRACTIONS):
        try:
            stage = Stage(config, layers, place, options.micro_batch, device.device)
            _check_host_memory(options, stage)
            times = measure_times(stage, device, options.trials)
            # The most activations that are alive at once.
            alive = range(min(place.micro_batches, place.stages - place.stage_id))
            for number in alive:
                stage.forward(number)
            for number in alive:
                stage.backward(number)
            return stage, times, wanted
        except (torch.cuda.OutOfMemoryError, OutOfMemoryError) as error:
            progress(
                f"{config.name}: {layers} of {wanted} layers do not fit: "
                f"{str(error).splitlines()[0]}"
            )
        # Not in the handler: the error's traceback holds the tensors.
        stage = None
        device.free_unused()
    raise SystemExit(
        f"{config.name}: not even {layers} of {wanted} layers fit; lower --seq or --micro-batch, "
        "raise --pp or --dp, or give a larger --shm"
    )


def _check_host_memory(options: argparse.Namespace, stage: Stage) -> None:
    version = stage.parameters * BYTES_PER_PARAMETER * (1 + options.copies) / options.dp
    # Arenas; on the host also what a version is compared with and, if it is measured, the copy of
    # "host".
    others = 1 + ("host" in options.variants)
    for wanted, free in (
        (ARENAS * version, free_bytes(options.shm)),
        ((ARENAS + others) * version, psutil.virtual_memory().available),
    ):
        if wanted * SHM_RESERVE > free:
            raise OutOfMemoryError(f"{wanted / MIB:.0f} MiB of snapshot, {free / MIB:.0f} free")


def run_rounds(
    replay: Replay, savers: Sequence[NoSaver], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Steps and rates of every saver, one step of each per round, in random order."""
    found: dict[str, dict[str, list[float]]] = {s.name: {"secs": [], "rates": []} for s in savers}
    order = np.random.default_rng(0)
    for number in range(rounds + 1):
        for index in order.permutation(len(savers)):
            saver = savers[index]
            secs = replay.step(saver)
            progress(
                f"round {number}: {saver.name} {secs:.4f} s, {(saver.rate() or 0.0) / 1e9:.1f} GB/s"
            )
            if not number:
                continue  # a warm-up round
            found[saver.name]["secs"].append(secs)
            rate = saver.rate()
            if rate is not None:
                found[saver.name]["rates"].append(rate)
    return found


def run_freely(
    replay: Replay, production: Production, steps: int, rounds: int = 3
) -> dict[str, Any]:
    """Steps in a row with a version each, as a job makes them, against as many without."""
    alone, secs, committed, causes = [], [], 0, set[str]()
    for number in range(rounds):
        alone.append(replay.run(NoSaver(), steps))
        free = FreeSaver(production, Variant.HAS)
        secs.append(replay.run(free, steps))
        committed += free.committed()
        causes |= {str(r.given_up) for r in free.requests if r.given_up}
        progress(
            f"free round {number}: {alone[-1]:.4f} s alone, {secs[-1]:.4f} s with a version "
            "every step"
        )
    return {
        "versions": rounds * steps,
        "committed": committed,
        "given_up": sorted(causes),
        "alone_secs": estimate(alone).to_json(),
        "step_secs": estimate(secs).to_json(),
        "overhead": estimate([s / a - 1 for s, a in zip(secs, alone, strict=True)]).to_json(),
        "copy_secs": production.stats.copy_secs.newest,
    }


def check(
    options: argparse.Namespace,
    replay: Replay,
    version: Version,
    production: Production,
    savers: Sequence[NoSaver],
) -> None:
    """Every way has to hold the state from which its step began.

    Raises:
        SystemExit: one does not.
    """
    for saver in savers:
        wrong = None
        # on a busy machine a version may be given up before it has begun
        for _ in range(CHECK_STEPS):
            replay.device.synchronize()
            sampled = options.samples and isinstance(saver, WorkerSaver)
            expected: Any = (
                production.sampled(version, options.samples) if sampled else version.expected()
            )
            replay.step(saver)
            wrong = saver.differing(expected)
            if wrong is not None or saver.name == NONE:
                break
        if saver.name == NONE:
            continue
        if wrong is None:
            raise SystemExit(f"{saver.name}: {CHECK_STEPS} versions in a row were given up")
        if wrong:
            raise SystemExit(
                f"{saver.name}: {wrong} of {version.nbytes} bytes are not those of the state"
            )


def measure_model(
    options: argparse.Namespace, config: LlamaConfig, device: HostDevice, space: Scratch
) -> dict[str, Any]:
    """Everything about one shape."""
    place = Place(options.pp, options.stage, options.micro_batches)
    stage, times, wanted = fitting_stage(options, config, place, device)
    estimator = times.estimator(place)
    windows = estimator.windows(place.stage_id)
    version = Version(stage.state(), options.dp, options.copies)
    engine = copy_engine_for(device.device)
    link_bytes = min(LINK_BYTES, 64 * version.nbytes)
    on_device = torch.zeros(link_bytes, dtype=torch.uint8, device=device.device)
    link = copy_rate(device, on_device, device.pinned(link_bytes), options.trials)
    hbm = 2 * copy_rate(device, on_device, torch.empty_like(on_device), options.trials)
    del on_device
    planned = options.planned_bytes_per_sec or GOAL_LINK * link
    plan = make_plan(version.nbytes, windows, planned, estimator.step_secs)
    replay = Replay(stage, device, windows)
    space_of_it = (place.stage_id, place.stages, place.micro_batches)
    production = Production(version, engine, space.shm, options.chunk_bytes, space_of_it)
    try:
        production.pacer.model.window = production.pacer.model.compute = planned
        with ThreadPoolExecutor(1, thread_name_prefix="saver") as thread:
            savers = make_savers(options, version, production, thread)
            progress(f"{config.name}: {len(savers)} ways, {options.rounds} rounds")
            for saver in (s for s in savers if s.name == Variant.HAS.value):
                for _ in range(WARM_UP_STEPS):
                    replay.step(saver)
            check(options, replay, version, production, savers)
            progress(f"{config.name}: the bytes of every way are those of the state")
            free = (
                run_freely(replay, production, options.free_steps) if options.free_steps else None
            )
            progress(f"{config.name}, free: {json.dumps(free)}")
            found = run_rounds(replay, savers, options.rounds)
        measured = production.pacer.plan
    finally:
        production.close()
    plain = found[NONE]["secs"]
    rates = {name: float(np.median(f["rates"])) for name, f in found.items() if f["rates"]}
    traffic = stage.hbm_bytes(options.micro_batches)
    return {
        "model": config.name,
        "layers": sum(1 for m in stage.model if type(m).__name__ == "LlamaBlock"),
        "layers_wanted": wanted,
        "parameters": stage.parameters,
        "state_bytes": stage.parameters * BYTES_PER_PARAMETER,
        "snapshot_bytes": version.nbytes,
        "arena_pinned": production.pinned,
        "forward_secs": times.forward_secs,
        "backward_secs": times.backward_secs,
        "optimizer_secs": times.optimizer_secs,
        "windows": [w.to_json() for w in windows],
        "idle_secs": sum(w.length_secs for w in windows),
        "plan": {"text": plan_text(plan), "tier_bytes": plan.tier_bytes},
        "measured_plan": None
        if measured is None
        else {"text": plan_text(measured), "tier_bytes": measured.tier_bytes},
        "given_up": {s.name: s.given_up for s in savers if isinstance(s, WorkerSaver)},
        "peak_device_bytes": device.peak_bytes(),
        "link_bytes_per_sec": link,
        "hbm_bytes_per_sec": hbm,
        "hbm_step_bytes_estimate": traffic,
        "hbm_snapshot_share": version.nbytes / (traffic + version.nbytes),
        "bytes_equal": True,
        "free": free,
        "variants": {
            name: {
                "step_secs": estimate(f["secs"]).to_json(),
                "overhead": estimate(
                    [(s - p) / p for s, p in zip(f["secs"], plain, strict=True)]
                ).to_json(),
                "versions": len(f["rates"]),
                "d2h_bytes_per_sec": rates.get(name),
                "d2h_of_link": rates[name] / link if name in rates else None,
            }
            for name, f in found.items()
        },
    }


def make_savers(
    options: argparse.Namespace,
    version: Version,
    production: Production,
    thread: ThreadPoolExecutor,
) -> list[NoSaver]:
    known: dict[str, Callable[[], NoSaver]] = {
        "host": lambda: HostSaver(version, thread),
        **{
            variant.value: lambda variant=variant: WorkerSaver(production, variant)
            for variant in (Variant.BLOCKING, Variant.HOST_DEVICE, Variant.HAS)
        },
    }
    return [NoSaver(), *(known[name]() for name in VARIANTS if name in options.variants)]


VARIANTS = ("blocking", "host", "host_device", "has")
DEVICES = {"cuda": GpuDevice, "sim": SimulatedDevice, "cpu": HostDevice}


# --- result ---------------------------------------------------------------------------------------


def goals(models: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What issue and paper ask for; each holds for all shapes or not at all."""
    reached: dict[str, bool] = {}
    variants = [m["variants"] for m in models]
    if all("has" in v for v in variants):
        reached["has_at_most_1_percent"] = all(
            v["has"]["overhead"]["ci95"][1] <= GOAL_OVERHEAD for v in variants
        )
    if all("host_device" in v for v in variants):
        reached["d2h_at_least_90_percent_of_the_link"] = all(
            (v["host_device"]["d2h_of_link"] or 0.0) >= GOAL_LINK for v in variants
        )
    return reached


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    device = result["device"]
    lines = [
        f"$ {result['command']}",
        f"{result['date']}, {device['name']}, torch {result['software']['torch']}"
        + ("; SELF TEST: the times mean nothing" if result["self_test"] else ""),
    ]
    for m in result["models"]:
        scaled = (
            "" if m["layers"] == m["layers_wanted"] else f" (SCALED DOWN from {m['layers_wanted']})"
        )
        lines += [
            "",
            f"{m['model']}, stage {result['stage']} of {result['pp']}, {m['layers']} "
            f"layers{scaled}, {m['parameters'] / 1e6:.0f}M parameters; a snapshot has "
            f"{m['snapshot_bytes'] / MIB:.0f} MiB",
            f"forward {m['forward_secs'] * 1e3:.2f} ms, backward {m['backward_secs'] * 1e3:.2f} "
            f"ms, optimizer {m['optimizer_secs'] * 1e3:.2f} ms, idle {m['idle_secs'] * 1e3:.1f} ms "
            f"of a step; link {m['link_bytes_per_sec'] / 1e9:.1f} GB/s; snapshots are "
            f"{m['hbm_snapshot_share']:.2%} of the estimated memory traffic",
            m["plan"]["text"],
            f"{'':14}{'step ms':>10}{'overhead, 95 % interval':>30}{'GB/s':>8}{'of link':>9}",
        ]
        for name, v in m["variants"].items():
            low, high = v["overhead"]["ci95"]
            interval = f"{v['overhead']['median']:8.2%}  [{low:.2%}, {high:.2%}]"
            rate, part = v["d2h_bytes_per_sec"], v["d2h_of_link"]
            lines.append(
                f"{name:14}{v['step_secs']['median'] * 1e3:10.2f}{interval:>30}"
                f"{'' if rate is None else format(rate / 1e9, '.1f'):>8}"
                f"{'' if part is None else format(part, '.0%'):>9}"
            )
        if free := m["free"]:
            low, high = free["overhead"]["ci95"]
            lines.append(
                f"running freely: {free['committed']} of {free['versions']} versions committed, "
                f"{free['overhead']['median']:.2%} [{low:.2%}, {high:.2%}] more a step"
            )
    lines += ["", *(f"{goal}: {met}" for goal, met in result["goals"].items())]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--models", nargs="+", default=["1.3b", "6.7b"], help="shapes (default 1.3b 6.7b)"
    )
    made.add_argument("--pp", type=int, default=4, help="pipeline stages (default 4)")
    made.add_argument("--stage", type=int, default=1, help="which one is replayed (default 1)")
    made.add_argument("--dp", type=int, default=4, help="replicas that share the state (default 4)")
    made.add_argument("--copies", type=int, default=1, help="neighbours' shards kept (default 1)")
    made.add_argument("--micro-batches", type=int, default=8, help="of a step (default 8)")
    made.add_argument(
        "--micro-batch", type=int, default=1, help="samples of a micro-batch (default 1)"
    )
    made.add_argument("--seq", type=int, help="tokens of a sample (default: the shape's)")
    made.add_argument(
        "--chunk-bytes", type=int, default=16 * MIB, help="unit of copying (default 16 MiB)"
    )
    made.add_argument(
        "--planned-bytes-per-sec",
        type=float,
        help="bandwidth to plan with (default: 90 %% of the link's)",
    )
    made.add_argument(
        "--rounds", type=int, default=40, help="measured steps of each way (default 40)"
    )
    made.add_argument(
        "--trials", type=int, default=10, help="of the single measurements (default 10)"
    )
    made.add_argument(
        "--samples", type=int, default=0, help="blocks of a version to compare (default all)"
    )
    made.add_argument(
        "--free-steps", type=int, default=12, help="in a row, without waiting for commits"
    )
    made.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(default all)"
    )
    made.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="tmpfs for the arena")
    made.add_argument("--disk", type=Path, default=Path("/tmp"), help=argparse.SUPPRESS)
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--device", choices=DEVICES, help="(default: cuda, which ROCm's are too)")
    made.add_argument("--self-test", action="store_true", help="tiny, by default on the CPU")
    options = made.parse_args(argv)
    options.device = options.device or ("cpu" if options.self_test else "cuda")
    options.self_test = options.self_test or options.device != "cuda"
    if options.self_test:
        options.models, options.seq, options.chunk_bytes = ["tiny"], 16, 64 * 1024
        options.rounds, options.trials = min(options.rounds, 3), 3
    if not 0 <= options.stage < options.pp or options.chunk_bytes % 64 or options.dp < 1:
        made.error("--stage must be below --pp, --chunk-bytes a multiple of 64, --dp at least 1")
    return options


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "has_gpu: torch finds no CUDA or ROCm device; run it where there is one, or with "
            "--self-test",
            file=sys.stderr,
        )
        return 2
    device = DEVICES[options.device]()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    if options.self_test:
        torch.set_num_threads(1)  # so small a shape gains nothing by more
    models = []
    with scratch(options) as space:
        for name in options.models:
            config = load_model(name)
            if options.seq:
                config = replace(config, seq_length=options.seq)
            models.append(measure_model(options, config, device, space))
    result = {
        "benchmark": "has_gpu",
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/has_gpu.py", *sys.argv[1:]]),
        "self_test": options.self_test,
        "machine": machine(),
        "device": device.facts(),
        "software": {"python": platform.python_version(), "torch": metadata.version("torch")},
        **{
            k: getattr(options, k)
            for k in ("pp", "stage", "dp", "copies", "micro_batches", "micro_batch")
        },
        "models": models,
        "goals": {} if options.self_test else goals(models),
    }
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
