"""Tests reach what they test through public names; where they cannot, a seam is missing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
OTHERS = {
    "_actions": "argparse",
    "_delay": "TorchElastic",
    "_exit": "os",
    "_get_deadline": "TorchElastic",
    "_hp_mapping": "DeepSpeed",
    "_INSTRUCTION_MAP": "DeepSpeed",
    "_is_mkldnn_fp16_supported": "torch",
    "_keep_alive": "TorchElastic",
    "_make_wrapper_subclass": "torch",
    "_optimizer_step_pre_hooks": "torch",
    "_reft_installed": "DeepSpeed, as reft leaves it",
    "_replace": "named tuples",
    "_schema": "torch",
    "_sleep": "torch",
    "_start_heartbeats": "TorchElastic",
    "_state_holder": "TorchElastic",
    "_stop_heartbeats": "TorchElastic",
    "_take_model_step": "DeepSpeed",
    "_this_node": "TorchElastic",
}
"""Names that are not reft's, and whose they are."""


def test_tests_use_no_private_names() -> None:
    found = {
        path.relative_to(TESTS).as_posix(): list(_private(ast.parse(path.read_text())))
        for path in sorted(TESTS.rglob("*.py"))
    }
    said = "\n".join(f"tests/{name}:{line}: {use}" for name, uses in found.items() for line, use in uses)
    assert not said, f"give what is tested a public name or an argument:\n{said}"


def test_every_way_to_a_private_name_is_seen() -> None:
    sources = (
        "a._b",
        "a.b._c()",
        "a._b = 1",
        "from reft.a import _b",
        "patch.object(a, '_b')",
        "m.setattr(a, '_b', 1)",
        "m.setattr('reft.a._b', 1)",
        "getattr(a, '_b')",
    )
    assert Counter(len(list(_private(ast.parse(source)))) for source in sources) == {1: len(sources)}
    for source in ("self._a", "cls._a", "super()._a", "a.__name__", "os._exit(1)", "from torch import _C"):
        assert not list(_private(ast.parse(source))), source


def _private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) not in ("self", "cls", "super()") and _is_private(node.attr):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("reft", "tests"):
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names if _is_private(a.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("attr", "patch", "patch.object")
        ):
            names = [
                a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            yield from ((node.lineno, name) for name in names if _is_private(name.rpartition(".")[2]))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS
