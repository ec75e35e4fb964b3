"""The gates: who may copy when, and who waits for whom."""

from __future__ import annotations

import os
import threading
import time

import pytest

from reft.snapshot.copying.engine import Mark
from reft.snapshot.copying.gate import HostGate, OpenGate, Permit, StreamGate

LONG = 60.0
"""Seconds: nothing in these tests may need them."""


class Copying:
    """A copying thread that notes its permits; ``hold`` keeps a chunk in flight until it is let go."""

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
        self.gate.hurry()
        self._thread.join(LONG)
        assert not self._thread.is_alive()


@pytest.fixture
def gate() -> HostGate:
    made = HostGate()
    made.patience_secs = LONG
    made.enter()
    return made


def test_a_closed_gate_lets_nobody_through_and_an_open_one_says_which_window(gate: HostGate) -> None:
    copying = Copying(gate, hold=True)
    time.sleep(0.05)
    assert copying.permits == []
    gate.open(3, 64, None)
    assert copying.wait_for_one() == Permit(1, 3)
    copying.end()


def test_a_version_begins_where_bytes_are_planned_and_goes_on_in_any_window(gate: HostGate) -> None:
    copying = Copying(gate)
    gate.open(0, 0, None)
    time.sleep(0.05)
    assert copying.permits == []
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
    count = len(copying.permits)
    gate.open(3, 0, None)
    time.sleep(0.05)
    assert len(copying.permits) == count
    copying.end()


@pytest.mark.parametrize(("window", "permit"), [(0, Permit(1, 0)), (None, Permit(3))], ids=["window", "send"])
def test_closing_waits_for_the_chunk_in_flight(gate: HostGate, window: int | None, permit: Permit) -> None:
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


def test_a_stream_gate_hands_communication_out_with_its_mark_and_bytes() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.enter()
    gate.open(None, 200, Mark(1))
    gate.open(0, 100, Mark(1))
    assert [gate.admit(), gate.admit()] == [Permit(3, None, 200, Mark(1)), Permit(1, 0, 100, Mark(1))]


def test_windows_from_before_a_version_serve_what_is_drained_and_not_its_copy() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.enter()
    gate.open(0, 100, Mark(1))
    gate.open(1, 100, Mark(1))
    gate.enter(draining=True)
    gate.open(0, 100, Mark(2))
    assert gate.admit().mark == Mark(1)
    gate.begin()
    assert gate.admit().mark == Mark(2)
    gate.open(1, 100, Mark(2))
    gate.enter()  # nothing is being drained: what is left is over
    gate.hurry()
    assert gate.admit().tier == 0


def test_closing_costs_nothing_when_nothing_is_to_be_copied() -> None:
    gate = HostGate()
    gate.open(0, 64, None)
    assert gate.close() == 0.0
    assert not gate.wanted


def test_the_fence_lets_everything_through_as_tier_0(gate: HostGate) -> None:
    copying = Copying(gate)
    gate.hurry()
    assert copying.wait_for_one().tier == 0
    copying.end()
    gate.relax()
    assert not gate.wanted


def test_a_share_paces_what_runs_beside_computation(gate: HostGate) -> None:
    gate.share(0.5)
    began = time.perf_counter()
    for _ in range(20):
        permit = gate.admit()
        assert permit.tier == 2
        gate.release(permit, 0.002)  # as if the chunk had taken 2 ms: then 2 ms of rest
    assert time.perf_counter() - began >= 19 * 0.002


def test_chunks_beside_computation_follow_each_other_in_bursts(gate: HostGate) -> None:
    gate.share(0.000001)
    gate.patience_secs = 10 * LONG
    copied: list[int] = []

    def copy() -> None:
        for _ in range(5):
            permit = gate.admit()
            copied.append(permit.tier)
            gate.release(permit, 0.0005)  # after 2 ms 2,000 s of rest; after a chunk alone it would be 500

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    until = time.monotonic() + LONG
    while len(copied) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    copying.join(0.2)
    assert (copied, copying.is_alive()) == ([2] * 4, True)
    gate.hurry()
    copying.join(LONG)
    assert copied[4:] == [0]


def test_closing_waits_for_one_chunk_though_others_want_to_follow(gate: HostGate) -> None:
    gate.share(1.0)
    gate.enter()
    copied: list[tuple[float, float]] = []
    done = threading.Event()

    def copy() -> None:
        while not done.is_set():
            permit = gate.admit()
            began = time.perf_counter()
            time.sleep(0.001)
            copied.append((began, time.perf_counter()))
            gate.release(permit, 0.001)

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    closings = []
    for _ in range(150):
        time.sleep(0.001)
        gate.open(0, 64, None)
        began = time.perf_counter()
        closings.append((began, began + gate.close()))
    done.set()
    copying.join(LONG)
    assert any(end - begin > 0.0001 for begin, end in closings), "nothing was waited for"
    for begin, end in closings:
        assert sum(begin < c[0] and c[1] < end for c in copied) <= 1


def test_a_training_that_is_silent_for_long_is_not_waited_for() -> None:
    began = time.perf_counter()
    gate = HostGate()
    gate.enter()
    gate.patience_secs = 0.05
    permit = gate.admit()
    gate.release(permit, 0.0)
    assert permit.tier == 2
    assert time.perf_counter() - began >= 0.04


def test_a_stream_gate_hands_out_windows_in_order_with_their_marks_and_bytes() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.open(9, 100, Mark(1))  # nobody wants to copy yet
    gate.enter()
    gate.open(0, 100, Mark(1))
    gate.open(1, 0, Mark(1))  # nothing planned
    gate.open(2, 300, Mark(2))
    assert gate.admit() == Permit(1, 0, 100, Mark(1))
    assert gate.admit() == Permit(1, 2, 300, Mark(2))
    gate.hurry()
    assert gate.admit().tier == 0
    gate.relax()
    assert not gate.wanted


def test_a_stream_gate_without_windows_begins_beside_computation_with_what_was_planned_there() -> None:
    gate = StreamGate()
    gate.patience_secs = LONG
    gate.share(1.0, 1000)
    for _ in range(2):  # of each version
        gate.enter()
        assert gate.admit() == Permit(2, nbytes=1000)
        gate.hurry()
        assert gate.admit().tier == 0, "more than was planned began beside computation"
        gate.relax()
    gate.share(1.0, 0)
    gate.enter()
    gate.hurry()
    assert gate.admit().tier == 0


def test_a_stream_gate_hands_out_at_a_pace_beside_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.004
        return now

    monkeypatch.setattr("reft.snapshot.copying.gate.time.perf_counter", clock)
    gate = StreamGate()
    gate.patience_secs = 1e9
    gate.share(0.1, 10**7, 1e8)
    gate.enter()
    began, copied = now, 0
    while copied < 10**7:
        permit = gate.admit()
        assert permit.tier == 2
        assert copied <= 1e8 * (now - began), "ahead of its pace"
        copied += permit.nbytes
    assert copied == 10**7


def test_an_open_gate_knows_when_training_waits() -> None:
    waiting = False
    gate = OpenGate(2, lambda: waiting)
    assert gate.admit().tier == 2
    waiting = True
    assert gate.admit().tier == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread affinity on this system")
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


def test_training_that_hands_a_version_over_is_not_silent(gate: HostGate) -> None:
    gate.patience_secs = LONG
    gate.alive_at -= LONG  # no version was wanted, and no window opened
    gate.enter()
    asking = threading.Thread(target=gate.admit, daemon=True)
    asking.start()
    asking.join(0.1)
    assert asking.is_alive()
    gate.hurry()
    asking.join(LONG)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread affinity on this system")
def test_what_waits_to_run_beside_computation_is_not_kept_on_the_core_of_training() -> None:
    allowed = os.sched_getaffinity(0)
    gate = HostGate()
    gate.patience_secs = LONG
    gate.share(0.0001)
    gate.enter()
    threads: list[int] = []
    rested, pinned, go_on = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        threads.append(threading.get_native_id())
        gate.release(gate.admit(), 0.002)  # a burst: now a rest of 20 s
        rested.set()
        gate.release(gate.admit(), 0.0)  # the window
        pinned.set()
        go_on.wait(LONG)
        gate.admit()

    threading.Thread(target=copy, daemon=True).start()
    assert rested.wait(LONG)
    core, until = min(allowed), time.monotonic() + LONG
    while not gate._core.active and time.monotonic() < until:
        time.sleep(0.01)  # it asks again
    os.sched_setaffinity(0, {core})
    try:
        gate.open(0, 64, None)
        assert pinned.wait(LONG)
        kept = os.sched_getaffinity(threads[0])
        gate.close()
    finally:
        os.sched_setaffinity(0, allowed)
    go_on.set()
    until = time.monotonic() + LONG
    while os.sched_getaffinity(threads[0]) != allowed and time.monotonic() < until:
        time.sleep(0.01)
    assert (kept, os.sched_getaffinity(threads[0])) == ({core}, allowed)
    gate.hurry()


@pytest.mark.parametrize("communicating", [False, True])
def test_what_is_copied_outside_of_windows_hears_that_training_waits(
    gate: HostGate, communicating: bool
) -> None:
    gate.share(1.0)
    if communicating:
        gate.open(None, 64, None)
    permit = gate.admit()
    assert permit.tier == (3 if communicating else 2)
    assert permit.until is not None
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
