"""Warm starts: trainers are forked from a process that has imported torch and DeepSpeed.

``reft launch`` starts that process, the fork server, before anything else, so that the imports run
while the launcher waits for other nodes. During a fork the launcher is the subreaper of its
descendants (prctl(2)). Thus the kernel makes it the parent of the forked trainer, and it can wait
for the trainer, signal and kill it as if it had started the trainer itself.

multiprocessing's ``forkserver`` does not fit: its children belong to the server, so their exit
codes are lost if the server dies; exit handlers of the script do not run; and if the script itself
uses the start method "forkserver", its processes would come from the launcher's server.

Command line of the server, where FD is its socket to the launcher:

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
    "torch._dynamo",  # Otherwise imported when the first optimizer is constructed
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
"""Prefixes of environment variables that libraries read while they are loaded."""
READ_LATER = frozenset({"TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "TORCH_HOME"})
"""Variables that match READ_AT_IMPORT, but are read only to compile an operator or load a model."""
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
"""Options of Popen that work with the fork server. With any other, a program is not forked."""
_DEVICE_FILES = ("/dev/kfd", "/dev/nvidia-uvm")
_prctl = ctypes.CDLL(None).prctl


def is_read_at_import(name: str) -> bool:
    """Whether libraries may have read an environment variable when they were imported."""
    return name.startswith(READ_AT_IMPORT) and name not in READ_LATER


@dataclass(frozen=True)
class ForkRequest:
    """A Python program to run in a forked process."""

    argv: list[str]  # A script and its arguments, or ``-m``, a module and its arguments
    env: dict[str, str]
    cwd: str
    parent: int  # Process id of the requesting process, which becomes the parent
    session: bool  # Whether the program gets its own session (setsid)
    unbuffered: bool  # Whether the program is started with -u
    safe_path: bool  # Whether the program is started with -P

    def command(self) -> list[str]:
        """Return the command line that would start the program without a fork server."""
        flags = []
        if self.unbuffered:
            flags.append("-u")
        if self.safe_path:
            flags.append("-P")
        return [sys.executable, *flags, *self.argv]


class ForkError(ReftError, RuntimeError):
    """Raised if no process was forked: the server has ended, or the request is too large."""


# -- the client ------------------------------------------------------------------------------------


def fork(connection: socket.socket, request: ForkRequest, fds: Sequence[int]) -> int:
    """Let a fork server make a child of this process.

    Args:
        connection: a SOCK_SEQPACKET socket to the server. The server replies to the first request
            only when its imports are done.
        request: the program to run in the child.
        fds: descriptors of the program's standard input, output and error.

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
        # The child waits for this byte before it runs the program. If this process has not learnt
        # the child's process id, the pipe is closed without the byte, and the child exits: a child
        # whose parent does not know it must not run.
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
        """Return the connection to a server that forks ``program``; None to start it normally."""
        return None

    def failed(self, error: ForkError) -> None:
        """Called if the fork failed; the program is then started normally unless this raises."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # The indices are argument positions of Popen's private, undocumented _execute_child.
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
            streams = (pipes[0], pipes[3], pipes[5])  # -1: inherit the stream of this process
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
    """Starts the fork server, and makes TorchElastic start trainers through it.

    A server that has died is started again when the next trainers start.

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
            # A process that has queried CUDA or HIP for devices cannot be forked safely. With this
            # variable, torch queries NVML (on AMD's devices amdsmi) instead.
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
        """Return the connection to the server, which is started again if it has died.

        Returns:
            The connection; None if trainers with the environment ``env`` must start without
            preloaded imports.
        """
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
    """Changes the command and environment that /proc shows for this process and its forks.

    The kernel reads both from the memory where it wrote them when the process started. The
    launcher makes that memory large enough for longer values by a padding variable, ENV_ROOM.
    Construct this object before libraries keep pointers into the memory.
    """

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if name != ENV_ROOM}
        os.environ.clear()
        os.environ.update(kept)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._command, self._command_end, self._environ, self._environ_end = map(int, fields[45:49])

    def show(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Make /proc show the given values; values that do not fit are left out."""
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
    """Serve fork requests. In the server this function never returns; in a forked process it does.

    When the launcher closes the connection, the server process exits.

    Args:
        connection: the connection to the launcher.
        title: changes the command and environment that /proc shows for a forked process.
        path: ``sys.path`` without the entries that depend on the program and on PYTHONPATH.

    Returns:
        In a forked process: the program to run. The process is already set up (environment,
        directory, streams, ``sys.path``) as if it had been started for this program.
    """
    gc.collect()
    gc.freeze()  # Exempt existing objects from collection: writes would unshare their pages
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 4)
        if not message:
            os._exit(0)
        request = ForkRequest(**json.loads(message))
        read, write = os.pipe()
        # Fork twice: when the process in between has exited, its child is an orphan, and the
        # kernel makes the launcher, as subreaper, its parent.
        between = os.fork()
        if between == 0:
            # Set the title before the program's process exists, because other tools find that
            # process by its command and environment.
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
        # Double fork: after the intermediate process has exited and been reaped, the new trainer is
        # re-parented to the launcher.
        os.waitpid(between, 0)
        for fd in (read, *fds):
            os.close(fd)
        connection.send(child_pid or b"none")


def _become(request: ForkRequest, path: Sequence[str]) -> None:
    """Set up this forked process as if it had been started for the program."""
    if request.session:
        os.setsid()
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request.unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None
    # Without new seeds all forks would draw the same numbers. `random` reseeds itself.
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
    """Return why this process cannot be forked safely; empty if it can be."""
    if _count_threads() > 1:
        # OpenBLAS ends its threads before a fork and restarts them on demand. Fork a child that
        # exits at once; threads that remain afterwards are not OpenBLAS's.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Raised by fork with threads
            pid = os.fork()
            if not pid:
                os._exit(0)
        os.waitpid(pid, 0)
        # The kernel may list a thread for a short time after it has ended.
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
    """Restart this trainer without preloaded imports if the script sets a variable too late (P1).

    It is too late for a variable that libraries read when they were imported.
    """

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
    """Run the fork server; a process that it forks runs its training script and exits."""
    # While the server imports modules, it does not notice that the connection was closed.
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
        except Exception as error:  # A trainer that imports the module will show the traceback
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
