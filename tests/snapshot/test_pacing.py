"""The pacer, without an engine: windows are measured, kinds told apart, plans made and learnt from."""

from __future__ import annotations

import pytest

from reft.snapshot.pacing import Observed, Wait, WindowMeter
from reft.snapshot.windows import WindowKind, _instructions

STAGES, MICRO_BATCHES, FORWARD, BACKWARD = 4, 8, 1.0, 2.0


def stream(stage: int) -> list[str]:
    return [name for name, _ in _instructions(STAGES, MICRO_BATCHES, stage)]


def observed(
    names: list[str], waits: dict[int, tuple[float, float]], end: float, at: float = 100.0
) -> Observed:
    return Observed(
        "key",
        names,
        at,
        at + end,
        [Wait(p, at + a, at + b, 0.0, True) for p, (a, b) in waits.items()],
        1.0,
        2.0,
    )


def test_what_is_measured_is_what_was_seen_after_a_few_steps() -> None:
    names = stream(1)
    meter = WindowMeter(names)
    waits = {0: (0.0, 1.0), 5: (3.0, 5.0), len(names): (20.0, 22.0)}
    meter.see(observed(names, {0: (0.0, 50.0)}, 90.0))  # first use of everything: forgotten
    for _ in range(4):
        meter.see(observed(names, waits, 22.0))
    assert meter.step_secs == pytest.approx(22.0)
    assert [(w.position, w.start_secs, w.length_secs) for w in meter.windows()] == [
        (p, pytest.approx(a), pytest.approx(b - a)) for p, (a, b) in waits.items()
    ]


def test_an_outlier_moves_a_window_by_its_weight_only() -> None:
    names = stream(0)
    meter = WindowMeter(names)
    for _ in range(5):
        meter.see(observed(names, {6: (1.0, 2.0)}, 10.0))
    meter.see(observed(names, {6: (1.0, 12.0)}, 20.0))
    (window,) = meter.windows()
    assert 1.0 < window.length_secs < 5.0


def test_a_wait_for_a_chunk_is_no_idle_time() -> None:
    names = stream(0)
    meter = WindowMeter(names)
    for _ in range(3):
        step = observed(names, {}, 10.0)
        wait = Wait(6, 101.0, 102.0, 0.25, True)
        meter.see(Observed("key", names, step.begin_secs, step.end_secs, [wait], 1.0, 2.0))
    assert meter.windows()[0].length_secs == pytest.approx(0.75)


@pytest.mark.parametrize("stage", range(STAGES))
def test_windows_of_1f1b_are_told_apart(stage: int) -> None:
    names = stream(stage)
    meter = WindowMeter(names)
    kinds = [meter.kind(p) for p, name in enumerate(names) if name.startswith("Recv")]
    assert meter.kind(len(names)) is WindowKind.DRAIN
    assert (WindowKind.FILL in kinds) == (stage > 0)
    assert (WindowKind.MID in kinds) == (stage < STAGES - 1)
    assert kinds.count(WindowKind.COOL_DOWN) == STAGES - 1 - stage
