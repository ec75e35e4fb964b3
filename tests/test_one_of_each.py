"""One of each: one message authentication code, one way to back off, one place for names of the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REFT = Path(__file__).parents[1] / "reft"
TWICE = {
    "protect/survival.py": "brackets a root",
    "speed/memory.py": "thins out what is kept",
    "store/etcd/line.py": "waits longer for an answer, which is no pause",
}
"""Files that double something, and why that is no backoff."""


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    targets = node.targets if isinstance(node, ast.Assign) else ()
    for target in targets:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
        yield from ((ast.unparse(name), value) for name, value in pairs)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.unparse(node.target), node.value


def macs(tree: ast.AST) -> Iterator[int]:
    """Lines that make or compare codes of their own."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(name.name == "hmac" for name in names):
                yield node.lineno
            case ast.ImportFrom(module="hmac"):
                yield node.lineno
            case ast.Call(func=func, keywords=given) if {k.arg for k in given} & {"key", "person"}:
                if ast.unparse(func).rpartition(".")[2] in ("blake2b", "blake2s"):
                    yield node.lineno


def doublings(tree: ast.AST) -> Iterator[int]:
    """Lines where a number grows by a factor: ``x *= 2``, ``x = min(x * 2, most)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            yield from (node.lineno for _ in range(isinstance(node.value, ast.Constant)))
        for name, value in _assigned(node):
            for part in ast.walk(value):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                    sides = part.left, part.right
                    number = any(isinstance(side, ast.Constant) for side in sides)
                    if number and name in map(ast.unparse, sides):
                        yield node.lineno


def names_of_the_environment(tree: ast.Module) -> Iterator[int]:
    """Lines that give a name to a variable of the environment."""
    for node in tree.body:
        for name, value in _assigned(node):
            if name.lstrip("_").startswith("ENV_") and isinstance(value, ast.Constant):
                yield node.lineno


def found(look: object, besides: set[str]) -> list[str]:
    assert callable(look)
    assert all((REFT / name).is_file() for name in besides)
    paths = {path.relative_to(REFT).as_posix(): path for path in sorted(REFT.rglob("*.py"))}
    return [
        f"reft/{name}:{line}"
        for name, path in paths.items()
        if name not in besides
        for line in look(ast.parse(path.read_text()))
    ]


def test_one_message_authentication_code() -> None:
    assert found(macs, {"mac.py"}) == [], "use reft.mac"


def test_one_way_to_back_off() -> None:
    assert found(doublings, {"backoff.py", *TWICE}) == [], "use reft.backoff, or say in TWICE why it is none"


def test_one_place_for_names_of_the_environment() -> None:
    assert found(names_of_the_environment, {"env.py"}) == [], "move them to reft.env"


@pytest.mark.parametrize("name", TWICE)
def test_what_is_excused_is_there(name: str) -> None:
    assert list(doublings(ast.parse((REFT / name).read_text())))


def test_the_next_one_is_seen() -> None:
    for source in (
        "import hmac",
        "from hmac import new",
        "blake2b(b'', key=k)",
        "hashlib.blake2b(x, person=p)",
    ):
        assert list(macs(ast.parse(source))), source
    for source in (
        "pause *= 2",
        "pause = min(2 * pause, 5.0)",
        "self._p = min(self._p * 1.5, most)",
        "p = p * 2",
    ):
        assert list(doublings(ast.parse(source))), source
    for source in ("ENV_X = 'REFT_X'", "_ENV_Y: str = 'Y'"):
        assert list(names_of_the_environment(ast.parse(source))), source
    for source in ("x = 2 * y", "blake2b(body)", "room *= scale"):
        assert not list(macs(ast.parse(source))) + list(doublings(ast.parse(source))), source
