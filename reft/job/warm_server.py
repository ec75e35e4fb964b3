"""The process that imports ahead and forks trainers (:mod:`reft.job.warm` starts it).

A trainer cannot tell: what was imported ahead is out of ``sys.modules`` until the script imports it.
Libraries read environment variables while they are imported, and a script may set some first; the server
notes which were read, and a trainer in which one of those differs starts anew in the same process, cold. A
module that starts a thread, opens a device or reads a trainer's rank while it is imported cannot be shared:
it is named, and left to the trainers.

    python -m reft.job.warm_server FD FD MODULE...
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from reft.engine.on_import import PostImportFinder
from reft.job import script
from reft.job.forks import ForkRequest, become, freeze, serve
from reft.job.proc_entry import ProcEntry, with_room

SERVER = "reft.job.warm_server"
"""This module, also where it is ``__main__``."""
ROOM_BYTES = 16 * 1024
"""For what a trainer's environment has beyond the launcher's."""
_RANK_NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
_RANK_PREFIXES = ("TORCHELASTIC_", "REFT_")
"""Variables that each trainer has of its own: a module that reads one while it is imported is not shared."""
_READ_BY_C = (
    "ATEN_",
    "BLIS_",
    "DNNL_",
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
    "TORCH",
    "PYTORCH_",
)
"""Variables that shared libraries read where Python does not see it."""
_CUDA_NOT_INITIALIZED = 3
_THREAD_ENDS_SECS = 1.0
_CANNOT = "cannot be imported"


def differing(
    before: Mapping[str, str], now: Mapping[str, str], read: Collection[str], *, c: bool = True
) -> list[str]:
    """Names of variables that libraries have read while they were imported, and that have another value now.

    Args:
        before: the environment in which they were imported.
        now: a trainer's.
        read: the names that were seen to be read.
        c: count those as well that shared libraries read.
    """
    names = {n for n in {*before, *now} if n in read or (c and n.startswith(_READ_BY_C))}
    return sorted(n for n in names if not _is_rank_name(n) and before.get(n) != now.get(n))


def _is_rank_name(name: str) -> bool:
    return name in _RANK_NAMES or name.startswith(_RANK_PREFIXES)


class _Reads:
    """Notes which environment variables are read, and by which package.

    Args:
        names: package to the names that its code has read; it grows.
    """

    def __init__(self, names: dict[str, set[str]]) -> None:
        self._names = names
        self._kind: Any = type(os.environ)
        self._original = self._kind.__getitem__

    def __enter__(self) -> None:
        names, original = self._names, self._original

        def noting(environ: Any, name: Any) -> Any:
            names.setdefault(_asking_package(), set()).add(os.fsdecode(name))  # bytes of os.environb
            return original(environ, name)

        self._kind.__getitem__ = noting

    def __exit__(self, *error: object) -> None:
        self._kind.__getitem__ = self._original


def _asking_package() -> str:
    """The package, outside of the standard library, whose code is being called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package and package not in sys.stdlib_module_names and package != "__main__":
            return package
        frame = frame.f_back
    return ""


def import_ahead(modules: Sequence[str], read: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Import modules; yields each name, and why it must not be shared ("" if it may be).

    Args:
        modules: their names.
        read: package to the variables that its code has read; it grows.
    """
    for name in modules:
        before = set(read.get(name.partition(".")[0], ()))
        with _Reads(read):
            try:
                importlib.import_module(name)
            except Exception as error:
                # Trainers that need it say more.
                yield name, f"{_CANNOT} ({type(error).__name__}: {error})"
                continue
        own = sorted((set(read.get(name.partition(".")[0], ())) - before) & _RANK_NAMES)
        threads = _threads_after_a_fork()
        device = _open_device()
        if own:
            yield name, f"reads {', '.join(own)} while it is imported"
        elif threads != 1:
            yield name, f"starts {threads - 1} threads while it is imported"
        elif device:
            yield name, f"opens {device} while it is imported"
        else:
            yield name, ""


def _threads_after_a_fork() -> int:
    """Threads of this process that a fork does not end: OpenBLAS ends its own before one, and starts them
    again when they are needed."""
    if _threads() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads
            pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        # The kernel lists a thread a moment longer than it can be joined.
        deadline = time.monotonic() + _THREAD_ENDS_SECS
        while _threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
    return _threads()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_device() -> str:
    """The device runtime, AMD's or NVIDIA's, that this process has started; "" if none."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "/dev/kfd":
                return "/dev/kfd"
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        count = ctypes.c_int()
        with suppress(OSError, AttributeError):
            if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALIZED:
                return "CUDA"
    return ""


class HiddenModules(MetaPathFinder):
    """Modules that were imported ahead: out of ``sys.modules`` until their package is imported.

    Args:
        names: of the modules.
        read: package to the variables that its code has read while it was imported.
        left: variables that the libraries have set while they were imported.
    """

    def __init__(self, names: Sequence[str], read: Mapping[str, set[str]], left: Mapping[str, str]) -> None:
        self._modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        self._read, self._left = read, dict(left)
        self._environ: Mapping[str, str] = {}
        self._expected: Mapping[str, str] = {}
        self._cold: list[str] = []
        self._first = True

    def in_trainer(self, environ: Mapping[str, str], cold: list[str]) -> None:
        """Say with which environment the trainer was started, and the command that starts it cold."""
        self._environ, self._cold = dict(environ), cold
        self._expected = self._environ
        # Each trainer draws its own numbers, as after a cold start; `random` sees to it itself.
        if "numpy.random" in self._modules:
            self._modules["numpy.random"].seed()
        if "torch.random" in self._modules:
            self._modules["torch.random"].default_generator.seed()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # To be asked is not to be imported.
        module = self._modules.get(fullname)
        if module is None:
            return None
        spec = ModuleSpec(fullname, _HandOut(self), origin=getattr(module, "__file__", None))
        spec.submodule_search_locations = getattr(module, "__path__", None)
        return spec

    def hand_out(self, name: str) -> ModuleType:
        """The module; its package's others are back in ``sys.modules``."""
        top = name.partition(".")[0]
        self._compare(top)
        module = self._modules.pop(name)
        # reft's own come one by one: without the block next to nothing of it is imported (P10).
        for other in [n for n in self._modules if top != "reft" and n.partition(".")[0] == top]:
            sys.modules[other] = self._modules.pop(other)
        return module

    def _compare(self, top: str) -> None:
        """Start cold if the script has set what the package read. What was handed out before counts no more:
        libraries set variables of their own."""
        others = differing(self._expected, os.environ, self._read.get(top, set()), c=self._first)
        if self._first and not others:
            self._expected = {**self._left, **self._expected}
            for name, value in self._left.items():
                os.environ.setdefault(name, value)
        self._first = False
        if not others:
            return
        where = f"the script sets {', '.join(others)} before it imports {top}, which reads it"
        remedy = "Set it where `reft launch` is started, or start with --no-warm"
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            print(f"reft: {where}; it has no effect. {remedy}", file=sys.stderr, flush=True)
            return
        print(f"reft: this trainer starts again, cold: {where}. {remedy}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os.execve(sys.executable, self._cold, dict(self._environ))


class _HandOut(Loader):
    """Loads a module that is loaded; each spec has one of its own, as others put themselves around it."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._hidden.hand_out(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # whose loader knows its sources


def main(argv: Sequence[str]) -> None:
    """The server. Returns in trainers, after their script."""
    script.die_with_launcher()  # also while it imports, when it does not see that the connection is closed
    connection, news = socket.socket(fileno=int(argv[0])), os.fdopen(int(argv[1]), "w", buffering=1)
    for fd in (connection.fileno(), news.fileno()):
        os.set_inheritable(fd, False)
    modules = list(dict.fromkeys(argv[2:]))
    entry = ProcEntry()
    environ = dict(os.environ)
    # Trainers find DeepSpeed as it is, and have it hooked themselves.
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, PostImportFinder)]
    path = _path_without_own(environ)
    before = set(sys.modules)
    read: dict[str, set[str]] = {}
    for name, why in import_ahead(modules, read):
        if why:
            news.write(json.dumps({"left_out": name, "why": why}) + "\n")
            news.flush()
        if why and not why.startswith(_CANNOT):
            # It is imported already, and cannot be taken back: another process does without it.
            rest = [m for m in modules if m != name and not m.startswith(f"{name}.")]
            for fd in (connection.fileno(), news.fileno()):
                os.set_inheritable(fd, True)
            command = ["-m", SERVER, str(connection.fileno()), str(news.fileno())]
            os.execve(sys.executable, [sys.executable, *command, *rest], with_room(environ, ROOM_BYTES))
    left = {n: v for n, v in os.environ.items() if environ.get(n) != v}
    hidden = HiddenModules([n for n in sys.modules if n not in before and not _stays(n)], read, left)
    sys.meta_path.insert(0, hidden)
    freeze()
    news.write(json.dumps({"read": sorted(set().union(*read.values()))}) + "\n")
    news.close()
    with connection:
        # Shown before the process exists: it is found as soon as it does.
        request, fds = serve(connection, before=lambda asked: entry.show(_command(asked), asked.env))
    program = become(request, fds, path)
    hidden.in_trainer(request.env, _command(request))
    assert program[:2] == ["-m", "reft.job.script"], program
    script.leave(script.main(program[2:]))


def _command(request: ForkRequest) -> list[str]:
    """That starts the trainer without this server."""
    return [sys.executable, *(["-u"] if request.unbuffered else []), *request.argv]


def _stays(name: str) -> bool:
    """Modules that a trainer has before its script runs, or that no script can tell apart."""
    return name.partition(".")[0] in sys.stdlib_module_names


def _path_without_own(environ: Mapping[str, str]) -> list[str]:
    own = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return sys.path[1 + len(own) :]


if __name__ == "__main__":
    main(sys.argv[1:])
