"""Trainers that start warm: forked from a process of the node that has torch and DeepSpeed imported.

``reft launch`` starts one such process (:mod:`reft.job.warm_server`), at once, so that it imports while
nodes gather; trainers of the first start and of every restart are forked from it (:mod:`reft.job.forks`).
What differs between a trainer's environment and the one in which it has imported is told, and that trainer
starts cold.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reft.backoff import Backoff
from reft.job.exits import WorkerExit
from reft.job.forks import ForkClient, ForkError, ForkingPopen
from reft.job.proc_entry import with_room
from reft.job.warm_server import ROOM_BYTES, SERVER, differing

logger = logging.getLogger(__name__)

DEFAULT_MODULES = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which every optimizer imports when it is made
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "reft",
    "reft.engine.deepspeed",
    "reft.engine.deepspeed_engine",
    "reft.engine.session",
)
"""What a trainer of reft imports in any case."""
_READY_SECS = 600.0
"""A node whose file system is slower starts its trainers cold."""
_END_SECS = 5.0
_TRIES = 5
"""Starts of the server, each of which ends soon."""
_STEADY_SECS = 600.0
_BACKOFF_SECS = 1.0, 30.0


def source_of(module: str, path: Sequence[str]) -> Path | None:
    """The file that ``python -m`` runs, if it lies in one of these directories; nothing is imported."""
    for entry in path:
        base = Path(entry or os.curdir, *module.split("."))
        for file in (base / "__main__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def imports_of(script: Path | None, beside: Path | None = None) -> list[str]:
    """Installed packages that a script imports at its top level; its own modules are not among them.

    Args:
        script: the file.
        beside: the directory whose modules come first there; None: the script's.
    """
    if script is None or not script.is_file():
        return []
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # the script's own start says it
    named: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
    return [name for name in dict.fromkeys(named) if _is_installed(name, beside or script.parent)]


def _is_installed(name: str, beside: Path) -> bool:
    top = name.partition(".")[0]
    # What lies beside the script comes first there, whatever is installed.
    if top in sys.stdlib_module_names or (beside / top).is_dir() or (beside / f"{top}.py").is_file():
        return False
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(top)
        origin = (spec.origin or "") if spec is not None else ""
        return any(part in ("site-packages", "dist-packages") for part in Path(origin).parts)
    return False


class _Server:
    """One life of the process that imports ahead; started anew, it is another one.

    Args:
        modules: what is imported.
        environ: in which.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        news, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), str(write), *modules],
                # Asking CUDA or HIP whether there are devices makes a state that no forked process can use:
                # so torch asks NVML, or on AMD's devices amdsmi.
                env=with_room({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environ}, ROOM_BYTES),
                pass_fds=[theirs.fileno(), write],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(news)
            raise
        finally:
            theirs.close()
            os.close(write)
        self.client = ForkClient(ours)
        self.read: set[str] = set()
        """Variables that were read while it imported."""
        self.ready = threading.Event()
        """It is, or it has ended."""
        self.usable = False
        self.overdue = False
        """It was waited for in vain."""
        self._news = news

    def run(self) -> int:
        """Hear from the server what it could not share, and that it is ready; returns how it ended."""
        with os.fdopen(self._news) as lines:
            for line in lines:
                note = json.loads(line)
                if "left_out" in note:
                    logger.warning("trainers import %s themselves: it %s", note["left_out"], note["why"])
                if "read" in note:
                    self.read, self.usable = set(note["read"]), True
                    break
        self.ready.set()
        code = self._process.wait()
        self.usable = False
        return code

    def end(self) -> None:
        """Trainers stay."""
        self.client.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECS)


class WarmTrainers:
    """Starts the server, and trainers through it once it is ready. One that dies is started again.

    Args:
        modules: what is imported ahead.
        environ: of the trainers, as far as all of a node share it.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._modules, self._environ = tuple(modules), dict(environ)
        self._told: set[str] = set()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(self._modules, self._environ)
        # The kernel ends a server with the thread that has started it: this one stays to the end.
        threading.Thread(target=self._keep, name="reft-warm", daemon=True).start()

    def _keep(self) -> None:
        """Start the server again when it has died."""
        backoff, died = Backoff(*_BACKOFF_SECS), 0
        while True:
            began = time.monotonic()
            end = WorkerExit(self._server.run(), None)
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STEADY_SECS:
                backoff.reset()
                died = 0
            died += 1
            if died == _TRIES:
                logger.warning(
                    "the process that imports ahead has ended (%s), %d times in a row: it is not started "
                    "again, and trainers start cold from here on",
                    *(end, died),
                )
                return
            pause = backoff.failed()
            logger.warning(
                "the process that imports ahead has ended (%s); the next one starts in %.0f s (start %d of "
                "%d)",
                *(end, pause, died + 1, _TRIES),
            )
            if self._ending.wait(pause) or not self._start_again():
                return

    def _start_again(self) -> bool:
        with self._lock:
            if self._ending.is_set():
                return False
            self._server.client.close()
            try:
                self._server = _Server(self._modules, self._environ)
            except OSError as error:
                logger.warning("the process that imports ahead cannot be started: %s", error)
                return False
        return True

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While it lasts, TorchElastic's trainers are forked where they can be."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as handler

        torch_handler: Any = handler
        outer, original = self, torch_handler.Popen

        class TrainerPopen(ForkingPopen):
            def client_for(self, program: Sequence[str], env: Mapping[str, str]) -> ForkClient | None:
                return outer.client_for(env)

            def failed(self, error: ForkError) -> None:
                outer.tell(str(error))

        torch_handler.Popen = TrainerPopen
        try:
            yield
        finally:
            torch_handler.Popen = original

    def client_for(self, env: Mapping[str, str]) -> ForkClient | None:
        """The client that forks a trainer with that environment; None if it has to start cold."""
        server = self._server
        if not server.overdue and not server.ready.wait(_READY_SECS):
            server.overdue = True
            self.tell(f"imports are not done after {_READY_SECS:.0f} s")
        if not server.usable:
            self.tell("the process that imports ahead is not there: see its messages")
            return None
        others = differing(self._environ, env, server.read)
        if others:
            self.tell(f"{', '.join(others)} differ from the launcher's environment")
            return None
        return server.client

    def tell(self, reason: str) -> None:
        """Say, once, why trainers start cold."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("trainers start cold: %s", reason)

    def close(self) -> None:
        """End the server; trainers stay."""
        self._ending.set()
        with self._lock:
            self._server.end()


def trainers_environ() -> dict[str, str]:
    """The environment that trainers of this process have in common under TorchElastic."""
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}


def has_device() -> bool:
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd"))
