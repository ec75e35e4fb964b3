"""Arrows point one way (DESIGN, section 5): what a module may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import reft

ROOT = Path(reft.__file__).parent
LAYERS = (
    ("env",),
    ("errors", "refusal", "naming", "durable", "backoff", "native", "optim"),
    ("arguments", "json_file"),
    ("builds", "events", "log", "mac", "grid", "blocks"),
    ("protect", "config_persist"),
    ("config",),
    ("config_keys", "config_read"),
    ("faults", "speed", "state"),
    ("store",),
    ("comm",),
    ("data", "load", "snapshot"),
    ("profile",),
    ("policy",),
    ("hook",),
    ("elastic", "hf", "megatron"),
    ("tools",),
    ("cli", "pretrain"),
)
"""Packages and modules of ``reft``, the lowest first. Each imports what is below it, not what is beside it:
so the core imports no tool, and ``snapshot`` and ``load`` do not know each other."""


def level(name: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if name in layer]
    assert found, f"reft.{name} is new: say in LAYERS which parts of reft it may import"
    return found[0]


def part_of(module: str) -> str:
    """``reft.store.arena`` is of ``store``, and the package itself of none."""
    return module.partition(".")[2].partition(".")[0]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of reft, those for types only and those within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            of_reft = node.module == "reft"
            names = [f"reft.{a.name}" if of_reft else str(node.module) for a in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "reft")


def test_arrows_point_down() -> None:
    parts = {part_of(module) for module, _ in modules()} - {""}
    wrong = []
    for module, path in modules():
        mine = part_of(module)
        if not mine:
            continue  # reft/__init__.py says where its names are
        for line, name in imports(path):
            other = part_of(name)
            if other in parts and other != mine and level(other) >= level(mine):
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_part_has_its_place() -> None:
    parts = {part_of(module) for module, _ in modules()} - {""}
    assert {name for layer in LAYERS for name in layer} == parts
