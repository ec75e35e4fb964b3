"""Trainers that start warm: forked from a process of the node that has torch and DeepSpeed imported.

``reft launch`` starts one such process (:mod:`reft.elastic.warm_server`), at once, so that it imports while
nodes gather; trainers of the first start and of every restart are forked from it (:mod:`reft.elastic.forks`).
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reft.elastic.forks import ForkClient, ForkError, ForkingPopen
from reft.elastic.proc_entry import with_room
from reft.elastic.warm_server import ROOM_BYTES, SERVER, differing

logger = logging.getLogger(__name__)

DEFAULT_MODULES = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which every optimizer imports when it is made
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "reft",
    "reft.hook.deepspeed",
    "reft.hook.deepspeed_engine",
    "reft.hook.session",
)
"""What a trainer of reft imports in any case."""
_READY_SECS = 600.0
"""A node whose file system is slower starts its trainers cold."""
_END_SECS = 5.0


def imports_of(script: Path | None) -> list[str]:
    """Installed packages that a script imports at its top level; its own modules are not among them."""
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
    return [name for name in dict.fromkeys(named) if _is_installed(name, script.parent)]


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


class WarmTrainers:
    """Starts the server, and trainers through it once it is ready.

    Args:
        modules: what is imported ahead.
        environ: of the trainers, as far as all of a node share it.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._read: set[str] = set()
        self._told: set[str] = set()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        news, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), str(write), *modules],
                # Asking CUDA or HIP whether there are devices makes a state that no forked process can use:
                # so torch asks NVML, or on AMD's devices amdsmi.
                env=with_room({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **self._environ}, ROOM_BYTES),
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
        self._client = ForkClient(ours)
        self._ready = threading.Event()
        self._usable = False
        threading.Thread(target=self._listen, args=(news,), name="reft-warm", daemon=True).start()

    def _listen(self, news: int) -> None:
        """Hear from the server what it could not share, and that it is ready."""
        with os.fdopen(news) as lines:
            for line in lines:
                note = json.loads(line)
                if "left_out" in note:
                    logger.info("trainers import %s themselves: it %s", note["left_out"], note["why"])
                if "read" in note:
                    self._read, self._usable = set(note["read"]), True
                    break
        self._ready.set()

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
                outer.give_up(str(error))

        torch_handler.Popen = TrainerPopen
        try:
            yield
        finally:
            torch_handler.Popen = original

    def client_for(self, env: Mapping[str, str]) -> ForkClient | None:
        """The client that forks a trainer with that environment; None if it has to start cold."""
        if not self._ready.wait(_READY_SECS):
            self.give_up(f"imports are not done after {_READY_SECS:.0f} s")
        if not self._usable:
            self._tell("the process that imports ahead has ended: see its messages")
            return None
        others = differing(self._environ, env, self._read)
        if others:
            self._tell(f"{', '.join(others)} differ from the launcher's environment")
            return None
        return self._client

    def give_up(self, reason: str) -> None:
        self._usable = False
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("trainers start cold: %s", reason)

    def close(self) -> None:
        """End the server; trainers stay."""
        self._client.close()
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECS)


def trainers_environ() -> dict[str, str]:
    """The environment that trainers of this process have in common under TorchElastic."""
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}


def has_device() -> bool:
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd"))
