"""The plan for people: tables that an 80 column terminal holds, with more columns where there is room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from reft.policy.choose import GIB, Alternative, amount
from reft.policy.loads import Load
from reft.tools.planning.plan import JobPlan, duration
from reft.tools.planning.survival import HOUR
from reft.tools.tables import numbers_table, windows_by_kind

_ANY = 10_000
_PARTS: dict[str, Callable[[Load], int]] = {
    "shard": lambda load: load.shard_bytes,
    "redundant": lambda load: load.redundant_bytes,
    "partition": lambda load: load.owned_bytes,
    "gradients": lambda load: load.gradient_bytes,
}


def show_plan(plan: JobPlan, console: Console) -> None:
    """Print it."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    order, rate = "-".join(plan.job.layout.order), plan.stages[0].bytes_per_sec
    say(
        f"{plan.job.training.name}, {plan.survival.nodes} nodes, rank order {order}: a step takes "
        f"{plan.pace.step_secs:.3g} s, bubble {plan.bubble_fraction:.0%}, copies run at "
        f"{rate / 1e9:.3g} GB/s ({plan.source})"
    )
    _print(console, _alternatives, plan)
    for line in _excluded(plan):
        say(line, "dim")
    _print(console, _stages, plan)
    console.print(_survival(plan), markup=False)
    seen = plan.survival
    say(
        f"The first node of the job fails after about {duration(seen.job_failure_secs)}. For a survival of "
        f"{seen.target:g} persist every {duration(seen.persist_secs)} ({plan.persist_steps:,} steps); "
        f"without protection it would be every {duration(seen.unprotected_secs)}."
    )
    say(f"Snapshots {plan.why_rate}.")
    say(f"On storage {plan.storage.why}. {plan.storage.source}.")
    for failure in plan.job.cluster.failures:
        shape = "" if failure.shape == 1 else f", Weibull shape {failure.shape:g}"
        source = f" ({failure.source})" if failure.source else ""
        say(f"Failures: one in {failure.mtbf_days:.0f} days per node{shape}{source}")
    for note in plan.job.notes:
        say(f"note: {note}")
    say(f'auto would choose "protection": "{plan.choice.chosen.name}": {plan.choice.reason}')
    for problem in plan.problems:
        say(f"problem: {problem}", "bold red")
    if not plan.problems:
        say(f"no problems: {plan.planned.name} costs {plan.overhead:.2%} of the training time", "green")


def _print(console: Console, make: Callable[[JobPlan, bool], Table], plan: JobPlan) -> None:
    """With every column where there is room for them."""
    table = make(plan, True)
    if console.measure(table, options=console.options.update(max_width=_ANY)).maximum > console.width:
        table = make(plan, False)
    console.print(table, markup=False)


def _alternatives(plan: JobPlan, wide: bool) -> Table:
    full = max(plan.job.state_bytes(p) for p in range(plan.job.training.stages))
    loads = [a.busiest for a in plan.choice.alternatives]
    parts = [(part, of) for part, of in _PARTS.items() if wide and any(of(load) for load in loads)]
    table = numbers_table(
        f"GB of the busiest rank per snapshot; unsharded {full / 1e9:.3f} GB ({plan.source})",
        *("protection", "survives", *(part for part, _ in parts), "to\nhost", "to\npeers", "node\nGiB"),
        *("overhead", *(["in\nbubbles"] if wide else [])),
    )
    table.add_column("", no_wrap=True)
    for a in plan.choice.alternatives:
        load, fit = a.busiest, a.fit
        assert fit is not None
        table.add_row(
            f"{'> ' if a is plan.planned else '  '}{a.name}",
            str(a.tolerance),
            *(_gb(of(load)) for _, of in parts),
            _gb(load.to_host_bytes),
            _gb(load.sent_bytes),
            f"{a.memory_bytes / GIB:.2f}",
            f"{fit.overhead:.2%}",
            *([f"{fit.in_windows:.0%}"] if wide else []),
            _verdict(plan, a),
            style="bold" if a is plan.planned else None,
        )
    return table


def _verdict(plan: JobPlan, alternative: Alternative) -> str:
    """A few words on an alternative beside the one that ``auto`` takes."""
    chosen = plan.choice.chosen
    if alternative is chosen:
        return "auto's choice"
    if not alternative.available:
        return "not asked for"
    if not alternative.fits_memory:
        return "lacks memory"
    if alternative.tolerance < plan.choice.wished:
        return "unprotected" if not alternative.tolerance else "survives less"
    more = alternative.busiest.moved_bytes - chosen.busiest.moved_bytes
    return f"moves +{amount(more)}" if more else "more memory"


def _excluded(plan: JobPlan) -> list[str]:
    """Schemes that are not in the table, together where one reason holds for them."""
    by_reason: dict[str, list[str]] = {}
    for name, why in plan.choice.excluded:
        by_reason.setdefault(why, []).append(name)
    return [f"not in the table: {', '.join(names)}: {why}" for why, names in by_reason.items()]


def _gb(nbytes: int) -> str:
    gb = nbytes / 1e9
    return f"{gb:.4f}" if gb < 10 else f"{gb:.2f}"


def _stages(plan: JobPlan, wide: bool) -> Table:
    table = numbers_table(
        f"idle windows of each stage, with {plan.planned.name} ({plan.source})",
        *("stage", "idle\ns", "of\nstep", "windows", "longest\nms", "GB that\nfit", "GB to\ncopy"),
    )
    if wide:
        table.add_column("milliseconds by kind (windows)", no_wrap=True)
    for s in plan.stages:
        lengths = [w.length_secs * 1e3 for w in s.windows]
        table.add_row(
            str(s.stage_id),
            f"{s.idle_secs:.3f}",
            f"{s.idle_secs / plan.pace.step_secs:.0%}",
            str(len(lengths)),
            f"{max(lengths, default=0.0):.3g}",
            f"{s.window_bytes / 1e9:.3f}",
            _gb(s.load.to_host_bytes),
            *([windows_by_kind(s.windows)] if wide else []),
        )
    return table


def _survival(plan: JobPlan) -> Table:
    points = plan.survival.curve()
    kind = "" if plan.survival.exact else ", at least"
    table = numbers_table("probability that no state is lost, living on memory alone", "after")
    for point in points:
        table.add_column(duration(point.secs) if point.secs > HOUR else "1 h", justify="right", no_wrap=True)
    rows: list[tuple[str, Any]] = [
        (f"{plan.planned.name}{kind}", lambda p: p.protected),
        ("without", lambda p: p.unprotected),
        ("one node", lambda p: p.node),
    ]
    for name, of in rows:
        table.add_row(name, *(f"{of(point):.5f}" for point in points))
    return table
