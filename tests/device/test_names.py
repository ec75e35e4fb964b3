"""Every name of torch that reft and the GPU benchmarks use is there, in the installed torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    [
        *(file for folder in ("reft", "reft_mpi") for file in (ROOT / folder).rglob("*.py")),
        *(ROOT / "benchmarks").glob("*gpu*.py"),
        ROOT / "benchmarks" / "replay_stage.py",
    ]
)
OF_A_DEVICE = ("vendor.module", "self.module", "_module", "MODULE")
"""Expressions for the module of a device's type (``torch.cuda``) end like this."""
SIMULATED_ONLY = {"sleep"}


def imported(tree: ast.AST) -> dict[str, str]:
    """What local names stand for, if for something of torch."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                names[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {local: name for local, name in names.items() if name.split(".")[0] == "torch"}


def used(tree: ast.AST) -> Iterator[str]:
    """Full names, ``torch.cuda.Event``; those that are imported and those that are looked up."""
    names = imported(tree)
    yield from names.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, name = ast.unparse(node).rpartition(".")
            first, dot, rest = base.partition(".")
            if not re.fullmatch(r"[\w.]+", base):  # The result of a call
                continue
            if first in names:
                yield f"{names[first]}{dot}{rest}.{name}"
            elif base.endswith(OF_A_DEVICE) and name not in SIMULATED_ONLY:
                yield f"torch.cuda.{name}"


def find(name: str) -> Any:
    """The first object of a dotted name that is no module; raises AttributeError."""
    found: Any = torch
    for at, part in enumerate(parts := name.split(".")[1:], start=1):
        if not isinstance(found, ModuleType):
            return found
        if not hasattr(found, part):
            try:
                import_module(".".join(["torch", *parts[:at]]))
            except ModuleNotFoundError:
                raise AttributeError(name) from None
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_torch_has_every_name(file: Path) -> None:
    missing = set()
    for name in set(used(ast.parse(file.read_text()))):
        try:
            find(name)
        except AttributeError:
            missing.add(name)
    assert not missing
