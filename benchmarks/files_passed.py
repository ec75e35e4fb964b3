"""How many files and functions of reft a version, a load and a launch pass: what a reader has to
follow.

One process, one rank, no protection, traced with ``sys.setprofile``; a call counts by its file and
name. ``version``: from the boundary of one step to its commit. ``load``: ``engine.load_checkpoint``
of a new engine, from memory. ``launch``: ``reft launch`` of a script that does nothing, to its end.

    python benchmarks/files_passed.py [--json] [--files version|load|launch]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(
    f"{ROOT / name}{os.sep}" for name in ("reft", "reft_etcd", "reft_mpi", "megatron_patches")
)
WHAT = ("version", "load", "launch")

passed: set[tuple[str, str]] = set()
"""File and function, of what is traced now."""


def _note(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    # Not what is executed when modules are imported: bodies of modules and classes, tables made
    # there.
    made = code.co_flags & CO_OPTIMIZED and not code.co_qualname.startswith("<")
    if event == "call" and made and code.co_filename.startswith(FOLDERS):
        passed.add((os.path.relpath(code.co_filename, ROOT), code.co_qualname))


def follow() -> None:
    """Trace this thread, and those that begin from now on."""
    threading.setprofile(_note)
    sys.setprofile(_note)


@contextmanager
def noted(found: dict[str, list[tuple[str, str]]], what: str) -> Iterator[None]:
    passed.clear()
    yield
    found[what] = sorted(passed)


def version_and_load(found: dict[str, list[tuple[str, str]]]) -> None:
    """What one rank passes, from the worker's thread to the engine's."""
    import deepspeed
    import torch

    import reft
    from reft.engine.attach import find_session
    from reft.engine.on_import import avoid_build_at_start

    avoid_build_at_start()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
    }
    deepspeed.init_distributed("gloo", verbose=False)
    with tempfile.TemporaryDirectory() as memory:

        def make() -> Any:
            model = torch.nn.Linear(64, 64)
            block = {
                "enabled": True,
                "job_id": "traced",
                "memory_dir": memory,
                "protection": "none",
            }
            config = {
                "train_batch_size": 1,
                "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
                "reft": block,
            }
            return reft.initialize(model=model, model_parameters=model.parameters(), config=config)[
                0
            ]

        def step(engine: Any) -> None:
            engine.backward(engine(torch.ones(1, 64)).sum())
            engine.step()
            session = find_session(engine)
            assert session is not None
            assert session.worker is not None
            assert session.flush(60)

        engine = make()
        follow()
        engine.load_checkpoint(memory)
        step(engine)
        with noted(found, "version"):
            step(engine)
        engine.destroy()
        find_session(engine).close()  # type: ignore[union-attr]
        again = make()
        with noted(found, "load"):
            path, _ = again.load_checkpoint(memory)
        assert path is not None, "nothing was resumed"
        find_session(again).close()  # type: ignore[union-attr]
    sys.setprofile(None)


def launch(out: Path) -> None:
    """In a process of its own: what the launcher passes."""
    from reft.cli import main

    script = out.with_suffix(".py")
    script.write_text("")
    follow()
    main(
        [
            "launch",
            "--nnodes",
            "1",
            "--nproc-per-node",
            "1",
            "--memory-dir",
            str(out.parent / "memory"),
            str(script),
        ]
    )
    sys.setprofile(None)
    out.write_text(json.dumps(sorted(passed)))


def main() -> None:
    """Trace, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--files", choices=WHAT, help="list the files that are passed, with their functions"
    )
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(options.launch)
        return
    found: dict[str, list[tuple[str, str]]] = {}
    version_and_load(found)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "launch.json"
        subprocess.run(
            [sys.executable, __file__, "--launch", out], check=True, stdout=subprocess.DEVNULL
        )
        found["launch"] = json.loads(out.read_text())
    counts = {
        w: {"files": len({file for file, _ in found[w]}), "functions": len(found[w])} for w in WHAT
    }
    if options.files:
        for file in sorted({file for file, _ in found[options.files]}):
            print(f"{file}: {', '.join(name for f, name in found[options.files] if f == file)}")
    elif options.json:
        print(json.dumps(counts, indent=1))
    else:
        for what, count in counts.items():
            print(f"{what}: {count['files']} files, {count['functions']} functions")


if __name__ == "__main__":
    main()
