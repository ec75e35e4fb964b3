"""The plan for people: tables that an 80 column terminal holds. ``--json`` has all of it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from reft.engine.checks.preflight import Severity, block_findings
from reft.policy.choose import GIB, amount
from reft.tools.planning.job import PlannedJob
from reft.tools.planning.pace import ESTIMATED

Plan = dict[str, Any]  # as :func:`reft.tools.planning.plan.make_plan` makes it


def show_plan(job: PlannedJob, plan: Plan, console: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    step, source, protection = plan["step"], plan["step"]["source"], plan["protection"]
    say(
        f"{job.training.name}, {plan['job']['nodes']} nodes, rank order {plan['job']['rank_order']}: a step "
        f"takes {step['secs']:.3g} s, bubble {step['bubble_fraction']:.0%}, copies run at "
        f"{step['copy_bytes_per_sec'] / 1e9:.3g} GB/s ({source})"
    )
    for problem in plan["problems"]:
        say(f"{Severity.REFUSED}: {problem}", "bold red")
    console.print(_alternatives(plan), markup=False)
    by_reason: dict[str, list[str]] = {}
    for left_out in plan["not_possible"]:
        by_reason.setdefault(left_out["why"], []).append(left_out["name"])
    for why, names in by_reason.items():
        say(f"not in the table: {', '.join(names)}: {why}", "dim")
    console.print(_stages(plan), markup=False)
    say(f"Snapshots ({source}): {plan['rate']['why']}.")
    say(f"On storage ({ESTIMATED}): {plan['storage']['why']}.")
    for failure in job.cluster.failures:
        of = f" ({failure.source})" if failure.source else ""
        say(f"Failures: one in {failure.mtbf_days:.0f} days per node, shape {failure.shape:g}{of}")
    for note in plan["notes"]:
        say(f"note: {note}")
    say(f'auto would choose "protection": "{protection["auto_would_choose"]}": {protection["why"]}')
    for warning in block_findings(job.block):
        say(f"{warning.severity}: {warning}")
    if plan["well"]:
        costs = f"{protection['overhead']:.2%} of the training time ({source})"
        say(f"no problems: {protection['planned']} costs {costs}", "green")


def _alternatives(plan: Plan) -> Table:
    table = numbers_table(
        f"GB of the busiest rank per snapshot; unsharded {plan['full_bytes'] / 1e9:.3f} GB "
        f"({plan['step']['source']})",
        *("protection", "survives", "to\nhost", "to\npeers", "node\nGiB", "overhead"),
    )
    table.add_column("", no_wrap=True)
    moved = {a["name"]: a["bytes"]["to_host_bytes"] + a["bytes"]["sent_bytes"] for a in plan["alternatives"]}
    for a in plan["alternatives"]:
        # A few words, compared with the one that ``auto`` takes.
        more = moved[a["name"]] - moved[plan["protection"]["auto_would_choose"]]
        said = f"moves +{amount(more)}" if more else "more memory"
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


def _gb(nbytes: int) -> str:
    gb = nbytes / 1e9
    return f"{gb:.4f}" if gb < 10 else f"{gb:.2f}"


def _stages(plan: Plan) -> Table:
    table = numbers_table(
        f"idle windows of each stage, with {plan['protection']['planned']} ({plan['step']['source']})",
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
    """A table whose first column is text and whose others are numbers; none of them is cut."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table
