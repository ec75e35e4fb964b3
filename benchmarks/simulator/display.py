"""Predictions for people, in 80 columns: jobs side by side, what is told of them below each
other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from reft.pacing.schedule import Window
from reft.tools.planning.command import numbers_table

from .copying import Tier
from .result import Simulation
from .settings import BYTES, Experiment
from .variants import Predictions

_READING = (
    "Simulated: none of these times was measured. Overhead is what a snapshot every step adds to "
    "the iteration. The model and its limits: docs/simulation.md; published values: "
    "docs/papers.md. More about one job: --model; everything: --json."
)
_COPIED = (
    "The last columns: what part is copied in bubbles, beside computation, beside communication, "
    "and while the device waits for it."
)
_TIERS = {
    Tier.WAITING: "bub-\nbles",
    Tier.COMPUTING: "com-\npute",
    Tier.COMMUNICATING: "comm.",
    Tier.FENCE: "waits",
}


def show_experiments(
    groups: Sequence[Experiment], results: Sequence[Sequence[Predictions]], console: Console
) -> None:
    """Show the bytes that are copied, and every experiment."""
    console.print(_bytes(), markup=False)
    for group, of_group in zip(groups, results, strict=True):
        console.print(_overheads(group.title, of_group), markup=False)
    console.print(_READING, markup=False)


def show_job(result: Predictions, console: Console) -> None:
    """Every variant of one job."""
    console.print(_variants(result), markup=False)
    console.print(_COPIED, markup=False)
    console.print(_READING, markup=False)


def show_pipeline(simulation: Simulation, console: Console) -> None:
    """One step: what each stage does and when it waits."""
    table = numbers_table(
        f"{simulation.schedule} (simulated): {len(simulation.stages)} stages, "
        f"{simulation.micro_batches} "
        f"micro-batches, {simulation.makespan_secs:.6g} s, bubble {simulation.bubble_fraction:.1%}",
        *("stage", "compute\ns", "other\ns", "idle\ns", "windows"),
    )
    table.add_column("milliseconds by kind (windows)")
    for s in simulation.stages:
        seconds = (f"{secs:.4g}" for secs in (s.compute_secs, s.other_secs, s.idle_secs))
        table.add_row(
            str(s.stage_id), *seconds, str(len(s.windows)), windows_by_kind(s.windows) or "none"
        )
    console.print(table, markup=False)


def _bytes() -> Table:
    jobs = [f"{row.model}\nTP{row.tensor} PP{row.stages} DP{row.data}" for row in BYTES]
    title = "GB per device and snapshot: computed (derived by hand from the paper's formulas)"
    table = numbers_table(title, "", *jobs)
    for cells in zip(*(row.cells() for row in BYTES), strict=True):
        values = [
            f"{computed} ({derived})" if derived else computed for _, computed, derived in cells
        ]
        table.add_row(cells[0][0].replace("_", " "), *values)
    return table


def _overheads(title: str, results: Sequence[Predictions]) -> Table:
    """One column for each job, one line for each variant."""
    jobs = []
    for t in (r.training for r in results):
        large = "" if t.fits_device else "\n(too large)"
        jobs.append(
            f"{t.shape.name}\n{t.devices:,} {t.machine.name}\nTP{t.tensor} "
            f"PP{t.stages}\nDP{t.data}{large}"
        )
    table = numbers_table(f"{title}: overhead of a snapshot every step (simulated)", "", *jobs)
    rows: list[tuple[str, Callable[[Predictions], str]]] = [
        ("GB of a device", lambda r: f"{r.variants[1].nbytes / 1e9:.3f}"),
        ("iteration, s", lambda r: f"{r.step_secs:.3f}"),
        ("bubble", lambda r: f"{r.bubble:.0%}"),
        ("  used by HAS", lambda r: f"{r.bubble_use:.0%}"),
    ]
    for name, of in rows:
        table.add_row(name, *map(of, results))
    table.add_section()
    for name, overheads in _by_variant(results):
        table.add_row(name, *(f"{overhead:.1%}" for overhead in overheads))
    return table


def _by_variant(results: Sequence[Predictions]) -> Iterator[tuple[str, list[float]]]:
    for shown in (p for p in results[0].variants if p.overhead or p.nbytes):
        yield shown.name, [r.of(shown.variant, shown.whole_stage).overhead for r in results]


def _variants(result: Predictions) -> Table:
    """One line for each variant of one job."""
    too_large = "" if result.training.fits_device else "; its state exceeds the device's memory"
    table = numbers_table(
        f"{result.training.name}, bubble {result.bubble:.0%}{too_large} (simulated)",
        *("variant", "GB", "s per\nstep", "over-\nhead", "HAS\nsaves", *_TIERS.values()),
    )
    for p in result.variants:
        total = sum(p.copied_bytes.values())
        table.add_row(
            p.name,
            f"{p.nbytes / 1e9:.3g}",
            f"{p.step_secs:.3f}",
            f"{p.overhead:.1%}",
            f"{result.has_is_better_by(p):.1%}",
            *(f"{p.copied_bytes[tier] / total:.0%}" if total else "" for tier in _TIERS),
        )
    return table


def windows_by_kind(windows: Iterable[Window]) -> str:
    """Milliseconds of each kind of window, and how many there are: ``fill 9.4, cool-down 12.1
    (3)``."""
    found: dict[str, list[float]] = {}
    for window in windows:
        found.setdefault(window.kind.value.replace("_", "-"), []).append(window.length_secs * 1e3)
    return ", ".join(
        f"{kind} {sum(lengths):.3g}" + (f" ({len(lengths)})" if len(lengths) > 1 else "")
        for kind, lengths in found.items()
    )
