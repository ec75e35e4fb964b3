"""Finds state that a training script holds outside the engine, by analysing its source. Pure.

Examples are random generators, averaged copies of the model, and attributes of modules that
training increments. The engine has no reference to such objects, so the script must pass them to
reft by ``reft.attach(engine, state={...})``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TRAINS = frozenset({"backward", "step", "train_batch"})
_GENERATORS = frozenset({"Generator", "default_rng", "RandomState", "Random"})
_AVERAGES = frozenset(
    {
        *("AveragedModel", "EMA", "ModelEma", "ModelEMA", "ModelEmaV2", "ModelEmaV3", "EMAModel"),
        "ExponentialMovingAverage",
    }
)
_OF_MODULES = frozenset(
    {
        "parameters",
        "named_parameters",
        "state_dict",
        "load_state_dict",
        "buffers",
        "zero_grad",
        "requires_grad_",
    }
)
_UPDATES = (*("update", "update_parameters", "lerp_", "step"), *_OF_MODULES)
_UPDATING_WORDS = ("ema", "update", "average", "momentum", "copy")
"""If a function's name contains one of these words, it probably updates a copy of the model (such
as an EMA) that it gets as an argument."""
_CALLED_BY_TORCH = frozenset(
    {"forward", "__getitem__", "__iter__", "training_step", "compute_loss"}
)


class HeldFinding(NamedTuple):
    node: ast.expr | ast.stmt
    found: str
    change: str


class HeldState:
    """Searches one script for state that it holds outside the engine.

    Args:
        nodes: all nodes of the script's syntax tree.
        parents: the parent of each node.
    """

    def __init__(self, nodes: list[ast.AST], parents: dict[ast.AST, ast.AST]) -> None:
        self._nodes = nodes
        self._parents = parents
        self._functions = {n.name: n for n in nodes if isinstance(n, _FUNCTIONS)}
        self._training = self._training_code()
        self._kept = self._kept_names()

    def findings(self) -> Iterator[HeldFinding]:
        if self._training:
            yield from self._generators()
            yield from self._averages()
            yield from self._attributes()

    # -- code that trains --------------------------------------------------------------------------

    def _training_code(self) -> set[ast.AST]:
        """Collect the syntax nodes of training loops, and of the script's functions that the loops
        call."""
        trains = {name for name, f in self._functions.items() if _calls(f) & _TRAINS}
        while more := {
            n for n, f in self._functions.items() if n not in trains and _calls(f) & trains
        }:
            trains |= more
        loops = [
            n
            for n in self._nodes
            if isinstance(n, ast.For | ast.While) and _calls(n) & (_TRAINS | trains)
        ]
        if not loops:
            return set()
        todo: list[ast.AST] = [
            *loops,
            *(f for n, f in self._functions.items() if n in _CALLED_BY_TORCH),
        ]
        found: set[ast.AST] = set()
        while todo:
            part = todo.pop()
            if part not in found:
                found |= set(ast.walk(part))
                todo += [self._functions[name] for name in _calls(part) if name in self._functions]
        return found

    def _is_used_in_training(self, name: str) -> bool:
        return any(
            isinstance(n, ast.Name | ast.Attribute)
            and isinstance(n.ctx, ast.Load)
            and ast.unparse(n) == name
            for n in self._training
        )

    # -- state that the script passes to reft already ----------------------------------------------

    def _kept_names(self) -> set[str]:
        """Collect the names and attributes that the script passes to reft.

        These occur in ``state=`` and ``client_state=``, or in what such values are computed from.
        """
        todo: list[ast.AST] = [
            keyword.value
            for node in self._nodes
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg in ("state", "client_state")
        ]
        kept: set[str] = set()
        seen: set[ast.AST] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            names = _names_in(node)
            kept |= names
            todo += [f for name, f in self._functions.items() if name in names]
            todo += [value for target, value in self._assigned() if ast.unparse(target) in names]
        return kept

    def _assigned(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield target and value of each assignment; tuples are split into their elements."""
        for node in self._nodes:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.target, node.value
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        yield from zip(target.elts, node.value.elts, strict=False)
                    else:
                        yield target, node.value

    def _made(self) -> Iterator[tuple[str, ast.expr, ast.Call]]:
        """Find objects that are created outside training, used in it, and not passed to reft.

        Yields:
            Name, target of the assignment, and the call that creates the object.
        """
        for target, value in self._assigned():
            call, name = _innermost_call(value), ast.unparse(target)
            if call is None or target in self._training or name in self._kept:
                continue
            if isinstance(target, ast.Name | ast.Attribute) and self._is_used_in_training(name):
                yield name, target, call

    # -- findings ----------------------------------------------------------------------------------

    def _generators(self) -> Iterator[HeldFinding]:
        for name, target, call in self._made():
            if _name(call) in _GENERATORS and not self._is_in_class(target, "Sampler"):
                yield HeldFinding(
                    target,
                    f"`{name}` ({ast.unparse(call.func)}) is a random generator of the script's "
                    "own. After a failure it would begin again",
                    f"write {_attach(name)}",
                )

    def _averages(self) -> Iterator[HeldFinding]:
        for name, target, call in self._made():
            is_copy = _name(call) == "deepcopy" and self._is_updated(name)
            if is_copy or _name(call) in _AVERAGES:
                yield HeldFinding(
                    target,
                    f"`{name}` ({ast.unparse(call.func)}) is a copy of the model that training "
                    "updates. After a failure it would be made again from the initial weights",
                    f"write {_attach(name)}",
                )

    def _is_updated(self, name: str) -> bool:
        """Whether training may update a copy: by its methods, or by a function that receives it."""
        for node in self._training:
            if not isinstance(node, ast.Call):
                continue
            function, called = node.func, _name(node).lower()
            if (
                isinstance(function, ast.Attribute)
                and ast.unparse(function.value) == name
                and called in _UPDATES
            ):
                return True
            given = {ast.unparse(argument) for argument in node.args}
            if name in given and any(word in called for word in _UPDATING_WORDS):
                return True
        return False

    def _attributes(self) -> Iterator[HeldFinding]:
        """Find attributes of modules that training computes from their previous value."""
        modules = {
            ast.unparse(n.func.value)
            for n in self._nodes
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr in _OF_MODULES
        }
        seen: set[str] = set()
        for node in sorted(self._training, key=lambda n: getattr(n, "lineno", 0)):
            target, value = _written(node)
            if (
                not isinstance(target, ast.Attribute)
                or (name := ast.unparse(target)) in seen | self._kept
            ):
                continue
            owner = ast.unparse(target.value)
            own = owner == "self" and self._is_in_class(target, "Module")
            reads_itself = isinstance(node, ast.AugAssign) or name in _names_in(value)
            if reads_itself and (own or owner in modules):
                seen.add(name)
                yield HeldFinding(
                    target,
                    f"`{name}` is computed from its last value, and is neither a parameter nor a "
                    "buffer. After a failure it would have its first value again",
                    f'make it a buffer: {owner}.register_buffer("{target.attr}", '
                    "torch.tensor(...))",
                )

    def _is_in_class(self, node: ast.AST, base: str) -> bool:
        """Whether a node is inside a class with a base class whose name ends with ``base``."""
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.ClassDef) and any(
                ast.unparse(b).endswith(base) for b in parent.bases
            ):
                return True
            node = parent
        return False


def _attach(name: str) -> str:
    key = name.rpartition(".")[2]
    return f'reft.attach(engine, state={{"{key}": {name}}}) before training'


def _calls(node: ast.AST) -> set[str]:
    """Return the names of functions and methods that are called inside a node."""
    return {_name(n) for n in ast.walk(node) if isinstance(n, ast.Call)}


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that occur inside a node, as source text."""
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}


def _innermost_call(value: ast.expr) -> ast.Call | None:
    """Return the call that creates an object, without chained methods that return the object.

    For ``Generator().manual_seed(3)`` this is ``Generator()``. None if there is no call.
    """
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if not isinstance(value.func.value, ast.Call):
            break
        value = value.func.value
    return value if isinstance(value, ast.Call) else None


def _written(node: ast.AST) -> tuple[ast.expr | None, ast.expr]:
    if isinstance(node, ast.AugAssign):
        return node.target, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    return None, ast.Constant(None)
