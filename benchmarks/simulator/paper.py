"""``python -m benchmarks.simulator paper``: what the publications behind reft print, and what
follows here.

Every line says how its value came about: *simulated* (this package's model), *computed* (a formula
in reft, or bytes over published bandwidths), or *measured* (a file of docs/measurements, on CPUs).
Where the two differ, the last column says by which one assumption they would not. Nothing was
fitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reft.config import Variant
from reft.policy.rate import Rate, adapt, best_interval
from reft.protect.placement import losses_within, protected_survival
from reft.tools.planning.model import SHAPES, Training

from .published import comparisons, sending_share
from .settings import BYTES, MI250X, V100, experiments
from .variants import PROTECTIONS, Predictions, predict

GBIT = 1e9 / 8
_MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


class Line(NamedTuple):
    """A published value and ours. ``how``: simulated, computed or measured."""

    what: str
    published: str
    ours: str
    how: str
    why: str = ""


class Section(NamedTuple):
    title: str
    lines: Sequence[Line]


def report(groups: Sequence[tuple[str, Sequence[Predictions]]]) -> list[Section]:
    """``groups``: the jobs of :func:`~.settings.experiments`, predicted."""
    jobs = [job for _, of_group in groups for job in of_group]
    return [
        Section("REFT: interference (Fig. 1)", list(_interference(jobs))),
        Section("REFT: iterations (Fig. 9, 10, 13), weak scaling", list(_iterations(jobs))),
        Section("REFT: loading (Fig. 11, 12)", list(_loading())),
        Section("REFT: bytes and memory", list(_bytes())),
        Section("REFT: survival", list(_survival())),
        Section("REFT: samples/s and TFLOPs", list(_throughput(groups))),
        Section("CheckFreq", list(_checkfreq())),
        Section("Paddle", list(_elastic())),
    ]


def _interference(jobs: Sequence[Predictions]) -> Iterator[Line]:
    plain = predict(Training(SHAPES["1.3b"], V100, 1, 1, 512, 8))
    hybrid = [j for j in jobs if j.training.machine is V100 and j.training.devices == 512]
    waits = [j.of(Variant.BLOCKING, True).overhead for j in hybrid]
    whys = {
        Variant.HOST: "with a snapshot in every step; how often Fig. 1 takes one is not printed",
        Variant.HOST_DEVICE: "22 % if computation waits for the copies of hybrid parallelism "
        f"(`blocking`: {min(waits):.0%} to {max(waits):.0%}) and not for those of data parallelism",
    }
    for variant, why in whys.items():
        found = [j.of(variant, whole_stage=True).overhead for j in hybrid]
        yield Line(
            f"snapshots of unsharded state, `{variant}`: in data parallelism, in hybrid "
            "parallelism",
            "1 %, 22 %",
            f"{plain.of(variant, whole_stage=True).overhead:.1%}, {min(found):.1%} to "
            f"{max(found):.1%}",
            "simulated",
            why,
        )
    longest = max(hybrid, key=sending_share)
    rate = longest.training.machine.network_bytes_per_sec * sending_share(longest) / 6.63
    yield Line(
        "traffic of protection between nodes: its time over an iteration's",
        "up to 6.63",
        f"up to {sending_share(longest):.2f}",
        "simulated",
        f"6.63 with {rate / GBIT:.1f} Gbps for a node, not 100: the testbed's storage has 10",
    )


def _iterations(jobs: Sequence[Predictions]) -> Iterator[Line]:
    whys = {
        "iteration time that HAS saves against host,": "17 % lies between equal bytes and "
        "unsharded ones",
        "iteration time that HAS saves against "
        "host_device": "more than 17 % if computation waits for the "
        "other's copy of unsharded state, as in `blocking`",
    }
    for what, published, simulated in comparisons(jobs):
        if not what.startswith("traffic"):
            why = next((w for start, w in whys.items() if what.startswith(start)), "")
            yield Line(what.strip(), published, simulated, "simulated", why)
    twelve = predict(Training(SHAPES["34b"], MI250X, 8, 4, 16, 12))
    yield Line(
        "Frontier's iteration with 12 micro-batches in place of 8 (not printed)",
        "6.26 s",
        f"{twelve.step_secs:.2f} s",
        "simulated",
        "the number of micro-batches closes the gap to 4.65 s",
    )


def _loading() -> Iterator[Line]:
    """1.3B at TP4 PP4 DP8 on V100: four devices of a node hold one stage; eight nodes hold the
    same."""
    machine = V100
    device = BYTES[0].computed.full
    node = machine.devices_per_node * device
    to_device = device / machine.copy_bytes_per_sec
    network = machine.network_bytes_per_sec
    storage, gathered = node / (10 * GBIT), node * 7 / 8 / network
    yield Line(
        "from storage (NFS, 10 Gbps)",
        "9.27 s",
        f"{storage + to_device:.2f} s",
        "computed",
        f"9.27 s with {node / (9.27 - to_device) / GBIT:.1f} Gbps for a node, as when clients "
        "share a server",
    )
    parity = node / 8 / network  # one lost node's share more
    for name, published, secs in (("ARC", 0.84, gathered), ("AEC", 0.75, gathered + parity)):
        part = secs * network / (published - to_device) / GBIT
        yield Line(
            f"from memory, {name}",
            f"{published} s",
            f"{secs + to_device:.2f} s",
            "computed",
            f"{published} s with {part:.0f} of the network's 100 Gbps",
        )
    yield Line(
        "storage over memory",
        "up to 12.36",
        f"{(storage + to_device) / (gathered + to_device):.2f}",
        "computed",
        "as the line from storage",
    )
    restored = _measured("2026-11-22-restore-cpu.json")["ways"]
    lost = next(value for name, value in restored.items() if "lost" in name)
    slow = lost["times_faster_than_slow_storage"]["median"]
    yield Line(
        "a node lost: times faster than DeepSpeed's load from storage of 2.5 Gbps a rank",
        "up to 12.36",
        f"{slow:.1f}",
        "measured",
        "two ranks on one machine, verified and protected again",
    )


def _bytes() -> Iterator[Line]:
    for row in BYTES:
        for what, computed, derived in row.cells():
            if derived:
                name = (
                    f"{row.model} TP{row.tensor} PP{row.stages} DP{row.data}, GB a device: {what}"
                )
                yield Line(name, f"{derived} (derived)", computed, "computed")
    job = Training(SHAPES["2.7b"], V100, 4, 4, 8, 8)
    state = max(job.state_bytes(p) for p in range(4)) * V100.devices_per_node / 1e9
    arc = 2 * PROTECTIONS["arc"](8) * state
    yield Line(
        "2.7B: host memory of a node at the peak, GB (at most 3 times what it stores)",
        "30.45 with the loader's cache",
        f"{arc:.1f} in two versions",
        "computed",
        f"three times the node's unsharded {state:.1f} GB are {3 * state:.1f}",
    )


def _survival() -> Iterator[Line]:
    for nodes, size, q, published in (
        (16, 4, 0.97, ".9794 (none .6143)"),
        (64, 8, 0.99, ".9787 (none .5256)"),
        (64, 16, 0.999, ".99952"),
    ):
        ours = protected_survival(q, nodes, losses_within(size, 1))
        name = f"N={nodes}, D={size}, q={q}"
        yield Line(name, f"{published} (derived)", f"{ours:.5f} (none {q**nodes:.4f})", "computed")


def _throughput(groups: Sequence[tuple[str, Sequence[Predictions]]]) -> Iterator[Line]:
    for title, of_group in groups:
        for job in of_group:
            training = job.training
            samples = training.data * training.micro_batches * training.samples
            flops = 6 * training.shape.parameters * samples * training.shape.seq_length
            shown = []
            for variant in (Variant.NONE, Variant.HAS, Variant.HOST_DEVICE, Variant.HOST):
                secs = job.of(variant, variant in {Variant.HOST, Variant.HOST_DEVICE}).step_secs
                shown.append(
                    f"{variant} {samples / secs:.0f}/s {flops / secs / training.devices / 1e12:.1f}"
                )
            yield Line(
                f"{title}: {training.name}", "in figures only", "; ".join(shown), "simulated"
            )


def _checkfreq() -> Iterator[Line]:
    k, _ = best_interval(1.0, 1.0, 1.0, max_overhead=0.05)
    yield Line("k for To = Ti = 1, p = 5 %", "20", str(k), "computed")
    loaded = 7 * 0.05 * k  # a second job on the disk: 35 % at the same k
    rate = adapt(Rate(k), cost_secs=loaded, plain_secs=1.0, max_overhead=0.05)
    yield Line(
        "overhead with a second job on the disk: k as it was, k adapted",
        "35 %, 5 %",
        f"{loaded / k:.0%}, {loaded / rate.interval_steps:.0%} (k = {rate.interval_steps})",
        "computed",
    )
    parts = _measured("2026-11-22-frequency-real-cpu.json")["parts"]
    steps = [str(part["interval_steps"]["longest"]) for part in parts]
    costs = [f"{part['overhead']:.1%}" for part in parts]
    yield Line(
        "a real job, alone, beside a loaded disk, alone: overhead, k",
        "5 %, 35 % without and 5 % with adapting",
        f"{', '.join(costs)}; k {', '.join(steps)}; p = 3.5 %",
        "measured",
        "versions on storage leave from host memory: training was never held up by more than p",
    )


def _elastic() -> Iterator[Line]:
    ways = _measured("2026-11-22-mttr-cpu.json")["ways"]
    for what, way in (("a trainer", "trainer"), ("a node, with a spare", "node_spare")):
        mine, other = (
            ways[way][who]["failure_to_step_secs"]["median"] for who in ("reft", "torchrun")
        )
        yield Line(
            f"killed: {what}, to the next step",
            "384 GPUs: hot under 5 min, cold about 1 h",
            f"{mine:.1f} s, under torchrun {other:.1f} s",
            "measured",
            "four ranks on one machine; a cold start of a device is not part of it",
        )


def _measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_MEASUREMENTS / name).read_text())
    return found


def write_report(out: Path, micro_batches: int) -> Path:
    """Markdown, JSON and figures in a folder; returns the Markdown file."""
    from .figures import draw_overheads, draw_timeline

    out.mkdir(parents=True, exist_ok=True)
    groups = [(g.title, [predict(t) for t in g.trainings]) for g in experiments(micro_batches)]
    sections = report(groups)
    draw_overheads(groups, out / "overheads.png")
    frontier = predict(Training(SHAPES["34b"], MI250X, 8, 4, 16, micro_batches))
    draw_timeline(
        frontier.of(Variant.HAS).simulation, out / "step.png", f"{frontier.training.name}, HAS"
    )
    text = [
        "# What the publications print, and what follows here",
        "",
        *(__doc__ or "").splitlines()[2:],
    ]
    for title, lines in sections:
        text += [
            "",
            f"## {title}",
            "",
            "| what | published | here | how | why they differ |",
            "|---|---|---|---|---|",
        ]
        text += [f"| {' | '.join(line)} |" for line in lines]
    text += [
        "",
        "![Overheads, simulated](overheads.png)",
        "",
        "![A step with HAS, simulated](step.png)",
        "",
    ]
    (out / "paper.md").write_text("\n".join(text))
    found = [{"title": s.title, "lines": [line._asdict() for line in s.lines]} for s in sections]
    (out / "paper.json").write_text(json.dumps(found, indent=1))
    return out / "paper.md"
