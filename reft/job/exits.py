"""Why a trainer ended: by its own cause, or because another one vanished.

TorchElastic counts every failed worker group against ``--max-restarts``, so one lost node uses up a
restart on each of its peers. Here the trainer says what it died of (:class:`ExitNote`, written by
:mod:`reft.job.script` when an exception leaves the script) and the agent judges all trainers of the
node together (:func:`judge`). Nothing heavy is imported: trainers load this before the user's script sets
its environment.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from reft.refusal import EX_REFUSED, is_refusal

EXITS_PREFIX = "exits-"  # names of the directories that launchers make for them in the job's directory

EX_PEER_FAILED = 75  # Exit code of a trainer that lost a peer (``EX_TEMPFAIL``: try again)

EX_FENCED = 76
"""Exit code of a launcher that was cut off while another node took its place: the job goes on without it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that tell a launcher to stop; its exit code is then 128 + n, whatever its trainers' are."""

_LAUNCHERS_CODES = frozenset({EX_FENCED, *(128 + number for number in STOP_SIGNALS)})
"""What they say of a launcher, a trainer's end cannot mean."""

STOPPED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a trainer that was told to stop and did so in good order."""


class Cause(StrEnum):
    REFUSED = "refused"
    """reft refused what the script asks for or what is left of the job, or the script cannot run (exit code 2
    of a command line): the same in every life, so that the job ends at once."""
    SIZE = "size"  # Refused for the number of nodes: free, another number may do
    OWN = "own"  # Its own error, exit code or signal: uses one of ``--max-restarts``
    PEER = "peer"  # Communication broke because another rank vanished: free
    STOPPED = "stopped"  # a peer was told to stop and took the whole job to a last commit: free
    UNCLEAR = "unclear"
    """Aborted by a communication library's watchdog, or by its own code: decided by what the other
    nodes report (:func:`reft.job.agreement.agree`)."""


EXIT_CODES = {Cause.PEER: EX_PEER_FAILED, Cause.REFUSED: EX_REFUSED, Cause.SIZE: EX_REFUSED}
"""Of a trainer that ended by an exception; any other: 1."""
_OF_THE_SCRIPT = (SyntaxError, ModuleNotFoundError)  # Errors that every start of it ends with
_ERROR_CHARS = 240
_PEER_TYPES = frozenset({"DistNetworkError", "DistStoreError", "TransferError"})
_OWN_BACKEND_ERRORS = re.compile(
    r"ncclInvalid(Usage|Argument)|Duplicate GPU|unhandled (cuda|hip) error|(CUDA|HIP) error|out of memory",
    re.I,
)
_OF_DEEPSPEEDS_STAGES = re.compile(r"num_stages \(\d+\) must divide distributed world size")
_PEER_MESSAGES = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket (timeout|closed|error)"
    r"|failed to recv, got 0 bytes|connectFullMesh failed|Application timeout caused pair closure"
    r"|gloo.*time[ds]? ?out|timed out waiting \d+ ?ms for (recv|send)|monitoredBarrier"
    r"|nccl(System|Remote|Internal|InProgress)Error|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout|remote process exited or there was a network error"
    r"|collective operation timeout|MPI_ERR_PROC_FAILED",
    re.I | re.S,
)


def is_size_refusal(error: BaseException) -> bool:
    ours = any(c.__name__ == "SizeError" and c.__module__ == "reft.errors" for c in type(error).__mro__)
    return ours or bool(_OF_DEEPSPEEDS_STAGES.match(str(error)))


def is_peer_failure(error: BaseException) -> bool:
    """Whether ``error``, or anything it was raised from or while handling, is lost communication. A wrong
    "yes" costs a bounded number of free restarts, a wrong "no" may end the job."""
    return any(_is_communication_error(e) for e in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.append(current.__cause__)
        if not current.__suppress_context__:
            waiting.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)


def _is_communication_error(error: BaseException) -> bool:
    # Told by name, so that torch need not be imported.
    names = {c.__name__ for c in type(error).__mro__ if c.__module__.split(".")[0] in ("torch", "reft")}
    if names & _PEER_TYPES:
        return True
    if "DistBackendError" in names:
        return not _OWN_BACKEND_ERRORS.search(str(error))
    # gloo and torch's C++ raise plain RuntimeErrors; a user's own ConnectionError is an OSError.
    return isinstance(error, RuntimeError) and bool(_PEER_MESSAGES.search(str(error)))


@dataclass(frozen=True)
class ExitNote:
    """What a trainer says about its end; ``error``: type and first line of the message, shortened."""

    cause: Cause
    error: str

    @classmethod
    def of(cls, error: BaseException) -> ExitNote:
        other = Cause.PEER if is_peer_failure(error) else Cause.OWN
        cause = Cause.REFUSED if is_refusal(error) or isinstance(error, _OF_THE_SCRIPT) else other
        if is_size_refusal(error):
            cause = Cause.SIZE
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return cls(cause, text if len(text) <= _ERROR_CHARS else text[: _ERROR_CHARS - 1] + "…")

    def write(self, directory: Path, local_rank: int) -> None:
        from reft.durable import whole_file

        with whole_file(directory / f"{local_rank}.json", sync=False) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path, local_rank: int) -> ExitNote | None:
        try:
            fields = json.loads((directory / f"{local_rank}.json").read_text())
            return cls(Cause(fields["cause"]), str(fields["error"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class WorkerExit:
    """How one local trainer ended: ``exit_code`` as ``Popen.returncode`` (negative: signal), None: it is
    still ending; and what it said, if it could."""

    exit_code: int | None
    note: ExitNote | None

    @property
    def cause(self) -> Cause:
        if self.note is not None:
            return self.note.cause
        if self.exit_code == EX_PEER_FAILED:
            return Cause.PEER
        if self.exit_code == EX_REFUSED:
            return Cause.REFUSED
        if self.exit_code in STOPPED_CODES:
            return Cause.STOPPED
        if self.exit_code == -signal.SIGABRT:
            return Cause.UNCLEAR
        return Cause.OWN

    def __str__(self) -> str:
        if self.note is not None:
            return self.note.error
        if self.exit_code is None:
            return "still ending"
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True)
class Failure:
    """The judgement over the trainers of a node that ended before the agent stopped the rest; ``exit_code``
    is what the launcher exits with if nothing restarts."""

    cause: Cause
    local_rank: int
    exit_code: int
    reason: str


def judge(exits: Mapping[int, WorkerExit]) -> Failure:
    """Judge the trainers of one node that failed by themselves, at least one, by local rank."""
    order = (Cause.REFUSED, Cause.SIZE, Cause.OWN, Cause.UNCLEAR, Cause.PEER, Cause.STOPPED)
    rank, worst = min(exits.items(), key=lambda item: (order.index(item[1].cause), item[0]))
    return Failure(worst.cause, rank, shell_code(worst), f"local rank {rank}: {worst}")


def shell_code(end: WorkerExit) -> int:
    """What a launcher exits with that gives up because of a trainer: its code as a shell reports it, 128 + n
    for signal n; 1 where that is 0, or says of a launcher that it was told to stop or cut off."""
    if end.exit_code is None or end.exit_code == 0:
        return EXIT_CODES.get(end.cause, 1)
    code = 128 - end.exit_code if end.exit_code < 0 else end.exit_code
    return 1 if code in _LAUNCHERS_CODES else code


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
