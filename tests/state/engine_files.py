"""What DeepSpeed writes of an engine, and what reft writes from a version of it, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reft.grid import Coordinate, Section, VersionId
from reft.state import codec
from reft.state.adapters import StateAdapter
from reft.storage.deepspeed_format import (
    Template,
    capture_template,
    host_file_name,
    read_host_file,
    write_checkpoint,
)
from reft.storage.offline import export_stored
from reft.storage.persist import persist_label
from reft.storage.persisted import job_directory
from reft.storage.template import same_value
from tests.storage.job_memory import JOB, Memory, verify_persisted

CLIENT = {"epoch": 3, "nested": {"list": [1, 2.5, ("a", b"b")]}}


def template_of(engine: Any, adapter: StateAdapter, host: dict[str, Any]) -> bytes:
    """As a rank records it between two steps: nothing is written, and the engine is left as it was."""
    attributes = set(vars(engine))
    encoded = capture_template(engine, adapter.images(), host)
    assert set(vars(engine)) == attributes
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
    assert not Path("/nonexistent").exists()
    return encoded


def written_from(
    snap: dict[str, Any], encoded: bytes, at: Coordinate, saved: Path, rebuilt: Path
) -> dict[str, Any]:
    images = [memoryview(bytearray(image.numpy().tobytes())) for image in snap["images"]]

    def read(section: Section, start: int, nbytes: int) -> memoryview:
        image = images[0 if section is Section.REPLICATED else 1]
        assert start + nbytes <= len(image)
        return image[start : start + nbytes]

    template, state = Template.decode(encoded), codec.decode(snap["host"])
    rebuilt.mkdir(parents=True, exist_ok=True)
    written = write_checkpoint(template, read, state, rebuilt, at)
    host = host_file_name(at)
    assert written[host][0] == (rebuilt / host).stat().st_size
    assert same_value(read_host_file(rebuilt / host), state)
    (rebuilt.parent / "latest").write_text(rebuilt.name)
    torch.distributed.barrier()
    return {
        "problems": compared(saved, rebuilt, template),
        "saved": sorted(p.name for p in saved.iterdir()),
        "rebuilt": sorted(p.name for p in rebuilt.iterdir() if not p.name.startswith("reft")),
        "own": sorted(template.files),
        "scripts": template.recovery_scripts,
    }


def persisted_from(
    snap: dict[str, Any], encoded: bytes, at: Coordinate, saved: Path, root: Path
) -> list[str]:
    """The same version from arenas, by the daemons' code: the ranks of the first stage act for their nodes."""
    memory = Memory(root, copies=0)
    blob = {"manifest": snap["manifest"], "template": encoded, "state": snap["host"]}
    replicated, owned = (bytes(i.numpy().tobytes()) for i in snap["images"])
    mine = {Section.REPLICATED: replicated, Section.OWNED: owned, Section.HOST: codec.encode(blob)}
    label = VersionId(1, int(saved.name.removeprefix("global_step")))
    memory.write(label, dict.fromkeys(memory.topology.coordinates, mine), only=[at])
    torch.distributed.barrier()
    if at.pp == 0:
        job = memory.job_dir(memory.topology.node_of(at))
        persist_label(job, label, memory.config(root / "checkpoints"))
    torch.distributed.barrier()
    stored, directory = (job_directory(root / name, JOB) for name in ("checkpoints", "exported"))
    if torch.distributed.get_rank() == 0:
        assert verify_persisted(stored) == []
        export_stored(stored, root / "exported")
    torch.distributed.barrier()
    assert verify_persisted(directory) == []
    assert (directory / "zero_to_fp32.py").is_file()
    return compared(saved, directory / saved.name, Template.decode(encoded))


def compared(saved: Path, rebuilt: Path, template: Template) -> list[str]:
    problems: list[str] = []
    for name in template.files:
        a, b = (torch.load(path / name, weights_only=False) for path in (saved, rebuilt))
        differences(a, b, name, problems)
        if (rebuilt / name).stat().st_size > 1.2 * (saved / name).stat().st_size + 4096:
            problems.append(f"{name}: {(rebuilt / name).stat().st_size} bytes")
    return problems


def differences(a: object, b: object, path: str, problems: list[str]) -> None:
    if type(a) is not type(b):
        problems.append(f"{path}: {type(a)} against {type(b)}")
    elif isinstance(a, torch.Tensor):
        forms = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (a, b)]
        if forms[0] != forms[1] or codec.encode(a.detach()) != codec.encode(b.detach()):
            problems.append(f"{path}: {a} against {b}")
        differences(a.__dict__, b.__dict__, f"{path}.__dict__", problems)
    elif isinstance(a, dict):
        if list(a) != list(b):
            problems.append(f"{path}: keys {list(a)} against {list(b)}")
            return
        for key in a:
            differences(a[key], b[key], f"{path}[{key!r}]", problems)
        differences(
            getattr(a, "__dict__", 0), getattr(b, "__dict__", 0), f"{path}.__dict__", problems
        )
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            problems.append(f"{path}: {len(a)} items against {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            differences(x, y, f"{path}[{i}]", problems)
    elif hasattr(a, "__dict__") and type(a).__eq__ is object.__eq__ and not isinstance(a, type):
        differences(vars(a), vars(b), f"{path}.__dict__", problems)
    elif a != b:
        problems.append(f"{path}: {a!r} against {b!r}")
