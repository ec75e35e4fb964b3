"""What can be told about a training script by reading it: what it lacks to be resumed as it would have run.

Pure, and without torch: ``reft config --script`` reads a script before it runs, the hook at its first step.
What another module does for the script is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from reft.errors import ConfigError

LOADS = ("load_checkpoint", "resume")
_TESTS = frozenset(
    {"exists", "isfile", "isdir", "is_file", "is_dir", "listdir", "glob", "iterdir", "scandir"}
)
_TRAINS = frozenset({"train_batch", "backward"})
_SHUFFLES = frozenset({"randperm", "shuffle", "permutation"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SEEDS = frozenset({"manual_seed", "manual_seed_all", "set_seed", "seed_everything", "seed_all"})


@dataclass(frozen=True)
class Finding:
    """One thing that a script lacks.

    Attributes:
        line: of the script; 0: of none in particular.
        found: what it does.
        consequence: what that means after a failure.
        change: the lines to write.
    """

    line: int
    found: str
    consequence: str
    change: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.found}. {self.consequence}. {self.change}"


class ScriptLook:
    """A parsed script.

    Args:
        source: its text.
        name: of the file, for the error.

    Raises:
        ConfigError: it is no Python.
    """

    def __init__(self, source: str | bytes, name: str) -> None:
        try:
            self._tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{name} cannot be read as a Python script: {error}; correct it") from error
        self._parents = {c: p for p in ast.walk(self._tree) for c in ast.iter_child_nodes(p)}
        self._calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]

    def findings(self) -> list[Finding]:
        """Everything, in the order of lines."""
        resumed = (*self.conditional_loads(), *self.loops(), *self.client_states())
        found = [*self._no_load(), *resumed, *self._data(), *self._seed()]
        return sorted(found, key=lambda f: f.line)

    def conditional_loads(self) -> Iterator[Finding]:
        """Loads that stand behind a condition, such as a test for a file that is not there at the first
        restart. None where another load has no condition."""
        loads = [(call, self._condition(call)) for call in self._named(*LOADS)]
        if any(test is None for _, test in loads):
            return
        for call, test in loads:
            assert test is not None
            tests_files = any(_name(c) in _TESTS for c in ast.walk(test) if isinstance(c, ast.Call))
            why = "which finds nothing before the script has saved a checkpoint" if tests_files else ""
            yield Finding(
                call.lineno,
                f"`{_text(call)}` is called only if `{_text(test)}`" + (f", {why}" if why else ""),
                "A job that has state in memory is not resumed where it is left out",
                "Call it without the condition: it returns (None, None) where there is nothing to load",
            )

    def loops(self) -> Iterator[Finding]:
        """Loops that count steps, or passes over a resumable loader, from 0: so they do when resumed."""
        yield from self._step_loops()
        yield from self._pass_loops()

    def _pass_loops(self) -> Iterator[Finding]:
        """Loops over ``range(epochs)`` around one over a resumable loader, which knows its pass."""
        made = (node for node in ast.walk(self._tree) if isinstance(node, ast.Assign))
        loaders = {
            _text(node.targets[0])
            for node in made
            if isinstance(node.value, ast.Call) and _is_resumable(node.value)
        }
        for inner in (node for node in ast.walk(self._tree) if isinstance(node, ast.For)):
            read = {_text(part) for part in ast.walk(inner.iter) if isinstance(part, ast.expr)} & loaders
            loop = self._nearest_loop(self._parents[inner])
            if not read or not isinstance(loop, ast.For) or not _from_zero(loop.iter):
                continue
            if any(getattr(part, "attr", None) == "epoch" for part in ast.walk(loop)):
                continue
            assert isinstance(loop.iter, ast.Call)
            loader, epochs, index = min(read), _text(loop.iter.args[-1]), _text(loop.target)
            yield Finding(
                loop.lineno,
                f"`for {index} in {_text(loop.iter)}` begins at 0 in every life",
                f"Resumed in pass N over `{loader}`, the job would train N passes too many",
                f"Write for {index} in range({loader}.epoch, {epochs})",
            )

    def _step_loops(self) -> Iterator[Finding]:
        """Loops over ``range(steps)`` that train."""
        for loop in (node for node in ast.walk(self._tree) if isinstance(node, ast.For)):
            calls = [c for c in self._named(*_TRAINS) if self._nearest_loop(c) is loop]
            # A loop within another one, or without an index, counts micro-batches or repeats.
            if self._is_repeated(self._parents[loop]) or _text(loop.target) == "_":
                continue
            always = any(self._condition(call, within=loop) is None for call in calls)
            if not always or not _from_zero(loop.iter) or _skips(loop):
                continue
            assert isinstance(loop.iter, ast.Call)
            steps, index = _text(loop.iter.args[-1]), _text(loop.target)
            yield Finding(
                loop.lineno,
                f"`for {index} in {_text(loop.iter)}` begins at 0 in every life",
                "Resumed at step N, the job would train N steps too many, and what follows from "
                f"`{index}` would be another step's",
                f"Write for {index} in range(engine.global_steps, {steps})",
            )

    def client_states(self) -> Iterator[Finding]:
        """What is read from a checkpoint's client state; a version in memory has only what it was told."""
        if any(_keyword(call, "client_state") for call in self._named("attach", "initialize")):
            return
        states = set()
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and _name(node.value) in LOADS
            ):
                target = node.targets[0]
                if isinstance(target, ast.Tuple) and len(target.elts) == 2:
                    states.add(_text(target.elts[1]))
        for node in ast.walk(self._tree):
            key = _key_read(node, states)
            if key is not None:
                yield Finding(
                    getattr(node, "lineno", 0),
                    f"`{_text(node)}` is read from the client state of a checkpoint",
                    "A version in memory, which the job is resumed from after a failure, does not have it",
                    f"Write reft.attach(engine, client_state=lambda: {{{key}: ...}}) behind "
                    f"deepspeed.initialize, or derive it from engine.global_steps",
                )

    def _no_load(self) -> Iterator[Finding]:
        if any(self._named(*LOADS)) or self._is_megatrons():
            return
        if self._has_trainer():
            if not any(self._named("resumable")):
                yield Finding(
                    0,
                    "the script trains with a Hugging Face Trainer that reft does not know of",
                    "After a failure it would not be resumed: it would stop with an error",
                    "Write trainer = reft.hf.resumable(trainer) before trainer.train()",
                )
        else:
            yield Finding(
                0,
                "the script calls neither engine.load_checkpoint nor reft.resume",
                "After a failure it would not be resumed: it would stop with an error",
                "Write reft.resume(engine) behind deepspeed.initialize",
            )

    def _data(self) -> Iterator[Finding]:
        if any(_is_resumable(call) or _name(call) == "train_batch" for call in self._calls):
            return
        for call in self._named("DataLoader"):
            workers = _keyword(call, "num_workers")
            ahead = "" if workers in (None, "0") else f" whose {workers} workers read ahead"
            yield Finding(
                call.lineno,
                f"a DataLoader{ahead} is read in a loop of the script's own",
                "After a failure the script goes on with other samples, unless it skips what was taken",
                "Write loader = reft.resumable(loader), and for epoch in range(loader.epoch, epochs)",
            )
        for call in self._named(*_SHUFFLES):
            yield Finding(
                call.lineno,
                f"the order of the samples is drawn by `{_text(call)}`",
                "After a failure it is drawn anew, and the place in it is not known",
                "Let a DataLoader shuffle, and write loader = reft.resumable(loader)",
            )

    def _seed(self) -> Iterator[Finding]:
        if not (any(self._named(*_SEEDS)) or self._has_trainer() or self._is_megatrons()):
            yield Finding(
                0,
                "no seed is set",
                "A job is resumed exactly all the same; its first start cannot be repeated",
                "Write torch.manual_seed(seed) before the model is made",
            )

    def _has_trainer(self) -> bool:
        """Whether it makes a Hugging Face ``Trainer``, which loads and seeds by itself. A class of the script
        that is derived from no other ``Trainer`` is none."""
        classes = (node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef))
        own = {c.name for c in classes if not any(_text(base).endswith("Trainer") for base in c.bases)}
        return any(_name(call).endswith("Trainer") and _name(call) not in own for call in self._calls)

    def _is_megatrons(self) -> bool:
        """Whether it calls Megatron's ``pretrain``, which loads and seeds by itself."""
        imported = (
            alias.asname or alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("megatron.training.")
            for alias in node.names
            if alias.name == "pretrain"
        )
        return any(self._named(*imported))

    def _named(self, *names: str) -> Iterator[ast.Call]:
        return (call for call in self._calls if _name(call) in names)

    def _condition(self, node: ast.AST, within: ast.AST | None = None) -> ast.expr | None:
        """The innermost test within its function, or ``within`` a loop, that decides whether ``node`` is
        reached. One whose branches all load does not decide."""
        while (parent := self._parents.get(node)) is not within and parent is not None:
            if isinstance(parent, _FUNCTIONS):
                return None
            if isinstance(parent, ast.If) and _loads([parent]):
                node = parent
                continue
            if isinstance(parent, ast.If | ast.IfExp | ast.While) and node is not parent.test:
                return None if _is_main_guard(parent.test) else parent.test
            if isinstance(parent, ast.BoolOp) and node is not parent.values[0]:
                return parent.values[0]
            node = parent
        return None

    def _is_repeated(self, node: ast.AST) -> bool:
        """Whether a loop runs it again, within its function or around a call of that."""
        if self._nearest_loop(node) is not None:
            return True
        around: ast.AST | None = node
        while around is not None and not isinstance(around, _FUNCTIONS):
            around = self._parents.get(around)
        name = getattr(around, "name", None)
        return name is not None and any(self._nearest_loop(call) is not None for call in self._named(name))

    def _nearest_loop(self, node: ast.AST) -> ast.AST | None:
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, ast.For | ast.While):
            parent = self._parents.get(parent)
        return parent


def _key_read(node: ast.AST, states: Set[str]) -> str | None:
    """The key of ``state[key]`` or ``state.get(key)``, as it is written."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _text(node.value) in states:
        return _text(node.slice)
    if isinstance(node, ast.Call) and _name(node) == "get" and node.args:
        owner = getattr(node.func, "value", None)
        return _text(node.args[0]) if owner is not None and _text(owner) in states else None
    return None


def _is_resumable(call: ast.Call) -> bool:
    """Whether it makes a loader that knows its pass."""
    return _name(call) == "resumable" or _text(call.func) == "reft.data.loader"


def _name(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _keyword(call: ast.Call, name: str) -> str | None:
    return next((_text(k.value) for k in call.keywords if k.arg == name), None)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _loads(nodes: Sequence[ast.AST]) -> bool:
    """Whether one of them loads, whichever branch is taken."""
    return any(
        _loads(node.body) and _loads(node.orelse)
        if isinstance(node, ast.If)
        else any(isinstance(call, ast.Call) and _name(call) in LOADS for call in ast.walk(node))
        for node in nodes
    )


def _is_main_guard(test: ast.expr) -> bool:
    return "__name__" in _text(test)


def _from_zero(over: ast.expr) -> bool:
    """Whether it is ``range(steps)`` or ``range(0, steps)``, and not the rest of the steps."""
    if not (isinstance(over, ast.Call) and _name(over) == "range" and over.args) or _reads_step(over):
        return False
    return len(over.args) == 1 or (len(over.args) == 2 and _text(over.args[0]) == "0")


def _skips(loop: ast.For) -> bool:
    """Whether the loop may leave steps out that were done before, or end when all were."""
    return any(
        isinstance(node, ast.Continue)
        or (isinstance(node, ast.Compare) and isinstance(node.ops[0], _ORDER) and _reads_step(node))
        for node in ast.walk(loop)
    )


def _reads_step(node: ast.AST) -> bool:
    return any(getattr(part, "attr", None) == "global_steps" for part in ast.walk(node))
