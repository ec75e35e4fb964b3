"""Warm starts: trainers are forked from a process that has imported torch and DeepSpeed.

``reft launch`` starts that process, the fork server, at once, so that it imports while the nodes
gather. The launcher is the subreaper of its descendants (prctl(2)) during a fork, so it becomes the
parent of a forked process. It waits for that process, signals and kills it like any process that it
started itself.

multiprocessing's ``forkserver`` does not fit: its children belong to the server, so their exit
codes are lost with it; exit handlers of the script do not run; and processes that the script itself
makes by "forkserver" would come from the launcher's server.

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

logger = logging.getLogger("reft.job.warm")  # Run with -m, where __name__ is "__main__"

DEFAULT_MODULES = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # Every optimizer imports it when it is constructed
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "reft",
    "reft.engine.attach",
    "reft.engine.session",
)
READ_AT_IMPORT = (
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
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
)
"""Prefixes of variables that libraries read while they are loaded."""
READ_LATER = frozenset({"TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "TORCH_HOME"})
"""Exceptions, which torch and DeepSpeed read later: to compile an operator or download a model."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_REQUEST_BYTES = 2**18
_ENTRY_ROOM_BYTES = 2**14
_READY_SECS, _END_SECS, _THREAD_ENDS_SECS = 600.0, 5.0, 1.0
_MAX_STARTS = 5
_EX_NOT_FORKABLE = 3
_POPEN_OPTIONS = {
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
"""Options of Popen that a fork supports; a program with any other option is started normally."""
_DEVICE_FILES = ("/dev/kfd", "/dev/nvidia-uvm")
_prctl = ctypes.CDLL(None).prctl


def is_read_at_import(name: str) -> bool:
    """Whether a variable may already have been read by the libraries that are imported."""
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


@dataclass(frozen=True)
class ForkRequest:
    """A Python program to run in a forked process."""

    argv: list[str]  # A script and its arguments, or ``-m``, a module and its arguments
    env: dict[str, str]
    cwd: str
    parent: int
    session: bool  # The program gets its own session
    unbuffered: bool
    safe_path: bool  # The program is started with -P

    def command(self) -> list[str]:
        """The command line that would start the program without a fork server."""
        flags = []
        if self.unbuffered:
            flags.append("-u")
        if self.safe_path:
            flags.append("-P")
        return [sys.executable, *flags, *self.argv]


class ForkError(ReftError, RuntimeError):
    """No process was forked: the server has ended, or the request is too large."""


# -- the client ------------------------------------------------------------------------------------


def fork(connection: socket.socket, request: ForkRequest, fds: Sequence[int]) -> int:
    """Let a server fork a child of this process.

    Args:
        connection: a SOCK_SEQPACKET socket to the server. The first reply comes after its imports.
        request: the program.
        fds: the program's standard streams.

    Returns:
        The process id of the child.

    Raises:
        ForkError: no process was forked.
    """
    message = json.dumps(asdict(request)).encode()
    if len(message) > _MAX_REQUEST_BYTES:
        raise ForkError(
            f"arguments and environment take {len(message)} bytes, room for {_MAX_REQUEST_BYTES}"
        )
    read, write = os.pipe()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        connection.settimeout(_READY_SECS)
        socket.send_fds(connection, [message], [*fds, read])
        pid = int(connection.recv(64))
        # The child waits for this byte. If its process id did not arrive here, it reads the end of
        # the pipe instead and exits: a child that its parent does not know must not run.
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
    """:class:`subprocess.Popen`, but Python programs are forked if :meth:`server_for` allows it."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        words = [] if more or isinstance(args, str | bytes) else [os.fspath(word) for word in args]
        program = list(dropwhile(lambda word: word in ("-u", "-P"), words[1:]))
        self._flags = words[1 : len(words) - len(program)]
        is_python = words[:1] == [sys.executable] and set(options) <= _POPEN_OPTIONS
        is_module = program[:1] == ["-m"]
        has_other_flags = not is_module and "".join(program[:1]).startswith("-")
        self._program = program if is_python and not has_other_flags else []
        self._session = bool(options.get("start_new_session"))
        super().__init__(args, *more, **options)

    def server_for(self, program: Sequence[str], env: Mapping[str, str]) -> socket.socket | None:
        """The connection to a server that forks ``program``; None to start it normally."""
        return None

    def failed(self, error: ForkError) -> None:
        """Called if the fork failed; the program is then started normally unless this raises."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # The indices are positions of Popen's private method, which is undocumented.
        cwd, env, pipes = os.fspath(rest[4] or os.getcwd()), rest[5], rest[9:15]
        env = dict(os.environ) if env is None else {str(k): str(v) for k, v in env.items()}
        server = self.server_for(self._program, env) if self._program else None
        if server is not None:
            request = ForkRequest(
                self._program,
                env,
                cwd,
                os.getpid(),
                session=self._session,
                unbuffered="-u" in self._flags or bool(env.get("PYTHONUNBUFFERED")),
                safe_path="-P" in self._flags or bool(env.get("PYTHONSAFEPATH")),
            )
            streams = (pipes[0], pipes[3], pipes[5])  # -1: the stream of this process
            fds = [number if fd == -1 else fd for number, fd in enumerate(streams)]
            try:
                self.pid = fork(server, request, fds)
            except ForkError as error:
                self.failed(error)
            else:
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(args, *rest)  # type: ignore[misc]


class ForkServer:
    """Starts the server, and makes TorchElastic start trainers through it.

    If the server has died, it is restarted with the next trainers.

    Args:
        modules: modules that the server imports.
        environ: environment variables that all trainers of the node share.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        self._modules, self._environ = tuple(modules), dict(environ)
        self._logged: set[str] = set()
        self._starts = 0
        self._start()
        outer: Any = self

        class TrainerPopen(ForkingPopen):
            def server_for(
                self, program: Sequence[str], env: Mapping[str, str]
            ) -> socket.socket | None:
                server: socket.socket | None = outer._server_for(env)
                return server

            def failed(self, error: ForkError) -> None:
                outer._warn(str(error))

        torch_handler: Any = subprocess_handler
        torch_handler.Popen = TrainerPopen

    def _start(self) -> None:
        self._starts += 1
        self._server, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {
            # After a query of CUDA or HIP for devices, a process cannot be forked. With this
            # variable, torch queries NVML instead, or amdsmi on AMD's devices.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            **self._environ,
            ENV_ROOM: "x" * _ENTRY_ROOM_BYTES,
        }
        command = [sys.executable, "-P", "-m", "reft.job.warm", str(child_end.fileno())]
        with child_end:
            self._process = subprocess.Popen(
                [*command, *self._modules],
                env=environ,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _server_for(self, env: Mapping[str, str]) -> socket.socket | None:
        """The connection to the server; None if trainers with this environment start cold."""
        code = self._process.poll()
        if code not in (None, _EX_NOT_FORKABLE) and self._starts < _MAX_STARTS:
            logger.warning(
                "the preloading process has ended (%s); starting it again",
                WorkerExit(code, None),
            )
            self._server.close()
            self._start()
        elif code is not None:
            self._warn("the preloading process is not running: see its messages")
            return None
        different = sorted(
            name
            for name in {*self._environ, *env}
            if self._environ.get(name) != env.get(name) and is_read_at_import(name)
        )
        if different:
            self._warn(f"{', '.join(different)} differ from the launcher's environment")
            return None
        return self._server

    def _warn(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("trainers start without preloaded imports: %s", reason)

    def close(self) -> None:
        """End the server; the trainers continue."""
        self._server.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECS)


# -- the server ------------------------------------------------------------------------------------


class ProcTitle:
    """The command and environment that /proc shows for this process and its forks.

    The kernel reads both from the memory where it wrote them when the process started. ENV_ROOM
    makes that memory large enough for other values. Construct this object before libraries keep
    pointers into the memory.
    """

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if name != ENV_ROOM}
        os.environ.clear()
        os.environ.update(kept)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._command, self._command_end, self._environ, self._environ_end = map(int, fields[45:49])

    def show(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Show these values from now on; values that do not fit are left out."""
        variables = [f"{name}={value}" for name, value in environ.items()]
        _write(self._environ, self._environ_end, variables)
        _write(self._command, self._command_end, argv)


def _write(start: int, end: int, texts: Sequence[str]) -> None:
    """Write null-terminated strings into this process's memory, from ``start`` up to ``end``."""
    content = b""
    for text in texts:
        encoded = os.fsencode(text) + b"\0"
        if len(content) + len(encoded) <= end - start:
            content += encoded
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def serve(connection: socket.socket, title: ProcTitle, path: Sequence[str]) -> ForkRequest:
    """Fork at every request. When the other side closes the connection, this process exits.

    Args:
        connection: the connection to the launcher.
        title: command and environment that /proc shows for this process.
        path: ``sys.path`` without the program's own entry and those of PYTHONPATH.

    Returns:
        The program to run, in forked processes only. Such a process is set up as if it had been
        started for the program.
    """
    gc.collect()
    gc.freeze()  # The collector then does not write to these objects, so their pages stay shared
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 4)
        if not message:
            os._exit(0)
        request = ForkRequest(**json.loads(message))
        read, write = os.pipe()
        # Fork twice: when the intermediate process has exited, the launcher, which is the
        # subreaper, becomes the parent of the second one.
        between = os.fork()
        if between == 0:
            # Set before the program's process exists, because other tools find processes by it.
            title.show(request.command(), request.env)
            between, pid = os.getpid(), os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != request.parent or not os.read(fds[3], 1):
                os._exit(1)  # The launcher was killed, or did not receive the process id
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            for fd in (*fds, read, write):
                os.close(fd)
            signal.signal(signal.SIGINT, inherited)
            _become(request, path)
            return request
        os.close(write)
        child_pid = os.read(read, 64)
        # From here on the launcher is the child's parent, and may wait for it.
        os.waitpid(between, 0)
        for fd in (read, *fds):
            os.close(fd)
        connection.send(child_pid or b"none")


def _become(request: ForkRequest, path: Sequence[str]) -> None:
    """Make this process look like one that was started for the program."""
    if request.session:
        os.setsid()
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request.unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None
    # Forks of one process would draw the same numbers. `random` reseeds itself after a fork.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].random.default_generator.seed()
    importlib.invalidate_caches()
    is_module = request.argv[0] == "-m"
    first = request.cwd if is_module else str(Path(request.argv[0]).resolve().parent)
    entries = [] if request.safe_path else [first]
    entries += [e for e in request.env.get("PYTHONPATH", "").split(os.pathsep) if e]
    sys.path[:] = [*entries, *path]
    sys.argv = ["-m", *request.argv[2:]] if is_module else list(request.argv)


def reason_not_forkable() -> str:
    """Why this process cannot be forked; empty if it can be."""
    if _count_threads() > 1:
        # OpenBLAS ends its threads before a fork and restarts them when it needs them. A fork that
        # exits at once shows whether other threads are left.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about threads here
            pid = os.fork()
            if not pid:
                os._exit(0)
        os.waitpid(pid, 0)
        # The kernel lists threads for a while after they have ended.
        deadline = time.monotonic() + _THREAD_ENDS_SECS
        while _count_threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
    if _count_threads() > 1:
        return f"starts {_count_threads() - 1} threads"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{fd}")
            if file in _DEVICE_FILES:
                return f"opens {file}"
    return ""


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _restart_on_variables(request: ForkRequest) -> None:
    """Restart this trainer cold if its script sets a variable that was read already (P1)."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.putenv" or sys.modules["torch"].distributed.is_initialized():
            return
        name, value = map(os.fsdecode, arguments)
        if is_read_at_import(name) and os.environ.get(name) != value:
            sys.stdout.flush()
            print(
                f"reft: this trainer starts again without preloaded imports: the script sets "
                f"{name}={shlex.quote(value)}, which libraries read at import. Set it where `reft "
                "launch` is started, or start with --no-warm",
                file=sys.stderr,
                flush=True,
            )
            os.execve(sys.executable, request.command(), request.env)

    sys.addaudithook(hook)


def main(argv: Sequence[str]) -> None:
    """Run the server. Returns in trainers only, after their script."""
    # Needed while the server imports modules and does not read from the connection.
    script.die_with_launcher()
    connection, title = socket.socket(fileno=int(argv[0])), ProcTitle()
    connection.set_inheritable(False)
    own_entries = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = sys.path[len(own_entries) :]
    # Trainers install the import hook themselves, so the server must not have it.
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, PostImportFinder)]
    for name in argv[1:]:
        try:
            importlib.import_module(name)
        except Exception as error:  # A trainer that needs the module reports the whole error
            print(f"reft: {name} cannot be preloaded: {error!r}", file=sys.stderr)
        if reason := reason_not_forkable():
            print(
                f"reft: {name} {reason} during its import: trainers start without preloaded "
                "imports",
                file=sys.stderr,
                flush=True,
            )
            sys.exit(_EX_NOT_FORKABLE)
    with connection:
        request = serve(connection, title, path)
    _restart_on_variables(request)
    script.leave(script.main(request.argv[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
