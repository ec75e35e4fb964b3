"""Who is to blame when a trainer ends: its own cause uses a restart, a vanished peer does not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from reft.errors import (
    AuthenticationError,
    ConfigError,
    JobInUseError,
    SizeError,
    TransferError,
    UnrecoverableError,
)
from reft.job.script import Cause, ExitNote, Failure, WorkerExit, is_peer_failure, judge, shell_code

PEER_ERRORS = [
    RuntimeError(
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:39309: "
        "Connection reset by peer. This is typically caused by a remote worker hanging"
    ),
    RuntimeError("[pair.cc:534] Connection closed by peer [10.0.0.1]:41234"),
    RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError("[pair.cc:494] writev [10.0.0.1]:9: Broken pipe"),
    RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistStoreError("wait timeout after 300000ms, keys: /0//cpu//1/2"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp: remote process exited or network error"),
    dist.DistBackendError("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
    TransferError("block pp0.dp1.tp0 was lost on the way from node3"),
]
OWN_ERRORS = [
    ValueError("Connection reset by peer"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    # torch's words on AMD's devices (ROCm)
    RuntimeError("HIP error: an illegal memory access was encountered"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled hip error, socket closed"),
    RuntimeError("shape mismatch"),
    ConnectionResetError(104, "Connection reset by peer"),  # the user's own download
    dist.DistBackendError("NCCL error: ncclInvalidUsage, Duplicate GPU detected : rank 0 and rank 1"),
    AuthenticationError("foreign secret"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*PEER_ERRORS, *OWN_ERRORS], ids=lambda e: repr(e)[:60])
def test_lost_communication_is_a_peers_fault_and_everything_else_its_own(error: BaseException) -> None:
    assert is_peer_failure(error) is (error in PEER_ERRORS)


def test_what_it_was_raised_from_counts() -> None:
    lost = dist.DistNetworkError("Connection was likely closed")
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = lost
    left = SystemExit(1)  # except Exception: traceback.print_exc(); sys.exit(1)
    left.__context__ = wrapped
    assert is_peer_failure(left)
    assert is_peer_failure(ExceptionGroup("several", [ValueError("a"), lost]))
    hidden = ValueError("raise ... from None")
    hidden.__context__, hidden.__suppress_context__ = lost, True
    assert not is_peer_failure(hidden)


def test_a_circular_chain_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not is_peer_failure(first)


def test_notes_survive_the_way_through_the_file(tmp_path: Path) -> None:
    note = ExitNote.of(dist.DistNetworkError("Connection reset\nC++ stack ..."))
    note.write(tmp_path, 3)
    assert ExitNote.read(tmp_path, 3) == note
    assert note == ExitNote(Cause.PEER, "DistNetworkError: Connection reset")
    assert ExitNote.read(tmp_path, 0) is None
    (tmp_path / "0.json").write_text('{"cause": "pe')
    assert ExitNote.read(tmp_path, 0) is None
    assert len(ExitNote.of(ValueError("x" * 10_000)).error) < 300


PEER = WorkerExit(75, ExitNote(Cause.PEER, "RuntimeError: Connection closed by peer"))


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (WorkerExit(1, ExitNote(Cause.OWN, "ValueError: x")), Cause.OWN),
        (WorkerExit(1, None), Cause.OWN),
        (WorkerExit(2, ExitNote.of(ConfigError("write this"))), Cause.REFUSED),
        (WorkerExit(2, ExitNote.of(UnrecoverableError("no version is left"))), Cause.REFUSED),
        (WorkerExit(1, ExitNote.of(ModuleNotFoundError("No module named 'x'"))), Cause.REFUSED),
        (WorkerExit(1, ExitNote.of(SyntaxError("invalid syntax"))), Cause.REFUSED),
        (WorkerExit(2, None), Cause.REFUSED),  # argparse; no such script
        (WorkerExit(2, ExitNote.of(SizeError("other numbers do"))), Cause.SIZE),
        (
            WorkerExit(1, ExitNote.of(RuntimeError("num_stages (2) must divide distributed world size (3)"))),
            Cause.SIZE,
        ),
        (WorkerExit(1, ExitNote.of(JobInUseError("later"))), Cause.OWN),
        (WorkerExit(-signal.SIGKILL, None), Cause.OWN),  # out of memory
        (WorkerExit(-signal.SIGSEGV, None), Cause.OWN),
        (WorkerExit(-signal.SIGABRT, None), Cause.UNCLEAR),  # NCCL's watchdog, or its own bug
        (WorkerExit(143, None), Cause.STOPPED),
        (WorkerExit(75, None), Cause.PEER),
        (PEER, Cause.PEER),
        (WorkerExit(None, PEER.note), Cause.PEER),
    ],
)
def test_every_way_to_end_has_one_cause(end: WorkerExit, cause: Cause) -> None:
    assert end.cause is cause


def test_one_own_failure_makes_the_nodes_failure_its_own() -> None:
    killed = WorkerExit(-signal.SIGKILL, None)
    own = Failure(Cause.OWN, 1, 137, "local rank 1: killed by SIGKILL")
    assert judge({0: PEER, 1: killed, 2: PEER}) == own
    refused = WorkerExit(2, ExitNote.of(ConfigError("write this")))
    said = Failure(Cause.REFUSED, 1, 2, "local rank 1: ConfigError: write this")
    assert judge({0: killed, 1: refused}) == said
    assert judge({0: PEER, 1: PEER}).cause is Cause.PEER
    assert judge({1: PEER, 0: WorkerExit(143, None)}).cause is Cause.PEER


def test_exit_codes_are_the_shells() -> None:
    assert [shell_code(WorkerExit(c, None)) for c in (3, -11, None)] == [3, 139, 1]
    # That a launcher was told to stop, or cut off, is said of it alone.
    assert [shell_code(WorkerExit(c, None)) for c in (143, -15, 130, -2, 129, 131, 76)] == [1] * 7
    assert shell_code(WorkerExit(None, PEER.note)) == 75
    assert shell_code(WorkerExit(None, ExitNote(Cause.REFUSED, "ConfigError: x"))) == 2
