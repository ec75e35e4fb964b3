"""``reft simulate``: pipelines and the cost of snapshots, from formulas instead of machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from reft.errors import ConfigError

if TYPE_CHECKING:
    from reft.tools.simulate.training import Training
    from reft.tools.simulate.variants import Predictions

simulate_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Predict, without a cluster: idle time of pipelines, overhead of snapshots.",
)

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
MicroBatches = Annotated[int, typer.Option(min=1, help="per pipeline and step")]


@simulate_app.command("has", short_help="overhead of a snapshot every step, for each way of taking it")
def has_command(
    *,
    model: Annotated[str | None, typer.Option(help="one job instead: a model of reft.tools.pretrain")] = None,
    machine: Annotated[str, typer.Option(help="with --model: v100, mi250x, a100 or h100")] = "h100",
    tp: Annotated[int, typer.Option("--tp", min=1, help="with --model: tensor-parallel degree")] = 8,
    pp: Annotated[int, typer.Option("--pp", min=1, help="with --model: pipeline stages")] = 4,
    dp: Annotated[int, typer.Option("--dp", min=1, help="with --model: data-parallel degree")] = 16,
    micro_batches: MicroBatches = 8,
    protection: Annotated[str, typer.Option(help="redundancy: none, arc or aec")] = "arc",
    schedule: Annotated[str, typer.Option(help="pipeline schedule; see 'reft simulate pipeline'")] = "1f1b",
    figure: Annotated[Path | None, typer.Option(help="draw the overheads (png, svg, pdf)")] = None,
    timeline: Annotated[Path | None, typer.Option(help="with --model: draw the step with HAS")] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted overhead of a snapshot every step, for each way of taking it, beside published values.

    Without --model: the settings of the REFT paper, and 4,096 and 16,384 H100.
    """
    from reft.tools.simulate.settings import Experiment, experiments
    from reft.tools.simulate.variants import predict

    if timeline is not None and model is None:
        raise ConfigError("--timeline draws one job: say which with --model")
    _check_figures(figure, timeline)
    make = _schedule(schedule)
    groups: Sequence[Experiment] = experiments(micro_batches)
    if model is not None:
        groups = (Experiment("given", (_training(model, machine, (tp, pp, dp), micro_batches),)),)
    results = [[predict(t, protection=protection, schedule=make) for t in g.trainings] for g in groups]
    if figure is not None:
        from reft.tools.simulate.figures import draw_overheads

        draw_overheads([(g.title, of) for g, of in zip(groups, results, strict=True)], figure)
    if timeline is not None:
        from reft.config import Variant
        from reft.tools.simulate.figures import draw_timeline

        draw_timeline(
            results[0][0].of(Variant.HAS).simulation, timeline, f"{results[0][0].training.name}, HAS"
        )
    if as_json:
        _print_json(_has_json(groups, results, protection, schedule))
        return
    console = _console()
    if model is not None:
        console.print(_variants_table(results[0][0]), markup=False)
    else:
        console.print(_bytes_table(), markup=False)
        for group, of_group in zip(groups, results, strict=True):
            console.print(_overheads_table(group.title, of_group), markup=False)
        console.print(_published_table([r for of_group in results for r in of_group]), markup=False)
    console.print(_READING, markup=False)
    for path in (figure, timeline):
        if path is not None:
            console.print(f"drawn: {path}", markup=False)


@simulate_app.command("pipeline", short_help="one step of a schedule: when each stage waits")
def pipeline_command(
    *,
    schedule: Annotated[
        str, typer.Option(help="1f1b, gpipe, interleaved, zero-bubble-h1 or dualpipe-v")
    ] = "1f1b",
    stages: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 4,
    micro_batches: MicroBatches = 8,
    forward_ms: Annotated[float, typer.Option(help="one micro-batch on one stage")] = 10.0,
    backward_ms: Annotated[float, typer.Option(help="likewise")] = 20.0,
    transfer_ms: Annotated[float, typer.Option(min=0, help="one activation to the next stage")] = 0.0,
    blocking_sends: Annotated[bool, typer.Option(help="a send holds its device until received")] = False,
    figure: Annotated[Path | None, typer.Option(help="draw the timeline (png, svg, pdf)")] = None,
    as_json: AsJson = False,
) -> None:
    """One training step of a pipeline schedule: when each stage waits, and for how long."""
    from dataclasses import replace

    from reft.tools.simulate.costs import Costs
    from reft.tools.simulate.pipeline import simulate

    for option, value in (("forward", forward_ms), ("backward", backward_ms), ("transfer", transfer_ms)):
        if not math.isfinite(value):
            raise ConfigError(f"--{option}-ms is {value:g}; write a number of milliseconds")
    _check_figures(figure)
    costs = replace(
        Costs.equal(stages, forward_ms / 1e3, backward_ms / 1e3),
        link_latency_secs=transfer_ms / 1e3,
        blocking_sends=blocking_sends,
    )
    simulation = simulate(_schedule(schedule)(stages, micro_batches), costs)
    if figure is not None:
        from reft.tools.simulate.figures import draw_timeline

        draw_timeline(simulation, figure)
    if as_json:
        _print_json(simulation.to_json())
    else:
        _console().print(str(simulation), markup=False, highlight=False, soft_wrap=True)


def _check_figures(*paths: Path | None) -> None:
    from reft.tools.drawing import check_figure

    for path in paths:
        if path is not None:
            check_figure("the figure", path)


def _schedule(name: str) -> Any:
    from reft.tools.simulate.schedules import SCHEDULES

    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _training(model: str, machine: str, degrees: tuple[int, int, int], micro_batches: int) -> Training:
    from reft.tools.simulate.hardware import MACHINES
    from reft.tools.simulate.training import Training

    if machine.lower() not in MACHINES:
        raise ConfigError(f"machine is {machine!r}; known: {', '.join(MACHINES)}")
    return Training(model, MACHINES[machine.lower()], *degrees, micro_batches)


# ---- output ----

_TIERS = {1: "in bubbles", 2: "beside computation", 3: "beside communication", 0: "device waits"}

_READING = """Simulated: none of these times was measured. Overhead is what a snapshot every step adds to the
iteration. The model and its limits: docs/simulation.md. More about one job: --model; everything: --json."""


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 190)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _has_json(groups: Any, results: Any, protection: str, schedule: str) -> dict[str, Any]:
    from reft.tools.simulate.published import comparisons
    from reft.tools.simulate.settings import BYTES

    flat = [r for of_group in results for r in of_group]
    return {
        "simulated": True,
        "protection": protection,
        "schedule": schedule,
        "bytes_per_device_gb": [
            {
                "model": row.model,
                "degrees": f"TP{row.tensor} PP{row.stages} DP{row.data}",
                **{what: {"computed": computed, "derived": text} for what, computed, text in row.cells()},
            }
            for row in BYTES
        ],
        "experiments": [
            {"title": group.title, "settings": [r.to_json() for r in of_group]}
            for group, of_group in zip(groups, results, strict=True)
        ],
        "published": [c._asdict() for c in comparisons(flat)],
    }


def _bytes_table() -> Table:
    from reft.tools.simulate.settings import BYTES

    table = Table(title="GB per device and snapshot: computed (derived by hand from the paper's formulas)")
    for column in ("model", "degrees"):
        table.add_column(column)
    for what, _, _ in BYTES[0].cells():
        table.add_column(what.replace("_", " "), justify="right")
    for row in BYTES:
        cells = [f"{computed} ({text})" if text else computed for _, computed, text in row.cells()]
        table.add_row(row.model, f"TP{row.tensor} PP{row.stages} DP{row.data}", *cells)
    return table


def _overheads_table(title: str, results: Sequence[Predictions]) -> Table:
    """One line for each job."""
    table = Table(title=f"{title}: overhead of a snapshot every step (simulated)")
    for column in ("model", "devices", "degrees"):
        table.add_column(column, no_wrap=True)
    for column in ("GB", "iteration s", "bubble", "of it\nHAS uses"):
        table.add_column(column, justify="right")
    shown = [p for p in results[0].variants if p.overhead or p.nbytes]
    for p in shown:
        table.add_column(p.name.replace(", ", ",\n"), justify="right")
    for r in results:
        t = r.training
        table.add_row(
            t.model + ("" if t.fits_device else " (too large)"),
            f"{t.devices:,} {t.machine.name}",
            f"TP{t.tensor} PP{t.stages} DP{t.data}",
            f"{r.variants[1].nbytes / 1e9:.3f}",
            f"{r.step_secs:.3f}",
            f"{r.bubble:.0%}",
            f"{r.bubble_use:.0%}",
            *(f"{r.of(p.variant, p.whole_stage).overhead:.1%}" for p in shown),
        )
    return table


def _variants_table(result: Predictions) -> Table:
    """One line for each variant of one job."""
    from reft.tools.simulate.copying import Tier

    too_large = "" if result.training.fits_device else "; its state exceeds the device's memory"
    table = Table(title=f"{result.training.name}, bubble {result.bubble:.0%}{too_large} (simulated)")
    table.add_column("variant")
    columns = ("GB", "iteration s", "overhead", "HAS better by", *_TIERS.values())
    for column in columns:
        table.add_column(column, justify="right")
    for p in result.variants:
        total = sum(p.copied_bytes.values())
        table.add_row(
            p.name,
            f"{p.nbytes / 1e9:.3f}",
            f"{p.step_secs:.4f}",
            f"{p.overhead:.2%}",
            f"{result.has_is_better_by(p):.2%}",
            *(f"{p.copied_bytes[Tier(tier)] / total:.0%}" if total else "" for tier in _TIERS),
        )
    return table


def _published_table(results: Sequence[Predictions]) -> Table:
    from reft.tools.simulate.published import comparisons

    table = Table("what", "published", "simulated", title="published values, and the same simulated")
    for comparison in comparisons(results):
        table.add_row(comparison.what, comparison.published, comparison.simulated)
    return table
