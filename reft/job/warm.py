"""Trainers that start warm: forked from a process of the node that has torch and DeepSpeed
imported.

``reft launch`` starts that process, the server, at once, so that it imports while nodes gather.
What it forks becomes a child of the launcher, which is the subreaper of its descendants for that
moment (prctl(2)): it is waited for, signalled and killed like any process that the launcher started
itself. (A child of multiprocessing's ``forkserver`` is the server's: its exit code is lost with the
server, exit handlers of its script do not run, and processes that the script makes by "forkserver"
come from the launcher's server.)

    python -P -m reft.job.warm FD MODULE...
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from reft.engine.on_import import PostImportFinder
from reft.env import ENV_ROOM
from reft.errors import ReftError
from reft.job import script
from reft.job.script import WorkerExit

logger = logging.getLogger(__name__)

DEFAULT_MODULES = (
    *("numpy.random", "torch", "torch.distributed"),
    "torch._dynamo",  # which every optimizer imports when it is made
    *("deepspeed", "deepspeed.runtime.pipe.engine"),
    *("reft", "reft.engine.attach", "reft.engine.session"),
)
READ_AT_IMPORT = (
    *(
        "ATEN_",
        "BLIS_",
        "DNNL_",
        "DS_",
        "GLIBC_",
        "GOMP_",
        "KMP_",
        "LD_",
        "MALLOC_",
        "MKL_",
        "OMP_",
    ),
    *("ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_"),
)
"""How variables begin that libraries read while they are loaded."""
READ_LATER = frozenset({"TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "TORCH_HOME"})
"""Exceptions: torch and DeepSpeed read these only when they compile an operator or download a
model."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 2**18
_READY_SECS, _END_SECS, _THREAD_ENDS_SECS = 600.0, 5.0, 1.0
_STARTS, _UNFIT = 5, 3
_UNDERSTOOD = {
    "cwd",
    "env",
    "stdin",
    "stdout",
    "stderr",
    "text",
    "start_new_session",
    "encoding",
    "errors",
}
_prctl = ctypes.CDLL(None).prctl


def is_read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


@dataclass(frozen=True)
class ForkRequest:
    """A Python program to run: a script and its arguments, or ``-m``, a module and its
    arguments."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    parent: int
    session: bool
    unbuffered: bool
    safe_path: bool  # started with -P

    def command(self) -> list[str]:
        flags = [*(["-u"] if self.unbuffered else []), *(["-P"] if self.safe_path else [])]
        return [sys.executable, *flags, *self.argv]


class ForkError(ReftError, RuntimeError):
    """Nothing was forked: the server has ended, or the request does not fit."""


# -- the process that asks -------------------------------------------------------------------------


def fork(connection: socket.socket, request: ForkRequest, fds: Sequence[int]) -> int:
    """Have a server fork a child of this process with these standard streams; returns its process
    id, or raises ForkError. ``connection``: of type SOCK_SEQPACKET; the first answer waits for
    imports."""
    message = json.dumps(asdict(request)).encode()
    if len(message) > _MOST_BYTES:
        raise ForkError(
            f"arguments and environment take {len(message)} bytes, room for {_MOST_BYTES}"
        )
    read, write = os.pipe()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        connection.settimeout(_READY_SECS)
        socket.send_fds(connection, [message], [*fds, read])
        pid = int(connection.recv(64))
        # A child whose number did not arrive ends: it reads the pipe's end instead of this.
        os.write(write, b"g")
        return pid
    except (OSError, ValueError) as error:
        connection.close()
        raise ForkError("the preloading process has ended: see its messages") from error
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        os.close(read)
        os.close(write)


class ForkingPopen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen`, which forks Python programs where :meth:`server_for` has a
    connection."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        words = [] if more or isinstance(args, str | bytes) else [os.fspath(word) for word in args]
        program = list(dropwhile(lambda word: word in ("-u", "-P"), words[1:]))
        self._flags = words[1 : len(words) - len(program)]
        fits = words[:1] == [sys.executable] and set(options) <= _UNDERSTOOD
        fits = fits and (program[:1] == ["-m"] or not "".join(program[:1]).startswith("-"))
        self._program = program if fits else []
        self._session = bool(options.get("start_new_session"))
        super().__init__(args, *more, **options)

    def server_for(self, program: Sequence[str], env: Mapping[str, str]) -> socket.socket | None:
        """The connection to what forks ``program`` with that environment; None starts it as
        usual."""
        return None

    def failed(self, error: ForkError) -> None:
        """It could not be forked; the program is started as usual, unless this raises."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, pipes = os.fspath(rest[4] or os.getcwd()), rest[5], rest[9:15]
        env = dict(os.environ) if env is None else {str(k): str(v) for k, v in env.items()}
        server = self.server_for(self._program, env) if self._program else None
        if server is not None:
            unbuffered = "-u" in self._flags or bool(env.get("PYTHONUNBUFFERED"))
            safe_path = "-P" in self._flags or bool(env.get("PYTHONSAFEPATH"))
            how = self._session, unbuffered, safe_path
            request = ForkRequest(self._program, env, cwd, os.getpid(), *how)
            ends = enumerate((pipes[0], pipes[3], pipes[5]))
            try:
                self.pid = fork(
                    server, request, [number if end == -1 else end for number, end in ends]
                )
            except ForkError as error:
                self.failed(error)
            else:
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(args, *rest)  # type: ignore[misc]


class ForkServer:
    """Starts the server, and trainers through it. One that has died is started again with the next
    trainers. ``modules`` are imported ahead; ``environ``: of the trainers, as far as all of a node
    share it."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        self._modules, self._environ = tuple(modules), dict(environ)
        self._told: set[str] = set()
        self._starts = 0
        self._start()
        # TorchElastic's trainers are forked where they can be.
        outer: Any = self

        class TrainerPopen(ForkingPopen):
            def server_for(
                self, program: Sequence[str], env: Mapping[str, str]
            ) -> socket.socket | None:
                found: socket.socket | None = outer._server_for(env)
                return found

            def failed(self, error: ForkError) -> None:
                outer._notify(str(error))

        torch_handler: Any = subprocess_handler
        torch_handler.Popen = TrainerPopen

    def _start(self) -> None:
        self._starts += 1
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Asking CUDA or HIP whether there are devices makes a state that no forked process can use:
        # with this, torch asks NVML, or on AMD's devices amdsmi.
        environ = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **self._environ, ENV_ROOM: "x" * 2**14}
        command = [
            sys.executable,
            "-P",
            "-m",
            "reft.job.warm",
            str(theirs.fileno()),
            *self._modules,
        ]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _server_for(self, env: Mapping[str, str]) -> socket.socket | None:
        code = self._process.poll()
        if code not in (None, _UNFIT) and self._starts < _STARTS:
            logger.warning(
                "the preloading process has ended (%s); it is started again", WorkerExit(code, None)
            )
            self._server.close()
            self._start()
        elif code is not None:
            self._notify("the preloading process does not run: see its messages")
            return None
        names = sorted(n for n in {*self._environ, *env} if self._environ.get(n) != env.get(n))
        if others := [n for n in names if is_read_at_import(n)]:
            self._notify(f"{', '.join(others)} differ from the launcher's environment")
            return None
        return self._server

    def _notify(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("trainers start without preloaded imports: %s", reason)

    def close(self) -> None:
        """End the server; trainers stay."""
        self._server.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECS)


# -- the server ------------------------------------------------------------------------------------


class ProcTitle:
    """What /proc shows of this process and its forks as command and environment: the memory into
    which the kernel wrote both, made larger by ENV_ROOM. Make it before libraries keep pointers
    into them."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if name != ENV_ROOM}
        os.environ.clear()
        os.environ.update(kept)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._command, self._command_end, self._environ, self._environ_end = map(int, fields[45:49])

    def show(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Show these from now on; what does not fit is left out."""
        _write(
            self._environ, self._environ_end, [f"{name}={value}" for name, value in environ.items()]
        )
        _write(self._command, self._command_end, argv)


def _write(begin: int, end: int, texts: Sequence[str]) -> None:
    shown = b""
    for text in texts:
        more = os.fsencode(text) + b"\0"
        shown += more if len(shown) + len(more) <= end - begin else b""
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def serve(connection: socket.socket, entry: ProcTitle, path: Sequence[str]) -> ForkRequest:
    """Fork whenever it is asked for, until the other end is closed, which ends this process.
    ``path``: ``sys.path`` without the program's own entry and without PYTHONPATH's. Returns in
    forked processes alone: what to run. They are then as if they had been started for it."""
    gc.collect()
    gc.freeze()  # its pages stay shared
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 4)
        if not message:
            os._exit(0)
        request = ForkRequest(**json.loads(message))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            # before the process exists, which is found by them
            entry.show(request.command(), request.env)
            between, pid = os.getpid(), os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != request.parent or not os.read(fds[3], 1):
                os._exit(1)  # the process that asked was killed, or does not know of this one
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            for fd in (*fds, read, write):
                os.close(fd)
            signal.signal(signal.SIGINT, inherited)
            _become(request, path)
            return request
        os.close(write)
        pid_of_child = os.read(read, 64)
        os.waitpid(between, 0)  # now its child has its new parent
        for fd in (read, *fds):
            os.close(fd)
        connection.send(pid_of_child or b"none")


def _become(request: ForkRequest, path: Sequence[str]) -> None:
    if request.session:
        os.setsid()
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request.unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None
    # Each draws its own numbers, as after a start of its own; `random` sees to it itself.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].random.default_generator.seed()
    importlib.invalidate_caches()
    module = request.argv[0] == "-m"
    first = [request.cwd if module else str(Path(request.argv[0]).resolve().parent)]
    own = [entry for entry in request.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*([] if request.safe_path else first), *own, *path]
    sys.argv = ["-m", *request.argv[2:]] if module else list(request.argv)


def _unfit() -> str:
    """Why this process cannot be forked; "" if it can."""
    if _threads() > 1:
        # OpenBLAS ends its own before a fork, and starts them again when they are needed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads
            if not (pid := os.fork()):
                os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + _THREAD_ENDS_SECS  # the kernel lists a thread a moment longer
        while _threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
    if _threads() > 1:
        return f"starts {_threads() - 1} threads"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (device := os.readlink(f"/proc/self/fd/{fd}")) in ("/dev/kfd", "/dev/nvidia-uvm"):
                return f"opens {device}"
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _heed_variables(request: ForkRequest) -> None:
    """Start this trainer again, cold, where its script sets what a library has read already
    (P1)."""

    def heed(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.putenv" or sys.modules["torch"].distributed.is_initialized():
            return
        name, value = map(os.fsdecode, arguments)
        if is_read_at_import(name) and os.environ.get(name) != value:
            sys.stdout.flush()
            print(
                f"reft: this trainer starts again without preloaded imports: the script sets "
                f"{name}={shlex.quote(value)}, which libraries read at import. Set it where `reft "
                "launch` is "
                "started, or start with --no-warm",
                file=sys.stderr,
                flush=True,
            )
            os.execve(sys.executable, request.command(), request.env)

    sys.addaudithook(heed)


def main(argv: Sequence[str]) -> None:
    """The server. Returns in trainers, after their script."""
    # also while it imports, when it does not see that the connection is closed
    script.die_with_launcher()
    connection, entry = socket.socket(fileno=int(argv[0])), ProcTitle()
    connection.set_inheritable(False)
    path = sys.path[
        len([part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]) :
    ]
    # Trainers hook DeepSpeed themselves.
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, PostImportFinder)]
    for name in argv[1:]:
        try:
            importlib.import_module(name)
        except Exception as error:  # trainers that need it say more
            print(f"reft: {name} cannot be preloaded: {error!r}", file=sys.stderr)
        if why := _unfit():
            print(
                f"reft: {name} {why} during its import: trainers start without preloaded imports",
                file=sys.stderr,
                flush=True,
            )
            sys.exit(_UNFIT)
    with connection:
        request = serve(connection, entry, path)
    _heed_variables(request)
    script.leave(script.main(request.argv[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
