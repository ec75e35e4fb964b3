"""The gates: who may copy when, and who waits for whom."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise

import pytest

from reft.pacing.gate import HostGate, StreamGate
from reft.snapshot.gate import Gate, Permit

LONG = 60.0  # Seconds: nothing in these tests may need them


class Copying:
    def __init__(self, gate: HostGate | StreamGate, *, hold: bool = False) -> None:
        self.gate, self.permits = gate, []
        self.let_go, self.asked = threading.Event(), threading.Semaphore(0)
        if not hold:
            self.let_go.set()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            permit = self.gate.admit()
            self.permits.append(permit)
            self.asked.release()
            assert self.let_go.wait(LONG)
            self.gate.release(permit, 0.001)

    def wait_for_one(self) -> Permit:
        assert self.asked.acquire(timeout=LONG)
        return self.permits[-1]

    def end(self) -> None:
        self._ending = True
        self.let_go.set()
        self.gate.expedite()
        self._thread.join(LONG)
        assert not self._thread.is_alive()


@pytest.fixture
def gate() -> HostGate:
    made = HostGate()
    made.patience_secs = LONG
    made.enter()
    return made


class Clock:
    """Goes on by a step whenever it is read; nobody waits for what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_secs: float) -> None:
        self.now, self._step_secs = 0.0, step_secs
        monkeypatch.setattr("reft.pacing.gate.time.perf_counter", self)

    def __call__(self) -> float:
        self.now += self._step_secs
        return self.now


def test_a_version_begins_where_bytes_are_planned_and_goes_on_in_any_window(gate: HostGate) -> None:
    copying = Copying(gate)
    gate.open(0, 0, None)
    gate.close()
    gate.open(1, 64, None)
    assert copying.wait_for_one() == Permit(1, 1)
    gate.close()
    while copying.asked.acquire(blocking=False):
        pass
    gate.open(2, 0, None)
    assert copying.wait_for_one() == Permit(1, 2)
    gate.close()
    gate.leave()
    gate.enter()  # the next version
    gate.open(3, 0, None)
    assert gate.opened is None
    copying.end()
    assert {p.window for p in copying.permits} <= {1, 2, None}
    assert {p.tier for p in copying.permits} <= {0, 1}


@pytest.mark.parametrize(
    ("window", "permit"), [(0, Permit(1, 0)), (None, Permit(3))], ids=["window", "send"]
)
def test_closing_waits_for_the_chunk_in_flight(
    gate: HostGate, window: int | None, permit: Permit
) -> None:
    """Beside communication chunks are tier 3, and waited for too."""
    copying = Copying(gate, hold=True)
    gate.open(window, 64, None)
    assert copying.wait_for_one() == permit
    closed = threading.Event()
    thread = threading.Thread(target=lambda: (gate.close(), closed.set()))
    thread.start()
    assert not closed.wait(0.1)
    copying.let_go.set()
    assert closed.wait(LONG)
    # Whatever the thread was given after that, it was not the window.
    count = len(copying.permits)
    copying.end()
    assert all(p.tier == 0 for p in copying.permits[count:])


def test_the_fence_lets_everything_through_and_then_nothing_is_wanted(gate: HostGate) -> None:
    gate.expedite()
    assert gate.admit().tier == 0
    gate.reset()
    assert not gate.wanted
    gate.open(0, 64, None)
    assert gate.close() == 0.0, "closing costs nothing when nothing is to be copied"
    waiting = False
    always = Gate(2, lambda: waiting)
    assert always.admit().tier == 2
    waiting = True
    assert always.admit().tier == 0


def test_a_share_paces_what_runs_beside_computation_in_bursts(
    gate: HostGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 0.0005)
    gate.share(0.5)
    gate.enter()
    monkeypatch.setattr(gate._changed, "wait", lambda secs: None)
    began, times = clock.now, []
    for _ in range(40):
        permit = gate.admit()
        assert permit.tier == 2
        times.append(clock.now)
        gate.release(permit, 0.001)  # two of them make a burst of 2 ms; then there are 2 ms of rest
    assert clock.now - began >= 19 * 0.002
    rests = [after - before > 0.002 for before, after in pairwise(times)]
    assert rests == [False, True] * 19 + [False]


def test_training_that_is_silent_for_long_is_not_waited_for(
    gate: HostGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 0.001)
    gate.alive_at = -LONG  # no version was wanted, and no window opened
    gate.enter()
    gate.patience_secs = 0.05
    monkeypatch.setattr(gate._changed, "wait", lambda secs: None)
    handed_over = clock.now
    assert gate.admit().tier == 2
    assert clock.now >= handed_over + 0.05, "who hands a version over is not silent"


def test_windows_from_before_a_version_serve_what_is_drained_and_not_its_copy() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.enter()
    gate.open(0, 100, 1)
    gate.open(1, 100, 1)
    gate.enter(draining=True)
    gate.open(0, 100, 2)
    assert gate.admit().mark == 1
    gate.begin()
    assert gate.admit().mark == 2
    gate.open(1, 100, 2)
    gate.enter()  # nothing is being drained: what is left is over
    gate.expedite()
    assert gate.admit().tier == 0


def test_a_stream_gate_hands_out_windows_in_order_with_their_marks_and_bytes() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.open(9, 100, 1)  # nobody wants to copy yet
    gate.enter()
    gate.open(None, 200, 1)
    gate.open(0, 100, 1)
    gate.open(1, 0, 1)  # nothing planned
    gate.open(2, 300, 2)
    expected = [Permit(3, None, 200, 1), Permit(1, 0, 100, 1), Permit(1, 2, 300, 2)]
    assert [gate.admit() for _ in expected] == expected
    gate.expedite()
    assert gate.admit().tier == 0
    gate.reset()
    assert not gate.wanted


def test_a_stream_gate_hands_out_at_a_pace_beside_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, gate = Clock(monkeypatch, 0.004), StreamGate()
    gate.patience_secs = 1e9
    gate.share(0.1, 10**7, 1e8)
    gate.enter()
    began, copied = clock.now, 0
    while copied < 10**7:
        permit = gate.admit()
        assert permit.tier == 2
        assert copied <= 1e8 * (clock.now - began), "ahead of its pace"
        copied += permit.nbytes
    assert copied == 10**7


def test_a_stream_gate_without_windows_begins_beside_computation_with_what_was_planned_there() -> (
    None
):
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.share(1.0, 1000)
    for _ in range(2):  # of each version
        gate.enter()
        assert gate.admit() == Permit(2, nbytes=1000)
        gate.expedite()
        assert gate.admit().tier == 0, "more than was planned began beside computation"
        gate.reset()
    gate.share(1.0, 0)
    gate.enter()
    gate.expedite()
    assert gate.admit().tier == 0


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no thread affinity on this system"
)
def test_in_a_window_copies_run_on_the_core_of_training_and_then_anywhere_again() -> None:
    allowed = os.sched_getaffinity(0)
    gate = HostGate()
    gate.patience_secs = LONG
    gate.enter()
    seen: list[set[int]] = []
    waiting, done = threading.Event(), threading.Event()

    def copy() -> None:
        waiting.set()
        for number in range(3):
            permit = gate.admit()
            seen.append(os.sched_getaffinity(0))
            gate.release(permit, 0.0)
            if number == 1:
                gate.open(None, 0, None)
        gate.leave()
        seen.append(os.sched_getaffinity(0))
        done.set()

    threading.Thread(target=copy, daemon=True).start()
    assert waiting.wait(LONG)
    time.sleep(0.05)  # it asks, then waits for the window
    core = min(allowed)
    os.sched_setaffinity(0, {core})
    try:
        gate.open(0, 64, None)
        assert done.wait(LONG)
    finally:
        os.sched_setaffinity(0, allowed)
    # Beside communication the core of training is at work.
    assert seen == [{core}, {core}, allowed, allowed]


@pytest.mark.parametrize("communicating", [False, True])
def test_what_is_copied_outside_of_windows_hears_that_training_waits(
    gate: HostGate, communicating: bool
) -> None:
    gate.share(1.0)
    if communicating:
        gate.open(None, 64, None)
    permit = gate.admit()
    assert permit.tier == (3 if communicating else 2)
    assert permit.until.value == 0
    if not communicating:
        gate.open(0, 64, None)
    closing = threading.Thread(target=gate.close)
    closing.start()
    deadline = time.monotonic() + LONG
    while not permit.until.value:
        assert time.monotonic() < deadline, "the copying thread was not told"
        time.sleep(0.001)
    gate.release(permit, 0.0)
    closing.join(LONG)
    assert permit.until.value == 0, "nobody waits any more"


def test_p6_training_waits_so_long_for_a_chunk_that_does_not_end_and_once(
    gate: HostGate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.chunk_secs = 0.05
    copying = Copying(gate, hold=True)
    for window in range(3):
        gate.open(window, 64, None)
        if window == 0:
            copying.wait_for_one()
        closing = threading.Thread(target=gate.close, daemon=True)
        closing.start()
        closing.join(LONG / 3)
        assert not closing.is_alive(), "training waits for a chunk that does not end"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    gate.chunk_secs = LONG
    copying.let_go.set()  # the chunk ends after all, and others follow and are waited for
    gate.open(9, 64, None)
    assert copying.wait_for_one() == Permit(1, 9)
    copying.end()
