"""Starts Python programs by forking a process that has imported what they need.

Importing torch and DeepSpeed takes a process seconds, on a cluster's file system minutes when all ranks do
it at once. A server imports once and keeps one thread; asked over a socket, it forks. What it forks is a
process of its own, and a child of who asked: waited for, signalled and killed like any other. The one who
asks becomes the subreaper of its descendants for that moment (prctl(2)), and the kernel gives it the orphan.

- :class:`ForkingPopen` is :class:`subprocess.Popen`, which asks a :class:`ForkClient` where it can.
- :func:`serve` is the server's loop; it returns in forked processes, which call :func:`become`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reft.errors import ReftError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 2**18
_ANSWER_SECS = 30.0
_FDS = 4
"""Standard input, output, error, and the pipe on which the child is told to go on."""
_GO = b"g"
_prctl = ctypes.CDLL(None).prctl


class ForkError(ReftError, RuntimeError):
    """The server forked nothing: it has ended, or the request does not fit."""


@dataclass(frozen=True)
class ForkRequest:
    """A program to run.

    Args:
        argv: a script and its arguments, or ``-m``, a module and its arguments.
        env: the whole environment.
        cwd: the working directory.
        parent: process id of who asks.
        session: whether the process leads a session of its own.
        unbuffered: as ``python -u``.
        dies: whether the process is killed when its parent is.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    parent: int
    session: bool = False
    unbuffered: bool = False
    dies: bool = False


# -- who asks --------------------------------------------------------------------------------------


class ForkClient:
    """A connection to a server.

    Args:
        connection: a socket pair's end, of type SOCK_SEQPACKET.
        answer_secs: for an answer; the first one waits for the server's imports.
    """

    def __init__(self, connection: socket.socket, answer_secs: float = _ANSWER_SECS) -> None:
        self.owner = os.getpid()
        self._connection = connection
        self._connection.settimeout(answer_secs)
        self._lock = threading.Lock()

    def start(self, request: ForkRequest, fds: Sequence[int]) -> int:
        """Fork a child of this process; returns its process id.

        Args:
            request: what it runs; ``parent`` is this process.
            fds: its standard input, output and error.

        Raises:
            ForkError: nothing was started.
        """
        read, write = os.pipe()
        try:
            pid = self._ask(request, [*fds, read])
            # A child whose number did not arrive ends: it reads the pipe's end instead of this.
            os.write(write, _GO)
            return pid
        finally:
            os.close(read)
            os.close(write)

    def _ask(self, request: ForkRequest, fds: Sequence[int]) -> int:
        message = json.dumps(asdict(request)).encode()
        if len(message) > _MOST_BYTES:
            raise ForkError(f"arguments and environment take {len(message)} bytes, room for {_MOST_BYTES}")
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [message], list(fds))
                answer = int(self._connection.recv(64))
            except (OSError, ValueError) as error:
                self._connection.close()
                raise ForkError("the process that forks programs has ended") from error
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise ForkError("the forked process was killed before it ran")
        return answer

    def close(self) -> None:
        self._connection.close()


class ForkingPopen(subprocess.Popen[Any], ABC):
    """:class:`subprocess.Popen`, forked where :meth:`client_for` has a client; started as usual elsewhere."""

    dies = False
    """Whether a forked process is killed when this one is."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        self._plain = bool(more) or not set(options) <= _UNDERSTOOD
        self._new_session = bool(options.get("start_new_session"))
        super().__init__(args, *more, **options)

    @abstractmethod
    def client_for(self, program: Sequence[str], env: Mapping[str, str]) -> ForkClient | None:
        """The client that starts ``program`` with that environment; None starts it as usual."""

    def failed(self, error: ForkError) -> None:
        """The client could not start it; the program is started as usual, unless this raises."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        program = None if self._plain else _program(args)
        env = dict(os.environ) if env is None else {str(k): str(v) for k, v in env.items()}
        client = self.client_for(program, env) if program is not None else None
        if client is not None:
            assert program is not None
            request = ForkRequest(
                argv=program,
                env=env,
                cwd=os.fspath(cwd or os.getcwd()),
                parent=os.getpid(),
                session=self._new_session,
                unbuffered="-u" in args[: -len(program)] or bool(env.get("PYTHONUNBUFFERED")),
                dies=self.dies,
            )
            own = (pipes[0], pipes[3], pipes[5])
            try:
                self.pid = client.start(request, [n if end == -1 else end for n, end in enumerate(own)])
            except ForkError as error:
                self.failed(error)
            else:
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(args, *rest)  # type: ignore[misc]


_UNDERSTOOD = {"cwd", "env", "stdin", "stdout", "stderr", "text", "start_new_session", "encoding", "errors"}


def _program(args: Any) -> list[str] | None:
    """The script and its arguments, or ``-m`` and a module's, if that is all there is to the command."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in args]
    if words[:1] != [sys.executable]:
        return None
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    forked = len(words) > 1 if words[:1] == ["-m"] else bool(words) and not words[0].startswith("-")
    return words if forked else None


# -- the server ------------------------------------------------------------------------------------


def freeze() -> None:
    """Keep what is loaded out of the garbage collector, so that its pages stay shared after a fork."""
    gc.collect()
    gc.freeze()


def serve(
    connection: socket.socket, *, before: Callable[[ForkRequest], None] | None = None
) -> tuple[ForkRequest, list[int]]:
    """Fork whenever it is asked for, until the other end is closed, which ends this process.

    Args:
        connection: the other end of a client's.
        before: called before the process exists, in one that nobody sees.

    Returns:
        In forked processes alone: what to run, and its standard input, output and error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, _FDS)
        if not message:
            os._exit(0)
        request = ForkRequest(**json.loads(message))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(read)
            if before is not None:
                before(request)
            between, pid = os.getpid(), os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            os.close(write)
            while os.getppid() == between:
                time.sleep(0.001)
            if request.dies:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != request.parent or os.read(fds[3], 1) != _GO:
                os._exit(1)  # who asked has been killed, or does not know of this process
            os.close(fds[3])
            return request, fds[:3]
        os.close(write)
        pid_of_child = os.read(read, 64)
        os.close(read)
        os.waitpid(between, 0)  # now its child has its new parent
        for fd in fds:
            os.close(fd)
        connection.send(pid_of_child or b"0")


def become(request: ForkRequest, fds: Sequence[int], path: Sequence[str]) -> list[str]:
    """Make this forked process one that was started as usual, up to running the program.

    Args:
        request: what to run.
        fds: standard input, output, error.
        path: ``sys.path`` without its first entry and without PYTHONPATH's.

    Returns:
        The program: ``request.argv``; the first entries of ``sys.path`` and ``sys.argv`` are as for it.
    """
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    if request.session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request.unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does so itself
    own = [entry for entry in request.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    importlib.invalidate_caches()
    argv = list(request.argv)
    if argv[0] == "-m":
        sys.path[:] = [os.getcwd(), *own, *path]
        sys.argv = ["-m", *argv[2:]]
    else:
        sys.path[:] = [os.path.dirname(os.path.realpath(argv[0])), *own, *path]
        sys.argv = list(argv)
    return argv
