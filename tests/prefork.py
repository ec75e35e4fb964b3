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
import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from reft.engine.on_import import PostImportFinder
from reft.env import ENV_ROOM
from reft.job.script import run_module, run_script
from reft.job.warm import ForkError, ForkingPopen, ProcTitle, serve

ENV_PREFORK = "REFT_TEST_PREFORK"
_LAUNCHERS = ("reft.job.launch", "reft.cli", "torch.distributed.run")
PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.distributed.launcher.api",
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # with torch's compiler, 4 s; ZeRO imports it at its start
    "reft",
    "reft.engine.on_import",
    "reft.engine.session",
    *_LAUNCHERS,
)
_ROOT = Path(__file__).resolve().parents[1]
_AT_IMPORT = (
    "OMP_NUM_THREADS",
    "DS_ACCELERATOR",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONHASHSEED",
)
"""Variables that libraries read when they are loaded: a program that wants others is not forked."""
_ROOM_BYTES = 96 * 1024  # For the environments of the suite's programs
HAS_DEVICE = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
"""Nothing is forked there: importing DeepSpeed may make a context on the device, which no fork can use."""


on_start: list[
    Callable[[Sequence[str]], None]
] = []  # Called with each program that is about to be forked


class Popen(ForkingPopen):
    """:class:`subprocess.Popen`, forked where it can be."""

    def server_for(self, program: Sequence[str], env: Mapping[str, str]) -> socket.socket | None:
        for call in on_start:
            call(program)
        server = _server_for(env)
        return server.connection if server is not None else None

    def failed(self, error: ForkError) -> None:
        raise RuntimeError(
            f"{error}; {ENV_PREFORK}=0 starts the suite's programs as usual"
        ) from error


class Server:
    """The side that asks. ``connection``: to the server. ``environ``: of the server, as far as it counts when
    libraries are loaded."""

    def __init__(self, connection: socket.socket, environ: Mapping[str, str]) -> None:
        self.connection = connection
        self.owner = os.getpid()
        self._environ = {name: environ.get(name) for name in _AT_IMPORT}

    def serves(self, env: Mapping[str, str]) -> bool:
        accelerator = env.get("DS_ACCELERATOR", "cpu")
        wanted = {**{name: env.get(name) for name in _AT_IMPORT}, "DS_ACCELERATOR": accelerator}
        return wanted == {**self._environ, "DS_ACCELERATOR": "cpu"}


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
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), ENV_ROOM: "x" * _ROOM_BYTES}
    environ = {**inherited, **own}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.prefork", str(theirs.fileno())],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=_ROOT,
        )
    server = Server(ours, environ)

    def end() -> None:
        server.connection.close()
        process.wait(60)

    atexit.register(end)
    return server


# -- the server ------------------------------------------------------------------------------------


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
    """Has imported all; becomes what it is asked for in the processes that it forks."""

    def __init__(self) -> None:
        self._entry = ProcTitle()
        self._path = [entry for entry in sys.path[1:] if entry != str(_ROOT)]
        # Scripts are to find DeepSpeed as it is, until they import reft or are launched by it.
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, PostImportFinder)]
        for name in PRELOADED:
            try:
                importlib.import_module(name)
            except ImportError as error:  # what needs it will say more; the rest goes on
                print(f"the suite's server cannot import {name} ahead: {error}", file=sys.stderr)
        sys.meta_path.insert(0, _Ready("deepspeed"))
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            raise RuntimeError(
                f"a process of {threads} threads cannot be forked safely: {threading.enumerate()}"
            )

    def run(self, connection: socket.socket) -> None:
        """Fork whenever it is asked for; in a process that was forked, run what it has to run."""
        with connection:
            argv = serve(connection, self._entry, self._path).argv
        if argv[0] != "-m":
            run_script(argv[0])
            return
        if argv[1] in _LAUNCHERS:
            self._serve_launcher()
        run_module(argv[1])

    def _serve_launcher(self) -> None:
        """Give this launcher a server for its trainers, forked before it has threads."""
        global _server
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            self._entry.show(sys.orig_argv, {})  # it is none of the node's processes
            self.run(theirs)
            sys.exit()  # of a trainer that has come to its end
        theirs.close()
        _server = Server(ours, os.environ)
        handler = sys.modules[
            "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        ]
        handler.Popen = Popen  # type: ignore[attr-defined]


if __name__ == "__main__":
    # Under its real name, too, for what a launcher uses of it.
    sys.modules["tests.prefork"] = sys.modules["__main__"]
    Forks().run(socket.socket(fileno=int(sys.argv[1])))
