"""``reft plan``: predicts memory, traffic, overhead and tolerance of a job before it is started.

The tables fit a terminal of 80 columns; ``--json`` prints all results.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from reft.checks.preflight import block_findings, find_part, holds_block_alone
from reft.config import read_object
from reft.errors import ConfigError
from reft.findings import Severity
from reft.naming import BLOCK_NAME
from reft.policy.choose import GIB
from reft.profile.result import ProfileError, ProfileResult
from reft.tools.planning.job import LayoutOptions, PlannedJob, plan_job
from reft.tools.planning.model import load_cluster
from reft.tools.planning.plan import ESTIMATED, duration, make_plan
from reft.tools.planning.savings import START_SECS, CheckpointHabits, draw_survival

_SCHEMES_SHOWN = 12
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _count(text: str) -> float:
    """Parse a number such as "7B" or "7e9"."""
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return scale * float(text if scale == 1.0 else text[:-1])
    except ValueError:
        raise ConfigError(f"--parameters is {text!r}; write a number such as 7B or 7e9") from None


def plan_command(
    *,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="the job's DeepSpeed JSON, with or without a reft block; for Megatron-LM the file "
            "of its block",
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="v100, frontier, a100, h100, or a JSON file")
    ] = "h100",
    model: Annotated[
        str | None,
        typer.Option(
            help="llama2-1.3b, -2.7b, -6.7b, -13b, -34b, -70b, "
            "or the config.json of a Hugging Face model (Llama, Mistral, Qwen)"
        ),
    ] = None,
    pp: Annotated[int, typer.Option("--pp", min=1, help="pipeline stages")] = 1,
    dp: Annotated[
        int | None, typer.Option("--dp", min=1, help="replicas; default: from --nodes or CONFIG")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel degree")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes, instead of --dp")] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, help="micro-batches per pipeline and step; default: gradient_accumulation_steps"
        ),
    ] = None,
    rank_order: Annotated[
        str,
        typer.Option(
            help="order of the axes in the ranks, slowest first, or across-nodes, which puts "
            "data-parallel peers on different nodes where possible; default: DeepSpeed's own"
        ),
    ] = "pipe-data-model",
    parameters: Annotated[
        float | None,
        typer.Option(
            parser=_count,
            metavar="N",
            help="count bytes for this many parameters (7B, 1.3e9), spread evenly, as publications "
            "do; without --model, estimate the computing time of a Llama of that size",
        ),
    ] = None,
    trained_parameters: Annotated[
        float | None,
        typer.Option(
            parser=_count,
            metavar="N",
            help="parameters that are trained, as those of adapters (40M); the others are frozen",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(min=1, help="tokens per sample; default: the model's, at most 4096"),
    ] = None,
    tolerance: Annotated[
        int | None,
        typer.Option(
            min=0, help="node losses that every sharding group should survive; default: CONFIG's"
        ),
    ] = None,
    protection: Annotated[
        str | None,
        typer.Option(help="protection to use instead of CONFIG's: a scheme such as aec, or auto"),
    ] = None,
    host_memory_gb: Annotated[
        float | None,
        typer.Option(
            help="GB that reft may reserve per node; default: CONFIG's limit, or half of the memory"
        ),
    ] = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(
            min=0, help="fraction of the training time that snapshots may cost; default: CONFIG's"
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="measured windows, from 'reft profile --json FILE', instead of estimated ones"
        ),
    ] = None,
    checkpoint_mins: Annotated[
        float, typer.Option(min=0.01, help="without reft: minutes between two checkpoints")
    ] = 30.0,
    restart_mins: Annotated[
        float, typer.Option(min=0, help="without reft: minutes from a failure to the next step")
    ] = 10.0,
    stall_secs: Annotated[
        float,
        typer.Option(min=0, help="without reft: seconds that training waits for a checkpoint"),
    ] = 0.0,
    start_secs: Annotated[
        float,
        typer.Option(min=0, help="seconds from the start of trainers to an engine to restore"),
    ] = START_SECS,
    figure: Annotated[
        Path | None,
        typer.Option(help="draw the survival of the job's memory over time (png, svg, pdf)"),
    ] = None,
    print_cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="print a cluster as JSON and exit, as a start for your own file"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Predict what a job's protection costs and survives, before it is started.

    Prints bytes per rank, host memory, idle windows, overhead, tolerance from the placement, the
    interval of checkpoints on storage, and alternatives. All times are estimated from published
    hardware figures.

    Example: reft plan configs/bf16-zero1.json --model llama2-34b --tp 8 --pp 4 --nodes 64

    Exit code 1: the plan does not fit, costs too much, or survives fewer losses than requested.
    """
    if print_cluster is not None:
        typer.echo(json.dumps(load_cluster(print_cluster).to_json(), indent=2))
        return
    if config is None:
        raise ConfigError(
            "CONFIG is missing; give the path of a DeepSpeed JSON, such as configs/bf16-zero1.json"
        )
    values = read_object(config, "the DeepSpeed configuration", "an object")
    block = dict(find_part(values, BLOCK_NAME))
    # Options override the keys of the reft block.
    if protection is not None:
        block.pop("copies", None)
        block["protection"] = protection
    if tolerance is not None:
        block["tolerance"] = tolerance
    if max_overhead is not None:
        block["has"] = {**find_part(block, "has"), "max_overhead": max_overhead}
    if host_memory_gb is not None:
        if not 0 < host_memory_gb < math.inf:
            raise ConfigError(f"--host-memory-gb is {host_memory_gb:g}; write a positive number")
        block["memory_limit_bytes"] = int(host_memory_gb * 1e9)
    measured = None if profile is None else _load_profile(profile)
    layouting = LayoutOptions(
        pp=pp, tp=tp, dp=dp, nodes=nodes, micro_batches=micro_batches, order=rank_order
    )
    machine = load_cluster(cluster)
    job = plan_job(
        values | {BLOCK_NAME: block},
        machine,
        model,
        layouting,
        parameters,
        trained=trained_parameters,
        seq_length=seq_length,
        for_megatron=holds_block_alone(values),
    )
    habits = CheckpointHabits(60 * checkpoint_mins, 60 * restart_mins, stall_secs)
    plan = make_plan(job, measured, habits, start_secs)
    if figure is not None:
        causes = [failure.weibull for failure in machine.failures]
        name, survives = plan["protection"]["planned"], plan["protection"]["tolerance"]
        draw_survival(job.topology, survives, causes, name, figure)
    if as_json:
        typer.echo(json.dumps(plan, indent=2))
    else:
        show_plan(job, plan, Console())
    if plan["problems"]:
        raise typer.Exit(1)


def _load_profile(path: Path) -> ProfileResult:
    try:
        return ProfileResult.load(path)
    except ProfileError as error:
        raise ConfigError(f"--profile: {error}") from error


# -- tables ----------------------------------------------------------------------------------------

Plan = dict[str, Any]  # Result of make_plan


def show_plan(job: PlannedJob, plan: Plan, console: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    step, source, protection = plan["step"], plan["step"]["source"], plan["protection"]
    say(
        f"{job.training.name}, {plan['job']['nodes']} nodes, rank order "
        f"{plan['job']['rank_order']}: a step takes {step['secs']:.3g} s, bubble "
        f"{step['bubble_fraction']:.0%}, copies run at {step['copy_bytes_per_sec'] / 1e9:.3g} GB/s "
        f"({source})"
    )
    console.print(_alternatives(plan), markup=False)
    if more := len(plan["alternatives"]) - len(_shown(plan)):
        say(f"{more} more scheme(s): --json has all", "dim")
    by_reason: dict[str, list[str]] = {}
    for left_out in plan["not_possible"]:
        by_reason.setdefault(left_out["why"], []).append(left_out["name"])
    for why, names in by_reason.items():
        say(f"not in the table: {', '.join(names)}: {why}", "dim")
    if any(stage["windows"] for stage in plan["stages"]):
        console.print(_stages(plan), markup=False)
    else:
        say("No stage is ever idle without a pipeline: copies run next to computation.")
    say(f"Snapshots ({source}): {plan['rate']['why']}.")
    say(f"On storage ({ESTIMATED}): {plan['storage']['why']}.")
    for failure in job.training.machine.failures:
        of = f" ({failure.source})" if failure.source else ""
        say(f"Failures: one in {failure.mtbf_days:.0f} days per node, shape {failure.shape:g}{of}")
    say(f"What failures cost ({ESTIMATED}): {_savings(plan)}.")
    console.print(_survival(plan), markup=False)
    for note in plan["notes"]:
        say(f"note: {note}")
    say(f'auto would choose "protection": "{protection["auto_would_choose"]}": {protection["why"]}')
    for warning in block_findings(job.block, for_megatron=job.for_megatron):
        say(f"{warning.severity}: {warning}")
    for problem in plan["problems"]:
        say(f"{Severity.REFUSED}: {problem}", "bold red")
    if plan["well"]:
        costs = f"{protection['overhead']:.2%} of the training time ({source})"
        say(f"no problems: {protection['planned']} costs {costs}", "green")


def _savings(plan: Plan) -> str:
    """Describe what failures cost without reft and with it, and the formulas for that."""
    habits, recovery, lost = (plan["savings"][part] for part in ("habits", "recovery", "lost"))
    parts = (
        ("to notice a silent host", recovery["notice_secs"]),
        ("to start trainers", recovery["start_secs"]),
        ("to read from peers", recovery["read_secs"]),
        ("of repeated steps", recovery["repeat_secs"]),
    )
    return (
        f"without reft {lost['without']:.2%} of the training time, with checkpoints every "
        f"{duration(habits['interval_secs'])} and restarts of {duration(habits['restart_secs'])} "
        "(stall / interval + failures x (interval / 2 + restart)); with reft "
        f"{lost['with_reft']:.2%}: versions {lost['versions']:.2%}, storage {lost['storage']:.2%}, "
        f"recoveries {lost['recoveries']:.2%} (failures x "
        f"{duration(recovery['total_secs'])}: "
        f"{', '.join(f'{duration(secs)} {what}' for what, secs in parts)}), more losses at once "
        f"than memory survives {lost['beyond']:.2%}"
    )


def _survival(plan: Plan) -> Table:
    table = numbers_table(
        f"probability that nothing is lost, if no lost node is replaced ({ESTIMATED})",
        *("days", "without protection", f"with {plan['protection']['planned']}"),
    )
    for row in plan["survival"]:
        table.add_row(f"{row['days']:.0f}", f"{row['unprotected']:.4f}", f"{row['protected']:.4f}")
    return table


def _alternatives(plan: Plan) -> Table:
    table = numbers_table(
        f"GB of the busiest rank per snapshot; unsharded {plan['full_bytes'] / 1e9:.3f} GB "
        f"({plan['step']['source']})",
        *("protection", "survives", "to\nhost", "to\npeers", "node\nGiB", "overhead"),
    )
    table.add_column("", no_wrap=True)
    moved = {
        a["name"]: a["bytes"]["to_host_bytes"] + a["bytes"]["sent_bytes"]
        for a in plan["alternatives"]
    }
    for a in _shown(plan):
        # Add a remark that compares the alternative with the one that ``auto`` would choose.
        more = moved[a["name"]] - moved[plan["protection"]["auto_would_choose"]]
        said = f"moves +{decimal(more)}" if more else "more memory"
        if a["chosen"]:
            said = "auto's choice"
        elif not a["available"]:
            said = "not asked for"
        elif not a["possible"]:
            said = "lacks memory"
        elif not a["reaches_wish"]:
            said = "survives less" if a["tolerance"] else "unprotected"
        table.add_row(
            f"{'> ' if a['planned'] else '  '}{a['name']}",
            str(a["tolerance"]),
            _gb(a["bytes"]["to_host_bytes"]),
            _gb(a["bytes"]["sent_bytes"]),
            f"{a['node_memory_bytes'] / GIB:.2f}",
            f"{a['overhead']:.2%}",
            said,
            style="bold" if a["planned"] else None,
        )
    return table


def _shown(plan: Plan) -> list[dict[str, Any]]:
    """Return the schemes to show: the cheapest ones, the planned one and auto's choice."""
    return [
        a
        for number, a in enumerate(plan["alternatives"])
        if number < _SCHEMES_SHOWN or a["planned"] or a["chosen"]
    ]


def _gb(nbytes: int) -> str:
    gb = nbytes / 1e9
    return f"{gb:.4f}" if gb < 10 else f"{gb:.2f}"


def _stages(plan: Plan) -> Table:
    table = numbers_table(
        f"idle windows of each stage, with {plan['protection']['planned']} "
        f"({plan['step']['source']})",
        *("stage", "idle\ns", "of\nstep", "windows", "longest\nms", "GB that\nfit", "GB to\ncopy"),
    )
    for s in plan["stages"]:
        lengths = [w["stop_secs"] - w["start_secs"] for w in s["windows"]]
        table.add_row(
            str(s["stage_id"]),
            f"{s['idle_secs']:.3f}",
            f"{s['idle_secs'] / plan['step']['secs']:.0%}",
            str(len(lengths)),
            f"{max(lengths, default=0.0) * 1e3:.3g}",
            f"{s['window_bytes'] / 1e9:.3f}",
            _gb(s["to_host_bytes"]),
        )
    return table


def numbers_table(title: str, first: str, *numbers: str) -> Table:
    """Make an empty table: text in the first column, numbers in the others, never cut off."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table
