"""The plan for people: tables that an 80 column terminal holds. ``--json`` has all of it."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from reft.policy.choose import GIB, Alternative, amount
from reft.tools.planning.pace import ESTIMATED
from reft.tools.planning.plan import JobPlan


def show_plan(plan: JobPlan, console: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    order, rate = "-".join(plan.job.layout.order), plan.stages[0].bytes_per_sec
    say(
        f"{plan.job.training.name}, {plan.nodes} nodes, rank order {order}: a step takes "
        f"{plan.pace.step_secs:.3g} s, bubble {plan.bubble_fraction:.0%}, copies run at "
        f"{rate / 1e9:.3g} GB/s ({plan.source})"
    )
    for problem in plan.problems:
        say(f"{problem.severity}: {problem}", "bold red")
    console.print(_alternatives(plan), markup=False)
    by_reason: dict[str, list[str]] = {}
    for name, why in plan.choice.excluded:
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        say(f"not in the table: {', '.join(names)}: {why}", "dim")
    console.print(_stages(plan), markup=False)
    say(f"Snapshots ({plan.source}): {plan.why_rate}.")
    say(f"On storage ({ESTIMATED}): {plan.storage.why}.")
    for failure in plan.job.cluster.failures:
        source = f" ({failure.source})" if failure.source else ""
        say(f"Failures: one in {failure.mtbf_days:.0f} days per node, shape {failure.shape:g}{source}")
    for note in plan.job.notes:
        say(f"note: {note}")
    say(f'auto would choose "protection": "{plan.choice.chosen.name}": {plan.choice.reason}')
    for warning in plan.warnings:
        say(f"{warning.severity}: {warning}")
    if not plan.problems:
        costs = f"{plan.overhead:.2%} of the training time ({plan.source})"
        say(f"no problems: {plan.planned.name} costs {costs}", "green")


def _alternatives(plan: JobPlan) -> Table:
    full = max(plan.job.state_bytes(p) for p in range(plan.job.training.stages))
    table = numbers_table(
        f"GB of the busiest rank per snapshot; unsharded {full / 1e9:.3f} GB ({plan.source})",
        *("protection", "survives", "to\nhost", "to\npeers", "node\nGiB", "overhead"),
    )
    table.add_column("", no_wrap=True)
    for a in plan.choice.alternatives:
        assert a.fit is not None
        table.add_row(
            f"{'> ' if a is plan.planned else '  '}{a.name}",
            str(a.tolerance),
            _gb(a.busiest.to_host_bytes),
            _gb(a.busiest.sent_bytes),
            f"{a.memory_bytes / GIB:.2f}",
            f"{a.fit.overhead:.2%}",
            _verdict(plan, a),
            style="bold" if a is plan.planned else None,
        )
    return table


def _verdict(plan: JobPlan, alternative: Alternative) -> str:
    """A few words on an alternative, compared with the one that ``auto`` takes."""
    chosen = plan.choice.chosen
    if alternative is chosen:
        return "auto's choice"
    if not alternative.available:
        return "not asked for"
    if not alternative.fits_memory:
        return "lacks memory"
    if alternative.tolerance < plan.choice.wanted:
        return "unprotected" if not alternative.tolerance else "survives less"
    more = alternative.busiest.moved_bytes - chosen.busiest.moved_bytes
    return f"moves +{amount(more)}" if more else "more memory"


def _gb(nbytes: int) -> str:
    gb = nbytes / 1e9
    return f"{gb:.4f}" if gb < 10 else f"{gb:.2f}"


def _stages(plan: JobPlan) -> Table:
    table = numbers_table(
        f"idle windows of each stage, with {plan.planned.name} ({plan.source})",
        *("stage", "idle\ns", "of\nstep", "windows", "longest\nms", "GB that\nfit", "GB to\ncopy"),
    )
    for s in plan.stages:
        table.add_row(
            str(s.stage_id),
            f"{s.idle_secs:.3f}",
            f"{s.idle_secs / plan.pace.step_secs:.0%}",
            str(len(s.windows)),
            f"{max((w.length_secs * 1e3 for w in s.windows), default=0.0):.3g}",
            f"{s.window_bytes / 1e9:.3f}",
            _gb(s.load.to_host_bytes),
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
