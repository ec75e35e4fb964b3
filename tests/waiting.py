"""Where the package's sources wait, found by the names of what is called. What cannot be told by its name is not
found: a mutex (`with lock:`), reading a file, a loop that asks again and again without a pause."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_METHODS = frozenset(
    {
        "wait",
        "wait_for",
        "ProcessGroupGloo",
        "wait_until",
        "wait_for_workers",
        "recv",
        "recv_into",
        "recv_bytes",
        "recvfrom",
        "sendall",
        "send_some",
        "receive_some",
        "communicate",
        "result",
        "synchronize",
        "select",
        "sigwait",
        "waitpid",
        "waitid",
        "readline",
        "sleep",
        "serve_forever",
        "create_connection",
        "connect",
        "init_process_group",
        "new_group",
        "destroy_process_group",
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "broadcast",
        "broadcast_object_list",
        "reduce_scatter",
        "isend",
        "Recv",
        "Create_group",
        "irecv",
        "batch_isend_irecv",
        "TCPStore",
        "getaddrinfo",
        "check_output",
        "check_call",
    }
)
"""Called on whatever: they wait, or may."""
_OF = {
    "get": ("queue", "store"),
    **dict.fromkeys(("check", "add", "set", "compare_set", "delete", "peek"), ("store",)),
    "put": ("queue",),
    "acquire": ("lock", "semaphore", "slot", "in_flight"),
    "accept": ("listener", "socket", "server"),
    "send": ("dist", "socket", "connection"),
    "recv": ("dist", "socket", "connection"),
    "gather": ("dist", "group"),
    "scatter": ("dist", "group"),
    "reduce": ("dist", "group"),
    "run": ("subprocess",),
    "call": ("subprocess",),
    "poll": ("poller", "selector"),
}
"""Called on something whose last name is such a one."""
_SIMULATED = "simulate"
"""Its processes wait in simulated time."""


def waits(package: Path) -> dict[str, list[int]]:
    """Where the sources under ``package`` wait.

    Returns:
        Line numbers by ``reft/module.py:Class.function``.
    """
    found: dict[str, list[int]] = {}
    for path in sorted(package.rglob("*.py")):
        if path.parent.name == _SIMULATED:
            continue
        name = path.relative_to(package.parent).as_posix()
        for function, line in _in_module(ast.parse(path.read_text())):
            found.setdefault(f"{name}:{function}", []).append(line)
    return found


def _in_module(tree: ast.Module) -> Iterator[tuple[str, int]]:
    yield from _walk(tree, ())


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _walk(child, (*names, child.name))
            continue
        if isinstance(child, ast.Call) and _may_wait(child):
            yield ".".join(names) or "module", child.lineno
        yield from _walk(child, names)


def _may_wait(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _METHODS
    if not isinstance(call.func, ast.Attribute):
        return False
    method, of = call.func.attr, ast.unparse(call.func.value).rsplit(".", 1)[-1].strip("_")
    if method == "join":
        # A thread's: without an argument, or with a time. A string's has what it joins.
        return not isinstance(call.func.value, ast.Constant) and (
            not call.args or "secs" in ast.unparse(call.args[0]) or isinstance(call.args[0], ast.Constant)
        )
    if method == "flock":
        return "LOCK_NB" not in ast.unparse(call) and "LOCK_UN" not in ast.unparse(call)
    if method in _METHODS:
        return True
    return of in _OF.get(method, ())
