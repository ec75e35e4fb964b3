"""Starts Python programs of the suite from a process that has torch, DeepSpeed and reft imported already.

Importing them costs a process more than a second of processor time, and the suite starts several hundred. A
server, which has imported all and has one thread alone, is asked over a socket and forks. What it starts is a
real process of its own: a child of who asked (who becomes its reaper for that moment), with its own arguments,
environment, directory, output and, if asked for, session. It is waited for, signalled and killed like any other.

:class:`Popen` is :class:`subprocess.Popen`, and is that where a program cannot be forked. A ``reft launch`` that
was forked gets a server of its own for its trainers, which are its children as under TorchElastic alone.
REFT_TEST_PREFORK=0, for the suite or in a program's environment, starts programs as usual.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from reft.elastic.script import run_module, run_script
from reft.hook.on_import import PostImportFinder

ENV_PREFORK = "REFT_TEST_PREFORK"
_LAUNCHERS = ("reft.elastic.launch", "reft.cli", "torch.distributed.run")
PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.distributed.launcher.api",
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "reft",
    "reft.hook.install",
    "reft.hook.session",
    "reft.tools.pretrain",
    *_LAUNCHERS,
)
_ROOT = Path(__file__).resolve().parents[1]
_AT_IMPORT = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED")
"""Variables that libraries read when they are loaded: a program that wants others is not forked."""
_ROOM, _ROOM_BYTES = "REFT_TEST_PREFORK_ROOM", 96 * 1024
"""Makes room, when the server is started, for the environment that the kernel shows of a forked process."""
HAS_DEVICE = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
"""Nothing is forked there: importing DeepSpeed may make a context on the device, which no fork can use."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 2**18
_prctl = ctypes.CDLL(None).prctl


class Popen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen`, forked where it can be."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        self._plain = bool(more) or not set(options) <= _UNDERSTOOD
        self._new_session = bool(options.get("start_new_session"))
        super().__init__(args, *more, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        program = None if self._plain else _program(args)
        env = dict(os.environ) if env is None else {str(k): str(v) for k, v in env.items()}
        server = _server_for(env) if program is not None else None
        if server is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        request = {
            "argv": program,
            "env": env,
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": self._new_session,
            "dies": server.of_the_suite,
            "unbuffered": "-u" in args[: -len(program or ())] or bool(env.get("PYTHONUNBUFFERED")),
        }
        own = (pipes[0], pipes[3], pipes[5])
        self.pid = server.start(request, [number if end == -1 else end for number, end in enumerate(own)])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


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


class Server:
    """The side that asks.

    Args:
        connection: to the server.
        environ: of the server, as far as it counts when libraries are loaded.
        of_the_suite: what is forked is killed when the suite is; a launcher sees to its own.
    """

    def __init__(self, connection: socket.socket, environ: Mapping[str, str], *, of_the_suite: bool) -> None:
        self.owner = os.getpid()
        self.of_the_suite = of_the_suite
        self._connection = connection
        self._environ = {name: environ.get(name) for name in _AT_IMPORT}
        self._lock = threading.Lock()

    def serves(self, env: Mapping[str, str]) -> bool:
        accelerator = env.get("DS_ACCELERATOR", "cpu")
        wanted = {**{name: env.get(name) for name in _AT_IMPORT}, "DS_ACCELERATOR": accelerator}
        return wanted == {**self._environ, "DS_ACCELERATOR": "cpu"}

    def start(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a child of this process; its id.

        Raises:
            RuntimeError: the server is gone.
        """
        message = json.dumps({**request, "parent": os.getpid()}).encode()
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [message], list(fds))
                answer = int(self._connection.recv(64))
            except (OSError, ValueError) as error:
                raise RuntimeError(
                    f"the server that forks the suite's programs has ended; {ENV_PREFORK}=0 does without it"
                ) from error
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the suite's server has forked nothing: it was killed while it did")
        return answer

    def close(self) -> None:
        self._connection.close()


_server: Server | None = None
_starting = threading.Lock()


def _server_for(env: Mapping[str, str]) -> Server | None:
    """This process's server, if it can serve a program with that environment; the suite's is started here."""
    global _server
    if HAS_DEVICE or "0" in (os.environ.get(ENV_PREFORK), env.get(ENV_PREFORK)):
        return None
    with _starting:
        if _server is None:
            _server = _start_server()
    return _server if _server.owner == os.getpid() and _server.serves(env) else None


def _start_server() -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = {k: v for k, v in os.environ.items() if k not in _AT_IMPORT or k.startswith("LD_")}
    environ = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), _ROOM: "x" * _ROOM_BYTES}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.prefork", str(theirs.fileno())],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=_ROOT,
        )
    server = Server(ours, environ, of_the_suite=True)

    def end() -> None:
        server.close()
        process.wait(60)

    atexit.register(end)
    return server


# -- the server ------------------------------------------------------------------------------------


class _Environment:
    """What the kernel shows as the environment of this process (``/proc/PID/environ``): memory into which the
    server's was written. A forked process writes its own there, by which it is found."""

    def __init__(self) -> None:
        # The C library's strings lie there too: from here on they lie elsewhere.
        kept = dict(os.environ)
        os.environ.clear()
        kept.pop(_ROOM)
        os.environ.update(kept)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._begin, end = int(fields[47]), int(fields[48])
        self._nbytes = end - self._begin

    def show(self, environ: Mapping[str, str]) -> None:
        shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
        if len(shown) >= self._nbytes:
            raise RuntimeError(f"an environment of {len(shown)} bytes, room for {self._nbytes}")
        ctypes.memmove(self._begin, shown.ljust(self._nbytes, b"\0"), self._nbytes)


class _Ready(MetaPathFinder, Loader):
    """Hands out a module that was imported before, when a program imports it.

    reft's launcher waits for the moment in which a script imports DeepSpeed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = sys.modules.pop(name)
        self._spec = self._module.__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # whose loader knows its sources
        sys.meta_path.remove(self)


class Forks:
    """Serves requests to fork; in a process that was forked, :meth:`serve` returns what it has to do."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._path = [entry for entry in sys.path[1:] if entry != str(_ROOT)]
        self._argv0 = sys.argv[0]
        # Scripts are to find DeepSpeed as it is, until they import reft or are launched by it.
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, PostImportFinder)]
        for name in PRELOADED:
            try:
                importlib.import_module(name)
            except ImportError as error:  # what needs it will say more; the rest goes on
                print(f"the suite's server cannot import {name} ahead: {error}", file=sys.stderr)
        sys.meta_path.insert(0, _Ready("deepspeed"))
        gc.collect()
        gc.freeze()
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            raise RuntimeError(
                f"a process of {threads} threads cannot be forked safely: {threading.enumerate()}"
            )

    def serve(self, connection: socket.socket) -> dict[str, Any]:
        """Fork whenever it is asked for. Returns in forked processes alone: the request."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            message, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
            if not message:
                os._exit(0)
            request: dict[str, Any] = json.loads(message)
            read, write = os.pipe()
            between = os.fork()
            if between == 0:
                os.close(read)
                self._environment.show(request["env"])  # before it exists: it is found as soon as it does
                between, pid = os.getpid(), os.fork()
                if pid:
                    os.write(write, str(pid).encode())
                    os._exit(0)
                os.close(write)
                while os.getppid() == between:
                    time.sleep(0.001)
                if request["dies"]:
                    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != request["parent"]:
                    os._exit(1)  # who asked has been killed
                return {**request, "fds": fds}
            os.close(write)
            pid_of_child = os.read(read, 64)
            os.close(read)
            os.waitpid(between, 0)  # now its child has its new parent
            for fd in fds:
                os.close(fd)
            connection.send(pid_of_child or b"0")

    def become(self, request: Mapping[str, Any]) -> Callable[[], None]:
        """Make this process what was asked for; returns what runs the program."""
        for number, fd in enumerate(request["fds"]):
            os.dup2(fd, number)
        for fd in request["fds"]:
            os.close(fd)
        if request["session"]:
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=bool(request["unbuffered"]))  # type: ignore[union-attr]
        tempfile.tempdir = None
        sys.modules["numpy"].random.seed()
        argv: list[str] = request["argv"]
        paths = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
        importlib.invalidate_caches()
        if argv[0] == "-m":
            sys.path[:] = [os.getcwd(), *paths, *self._path]
            sys.argv = ["-m", *argv[2:]]
            if argv[1] in _LAUNCHERS:
                self._serve_launcher()
            return lambda: run_module(argv[1])
        sys.path[:] = [os.path.dirname(os.path.realpath(argv[0])), *paths, *self._path]
        sys.argv = list(argv)
        return lambda: run_script(argv[0])

    def _serve_launcher(self) -> None:
        """Give this launcher a server for its trainers, forked before it has threads."""
        global _server
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            self._environment.show({})  # it is none of the node's processes
            _run(self, theirs)
            sys.exit()  # of a trainer that has come to its end
        theirs.close()
        _server = Server(ours, os.environ, of_the_suite=False)
        handler = sys.modules[
            "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        ]
        handler.Popen = Popen  # type: ignore[attr-defined]


def _run(forks: Forks, connection: socket.socket) -> None:
    with connection:
        request = forks.serve(connection)
    forks.become(request)()


if __name__ == "__main__":
    # Under its real name, too, for what a launcher uses of it.
    sys.modules["tests.prefork"] = sys.modules["__main__"]
    _run(Forks(), socket.socket(fileno=int(sys.argv[1])))
