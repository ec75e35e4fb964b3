"""``python -m benchmarks.simulator``: pipelines and the cost of snapshots, from formulas."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from reft.errors import ConfigError, ReftError

if TYPE_CHECKING:
    from reft.tools.planning.model import Training

simulate_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predict, without a cluster: idle time of pipelines, overhead of snapshots.",
)

AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
MicroBatches = Annotated[int, typer.Option(min=1, help="per pipeline and step")]


@simulate_app.command(
    "has", short_help="overhead of a snapshot every step, for each way of taking it"
)
def has_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="one job instead: the Llama-2 1.3b to 34b")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="with --model: v100, frontier, a100 or h100")
    ] = "h100",
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="with --model: tensor-parallel degree")
    ] = 8,
    pp: Annotated[int, typer.Option("--pp", min=1, help="with --model: pipeline stages")] = 4,
    dp: Annotated[int, typer.Option("--dp", min=1, help="with --model: data-parallel degree")] = 16,
    micro_batches: MicroBatches = 8,
    protection: Annotated[str, typer.Option(help="redundancy: none, arc or aec")] = "arc",
    schedule: Annotated[
        str, typer.Option(help="pipeline schedule; see the command pipeline")
    ] = "1f1b",
    figure: Annotated[Path | None, typer.Option(help="draw the overheads (png, svg, pdf)")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="with --model: draw the step with HAS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predicted overhead of a snapshot every step, for each way of taking it.

    Without --model: the settings of the REFT paper, and 4,096 and 16,384 H100.
    """
    from .settings import Experiment, experiments
    from .variants import predict

    if timeline is not None and model is None:
        raise ConfigError("--timeline draws one job: say which with --model")
    _check_figures(figure, timeline)
    make = _schedule(schedule)
    groups: Sequence[Experiment] = experiments(micro_batches)
    if model is not None:
        groups = (Experiment("given", (_training(model, cluster, (tp, pp, dp), micro_batches),)),)
    results = [
        [predict(t, protection=protection, schedule=make) for t in g.trainings] for g in groups
    ]
    if figure is not None:
        from .figures import draw_overheads

        draw_overheads([(g.title, of) for g, of in zip(groups, results, strict=True)], figure)
    if timeline is not None:
        from reft.config import Variant

        from .figures import draw_timeline

        draw_timeline(
            results[0][0].of(Variant.HAS).simulation,
            timeline,
            f"{results[0][0].training.name}, HAS",
        )
    if as_json:
        _print_json(_has_json(groups, results, protection, schedule))
        return
    from .display import show_experiments, show_job

    console = Console()
    if model is not None:
        show_job(results[0][0], console)
    else:
        show_experiments(groups, results, console)
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
    forward_ms: Annotated[float, typer.Option(min=0, help="one micro-batch on one stage")] = 10.0,
    backward_ms: Annotated[float, typer.Option(min=0, help="likewise")] = 20.0,
    transfer_ms: Annotated[
        float, typer.Option(min=0, help="one activation to the next stage")
    ] = 0.0,
    blocking_sends: Annotated[
        bool, typer.Option(help="a send holds its device until received")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="draw the timeline (png, svg, pdf)")] = None,
    as_json: AsJson = False,
) -> None:
    """One training step of a pipeline schedule: when each stage waits, and for how long."""
    from dataclasses import replace

    from .costs import Costs
    from .pipeline import simulate

    for option, value in (
        ("forward", forward_ms),
        ("backward", backward_ms),
        ("transfer", transfer_ms),
    ):
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
        from .figures import draw_timeline

        draw_timeline(simulation, figure)
    if as_json:
        _print_json(simulation.to_json())
    else:
        from .display import show_pipeline

        show_pipeline(simulation, Console())


@simulate_app.command("paper", short_help="every printed value next to ours, as one page")
def paper_command(
    *,
    out: Annotated[
        Path, typer.Option(help="folder for papers.md, and papers/ with figures and rows.json")
    ] = Path("build/paper"),
) -> None:
    """What REFT, CheckFreq, DLRover and Paddle print, next to what is simulated, computed and
    measured here. ``--out docs`` writes the documentation's page."""
    from .paper import write_report

    typer.echo(write_report(out))


def _check_figures(*paths: Path | None) -> None:
    from reft.profile.figure import check_figure

    for path in paths:
        if path is not None:
            check_figure("the figure", path)


def _schedule(name: str) -> Any:
    from .schedules import SCHEDULES

    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _training(
    model: str, cluster: str, degrees: tuple[int, int, int], micro_batches: int
) -> Training:
    from reft.tools.planning.model import Training, load_shape

    from .settings import MACHINES

    if cluster.lower() not in MACHINES:
        raise ConfigError(f"--cluster is {cluster!r}; known: {', '.join(MACHINES)}")
    return Training(load_shape(model, None)[0], MACHINES[cluster.lower()], *degrees, micro_batches)


# ---- output ----


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _has_json(groups: Any, results: Any, protection: str, schedule: str) -> dict[str, Any]:
    from .settings import BYTES

    return {
        "simulated": True,
        "protection": protection,
        "schedule": schedule,
        "bytes_per_device_gb": [
            {
                "model": row.model,
                "degrees": f"TP{row.tensor} PP{row.stages} DP{row.data}",
                **{
                    what: {"computed": computed, "derived": text}
                    for what, computed, text in row.cells()
                },
            }
            for row in BYTES
        ],
        "experiments": [
            {"title": group.title, "settings": [r.to_json() for r in of_group]}
            for group, of_group in zip(groups, results, strict=True)
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as of ``reft``: 0 well, 2 wrong use."""
    try:
        simulate_app(args=argv, prog_name="python -m benchmarks.simulator")
    except SystemExit as stop:  # usage errors have been shown
        return stop.code if isinstance(stop.code, int) else 0
    except (ReftError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
