"""Checks that need only the configuration and the script. Pure, and without torch.

`reft plan`, `reft config --check` and the start of a job all use them. Checks that depend on the
engine and the placement of ranks are made by the job at its start (P12).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from typing import Any, TypeVar

from reft.checks.held import HeldState
from reft.config import AOR, ReftConfig, Variant, load_config
from reft.errors import ConfigError
from reft.findings import Finding, Severity
from reft.naming import BLOCK_NAME


def config_findings(config: Mapping[str, Any]) -> tuple[ReftConfig, list[Finding]]:
    """Check a DeepSpeed configuration.

    Returns:
        The ``reft`` block, and the findings that follow from the configuration alone.

    Raises:
        ConfigError: the ``reft`` block is missing or invalid, or a part of the configuration that
            must be an object is not.
    """
    if BLOCK_NAME not in config:
        raise ConfigError(
            f'the configuration has no "{BLOCK_NAME}" block, so that reft has no effect on the '
            f'job; write "{BLOCK_NAME}": {{"enabled": true}}'
        )
    block = load_config(config)
    if left_open := list(values_left_open(config)):
        note = f'"auto" is not judged, because a Trainer fills it in: {", ".join(left_open)}'
        return block, [*_findings(config, block), Finding(Severity.NOTE, note)]
    return block, _findings(config, block)


def _findings(config: Mapping[str, Any], block: ReftConfig) -> list[Finding]:
    of_job = [*_tolerance_findings(block), *recompute_findings(config, block)]
    of_block = block_findings(block, for_megatron=holds_block_alone(config))
    return [*engine_findings(config), *of_job, *of_block]


def holds_block_alone(config: Mapping[str, Any]) -> bool:
    """Whether a configuration file holds the ``reft`` block alone, without DeepSpeed's settings,
    as for Megatron-LM (``reft launch --block``)."""
    return set(config) == {BLOCK_NAME}


def engine_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find settings of DeepSpeed that reft refuses, whatever its own block says."""
    refused = partial(Finding, Severity.REFUSED)
    zero = find_part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        yield refused(
            f'"zero_optimization.stage" is {stage!r}: reft supports ZeRO stages 0 to 3',
            "write 2",
        )
    if zero.get("zenflow"):
        yield refused(
            '"zero_optimization.zenflow" is on, and reft does not know its state', "remove it"
        )
    if stage == 3:
        yield from _zero3_findings(zero, find_part(config, "torch_autocast"))
    yield from _offload_findings(zero)
    kind = str(find_part(config, "optimizer").get("type", "")).lower()
    if kind in ("onebitadam", "zerooneadam", "onebitlamb"):
        found = f'"optimizer.type" is {kind!r}, which keeps an error feedback per worker'
        yield refused(found, 'write "AdamW"')
    if kind == "exactadam" and stage and not config.get("zero_allow_untested_optimizer"):
        yield refused(
            f'"optimizer.type" is "ExactAdam" at ZeRO-{stage}, where DeepSpeed accepts its own '
            "optimizers alone",
            'write "zero_allow_untested_optimizer": true',
        )
    if kind == "muon":
        yield refused('"optimizer.type" is "muon", whose state reft does not know', 'write "AdamW"')
    autocast = find_part(config, "torch_autocast")
    if autocast.get("enabled") and str(autocast.get("dtype")) in ("fp16", "float16", "half"):
        found = '"torch_autocast" in fp16 scales gradients by itself'
        yield refused(found, 'write "dtype": "bfloat16", or use "fp16"')
    for path, change in (
        ("amp.enabled", 'use "fp16" or "bf16" instead'),
        ("quantize_training.enabled", "remove it"),
        ("hybrid_engine.enabled", "write false"),
        ("compile.deepcompile", "write false"),
    ):
        name, _, key = path.partition(".")
        if find_part(config, name).get(key):
            yield refused(f'"{path}" is on, and reft does not know its state', change)
    if _enables(find_part(config, "compression_training")):
        yield refused('"compression_training" is on, and reft does not know its state', "remove it")
    size = config.get("sequence_parallel_size", 1)
    if size != 1:
        found = f'"sequence_parallel_size" is {size!r}: reft does not support such ranks'
        yield refused(found, "write 1")


def _zero3_findings(zero: Mapping[str, Any], autocast: Mapping[str, Any]) -> Iterator[Finding]:
    """Find settings of ZeRO-3 that reft does not support."""
    refused = partial(Finding, Severity.REFUSED)
    if zero.get("mics_shard_size", -1) > 0:
        found = '"zero_optimization.mics_shard_size" is set: reft does not support MiCS'
        yield refused(found, 'remove it; "zero_hpz_partition_size" also gathers within a node')
    for name in (
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "zeropp_loco_param",
    ):
        if zero.get(name):
            found = f'"zero_optimization.{name}" is on: reft does not support quantized ZeRO++'
            yield refused(found, "remove it")
    if autocast.get("enabled") and zero.get("stage3_param_persistence_threshold") != 0:
        yield refused(
            # After an optimizer step, persistent parameters stay gathered in fp32. Only the first
            # forward pass of a process has to gather them, and does so in 16 bits.
            '"torch_autocast" gathers persistent parameters of ZeRO-3 in another precision in the '
            "first step after a start: a resumed run would differ",
            'write "stage3_param_persistence_threshold": 0',
        )


def is_offloaded(config: Mapping[str, Any]) -> bool:
    """Whether master weights and moments are kept outside of the device."""
    offload = find_part(find_part(config, "zero_optimization"), "offload_optimizer")
    return bool(offload.get("device", "none") != "none")


def _offload_findings(zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Find settings by which DeepSpeed offloads state in a way that reft does not support.

    Supported are master weights and moments in host memory and, at stage 3, weights.
    """
    refused = partial(Finding, Severity.REFUSED)
    offload, stage = find_part(zero, "offload_optimizer"), zero.get("stage", 0)
    device, ratio = offload.get("device", "none"), offload.get("ratio", 1)
    if device not in ("none", "cpu"):
        yield refused(
            f'"zero_optimization.offload_optimizer.device" is {device!r}: reft knows offloaded '
            "state in host memory only",
            'write "cpu"',
        )
    elif device == "cpu" and stage not in (1, 2, 3):
        yield refused(
            f'"zero_optimization.offload_optimizer" is on at stage {stage!r}: reft supports it at '
            "stages 1 to 3",
            "remove it, or write stage 2",
        )
    elif device == "cpu" and ratio != 1:
        yield refused(
            f'"zero_optimization.offload_optimizer.ratio" is {ratio!r}: reft does not know an '
            "optimizer of which DeepSpeed offloads a part",
            "write 1.0",
        )
    if offload.get("super_offload"):
        yield refused(
            '"zero_optimization.offload_optimizer.super_offload" is on, and reft does not know its '
            "state",
            "remove it",
        )
    device = find_part(zero, "offload_param").get("device", "none")
    if device not in ("none", "cpu") or (device == "cpu" and stage != 3):
        yield refused(
            f'"zero_optimization.offload_param.device" is {device!r} at stage {stage!r}: reft '
            "knows offloaded weights in host memory, at stage 3",
            "remove it",
        )


def _tolerance_findings(block: ReftConfig) -> Iterator[Finding]:
    """Compare the tolerance that the user wants with what the protection scheme can survive.

    `reft plan` and the start of a job also take the placement of ranks into account (P4).
    """
    if block.chooses or block.allow_unprotected or block.variant is Variant.NONE:
        return
    survived = block.scheme.certain_losses
    if survived < block.tolerance and (survived or "tolerance" in block.model_fields_set):
        yield Finding(
            Severity.REFUSED,
            f'"tolerance" is {block.tolerance}, but "protection": "{block.protection}" survives '
            f"{survived} lost node(s): on several nodes the job is not started",
            f'write "protection": "auto", or "tolerance": {survived}',
        )


def recompute_findings(config: Mapping[str, Any], block: ReftConfig) -> Iterator[Finding]:
    """Find settings with which peers cannot recompute ZeRO partitions, as "+aor" requests.

    Without partitions "+aor" has no effect, and there are no findings.
    """
    zero = find_part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if not block.recompute or block.variant is Variant.NONE or stage not in (1, 2, 3):
        return
    refused = partial(Finding, Severity.REFUSED)
    leave_out = f'leave "{AOR}" out of "protection"'
    if is_offloaded(config):
        found = f'"{AOR}" needs the gradients of all partitions on every rank, but with'
        found += ' "offload_optimizer" ranks keep those of the own partition only'
        yield refused(found, f"{leave_out}, or remove offload_optimizer")
        return
    if stage != 1:
        found = f'"{AOR}" needs the gradients of all partitions on every rank, but ZeRO-{stage}'
        yield refused(f"{found} keeps those of the own partition only", f"{leave_out}, or write 1")
        return
    kind = str(find_part(config, "optimizer").get("type", "")).lower()
    if kind not in ("", "adam", "adamw", "exactadam"):
        found = f'"optimizer.type" is {kind!r}, but "{AOR}" recomputes Adam and AdamW only'
        yield refused(found, f'write "AdamW", or {leave_out}')
    kept = [name for name in ("reduce_scatter", "contiguous_gradients") if zero.get(name, True)]
    if kept and not _accumulates_bf16_in_fp32(config):
        yield refused(
            f'"{AOR}" needs the gradients of all partitions on every rank, but ZeRO-1 with '
            f"{' and '.join(kept)}, which are on by default, keeps those of the own partition only",
            'write "zero_optimization": {"reduce_scatter": false, "contiguous_gradients": false}, '
            f'or use bf16 with "data_types": {{"grad_accum_dtype": "fp32"}}, or {leave_out}',
        )


def _accumulates_bf16_in_fp32(config: Mapping[str, Any]) -> bool:
    bf16 = find_part(config, "bf16") or find_part(config, "bfloat16")
    return (
        bool(bf16.get("enabled"))
        and find_part(config, "data_types").get("grad_accum_dtype") == "fp32"
    )


def block_findings(block: ReftConfig, *, for_megatron: bool = False) -> Iterator[Finding]:
    """Find settings of the ``reft`` block that limit recovery (P12).

    Args:
        block: the ``reft`` block.
        for_megatron: whether the job trains with Megatron-LM, which writes its checkpoints itself.
    """
    warning = partial(Finding, Severity.WARNING)
    if not block.enabled:
        yield warning(f'"{BLOCK_NAME}.enabled" is false: reft has no effect', "write true")
    if block.variant is Variant.NONE:
        yield warning(
            '"variant" is "none": no versions are taken, and nothing can be resumed', 'write "has"'
        )
    if not block.chooses and not block.scheme.certain_losses:
        yield warning(
            '"protection" is "none": the loss of a node loses its memory for good', 'write "auto"'
        )
    if for_megatron and block.persist.dir is not None:
        yield Finding(
            Severity.REFUSED,
            f'"persist.dir" is {str(block.persist.dir)!r}, but this file holds the block alone, as '
            "for Megatron-LM, whose checkpoints reft does not write",
            "remove it, and save with --save; if DeepSpeed trains, check its JSON with the block",
        )
    elif block.persist.dir is None and not for_megatron:
        yield warning(
            "reft writes nothing to storage: when more nodes are lost than the job survives, only "
            "checkpoints that the script writes are left",
            'write "persist": {"dir": ..., "interval_steps": ...}',
        )
    if block.faults:
        yield warning('"faults" makes ranks fail on purpose', "remove it from a production job")


def storage_findings(block: ReftConfig) -> Iterator[Finding]:
    """Yield a warning if this host cannot write to ``persist.dir``."""
    from reft.storage.persist import MAKE_WRITABLE, reason_unwritable

    directory = block.persist.dir
    if directory is not None and (reason := reason_unwritable(directory)):
        yield Finding(
            Severity.WARNING,
            f"checkpoints cannot be written to persist.dir, {directory}: {reason}. Until they can, "
            f"the job resumes from memory only",
            MAKE_WRITABLE,
        )


def values_left_open(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Find keys with the value "auto", which a Hugging Face Trainer replaces when it starts.

    The ``reft`` block is left out, because "auto" has a different meaning there.

    Args:
        config: DeepSpeed's configuration, or an object within it.
        path: prefix of the keys of ``config``, with a dot at the end; empty for the whole.

    Yields:
        The keys with dots, such as ``optimizer.params.lr``.
    """
    for key, value in config.items():
        if key == BLOCK_NAME and not path:
            continue
        if value == "auto":
            yield f"{path}{key}"
        elif isinstance(value, Mapping):
            yield from values_left_open(value, f"{path}{key}.")


def find_part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of the configuration; empty if the key is missing.

    Raises:
        ConfigError: the value is no object.
    """
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f'"{key}" is {value!r}; expected an object')
    return value


def _enables(part: Any) -> bool:
    return isinstance(part, Mapping) and any(
        (key in ("enabled", "technique_enabled") and value is True) or _enables(value)
        for key, value in part.items()
    )


# -- the training script ---------------------------------------------------------------------------

_TRAINS = frozenset({"backward", "train_batch"})
_LOADS = ("load_checkpoint", "resume")
_FILE_TESTS = {
    "exists",
    "isfile",
    "isdir",
    "is_file",
    "is_dir",
    "listdir",
    "glob",
    "iterdir",
    "scandir",
}
N = TypeVar("N", bound=ast.AST)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class ScriptLook:
    """Finds what prevents a training script from resuming exactly, by analysing its source.

    Code in other modules is not analysed.

    Raises:
        ConfigError: the source is not valid Python.
    """

    def __init__(self, source: str | bytes, name: str) -> None:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(
                f"{name} cannot be read as a Python script: {error}; correct it"
            ) from error
        self._nodes = list(ast.walk(tree))
        self._parents = {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }

    def findings(self) -> list[Finding]:
        resumed = (*self.conditional_loads(), *self.begins_anew())
        found = [*self._no_load(), *resumed, *self._data(), self._not_looked_for()]
        return sorted(found, key=lambda f: f.line)

    def begins_anew(self) -> list[Finding]:
        """Find state that a resumed script would lose or compute wrongly, sorted by line."""
        found = (
            *(*self.loops(), *self.skips(), *self.cycles()),
            *(*self.client_states(), *self.counted_early(), *self.own_state()),
        )
        return sorted(found, key=lambda f: f.line)

    def own_state(self) -> Iterator[Finding]:
        """Find random generators, averaged copies and attributes that must be passed to reft."""
        for held in HeldState(self._nodes, self._parents).findings():
            yield _finding(held.node, held.found, held.change)

    def skips(self) -> Iterator[Finding]:
        """Find loops in which the script skips batches of a loader that reft resumes already."""
        loaders = self._loaders()
        for loop in self._all(ast.For):
            read = {_text(part) for part in ast.walk(loop.iter)} & loaders
            calls = [call for call in ast.walk(loop.iter) if isinstance(call, ast.Call)]
            cuts = any(_name(call) in ("islice", "skip_first_batches") for call in calls)
            counter = None
            if any(_name(call) == "enumerate" for call in calls) and isinstance(
                loop.target, ast.Tuple
            ):
                counter = _text(loop.target.elts[0])
            if read and (cuts or (counter is not None and self._continues_below(loop, counter))):
                yield _finding(
                    loop,
                    f"`{min(read)}` is resumable, and the script skips batches of it as well. "
                    "Resumed, they would be skipped twice and never trained on",
                    "leave the skipping out: the loader begins behind the batches that were "
                    "trained on",
                )

    def cycles(self) -> Iterator[Finding]:
        """Find loaders that are read through ``itertools.cycle``.

        ``cycle`` repeats the batches that it has read since the process began. After a failure,
        these are different batches than before.
        """
        for call in self._calls("cycle"):
            read = {_text(argument) for argument in call.args} & self._all_loaders()
            if read:
                yield _finding(
                    call,
                    f"`{_text(call)}` keeps the batches that it reads from `{min(read)}` and "
                    "repeats them: resumed, it would keep those of the rest of a pass only",
                    f"while engine.global_steps < steps:\n    for batch in {min(read)}: ...",
                )

    def _all_loaders(self) -> set[str]:
        made = {
            _text(target) for target, call in self._assigned() if _name(call).endswith("DataLoader")
        }
        return made | self._loaders()

    def _loaders(self) -> set[str]:
        return {_text(target) for target, call in self._assigned() if _is_resumable(call)}

    def _continues_below(self, loop: ast.For, counter: str) -> bool:
        """Whether the loop skips iterations while its counter is below a limit."""
        return any(
            isinstance(node, ast.If)
            and any(isinstance(part, ast.Continue) for part in node.body)
            and any(
                isinstance(c, ast.Compare)
                and isinstance(c.ops[0], ast.Lt | ast.LtE)
                and _text(c.left) == counter
                for c in ast.walk(node.test)
            )
            for node in ast.walk(loop)
        )

    def conditional_loads(self) -> Iterator[Finding]:
        """Find calls that load a checkpoint only under a condition.

        An example is a test for a file that does not exist at the first restart. If the script has
        another such call without condition, there are no findings.
        """
        loads = [(call, self._condition(call)) for call in self._calls(*_LOADS)]
        if any(test is None for _, test in loads):
            return
        for call, test in loads:
            assert test is not None
            on_file = any(_name(part) in _FILE_TESTS for part in ast.walk(test))
            why = (
                ", which finds nothing before the script has saved a checkpoint" if on_file else ""
            )
            yield _finding(
                call,
                f"`{_text(call)}` is called only if `{_text(test)}`{why}. Where the call is "
                "skipped, a job that has state in memory is not resumed",
                "call it without the condition: it returns (None, None) where there is nothing to "
                "load",
            )

    def loops(self) -> Iterator[Finding]:
        """Find loops that count steps, or passes over a resumable loader, from 0 at a restart."""
        loaders = self._loaders()
        for loop in self._all(ast.For):
            if not (over := _counted_from_zero(loop.iter)):
                continue
            most, index = _text(over.args[-1]), _text(loop.target)
            begins = f"`for {index} in {_text(over)}` begins at 0 after every restart. Resumed"
            inner = (n for n in self._all(ast.For) if self._loop_around(self._parents[n]) is loop)
            if read := {_text(part) for node in inner for part in ast.walk(node.iter)} & loaders:
                if not any(getattr(part, "attr", None) == "epoch" for part in ast.walk(loop)):
                    yield _finding(
                        loop,
                        f"{begins} in pass N over `{min(read)}`, the job would train N passes too "
                        "many",
                        f"write for {index} in range({min(read)}.epoch, {most})",
                    )
            elif self._always_trains(loop) and not _skips(loop):
                yield _finding(
                    loop,
                    f"{begins} at step N, the job would train N steps too many, and values "
                    f"computed from `{index}` would belong to another step",
                    f"write for {index} in range(engine.global_steps, {most})",
                )

    def group_writes(self, key: str) -> Iterator[tuple[int, bool]]:
        """Find lines that write a value of a parameter group (``group["lr"] = ...``).

        Yields:
            The line number, and whether the value is derived from the engine's step.
        """
        writes = [(node, target) for node in self._all(ast.Assign) for target in node.targets]
        writes += [(node, node.target) for node in self._all(ast.AugAssign)]  # type: ignore[misc]
        for node, target in writes:
            if isinstance(target, ast.Subscript) and _text(target.slice) == repr(key):
                yield node.lineno, isinstance(node, ast.Assign) and self._from_step(node.value)

    def _from_step(self, value: ast.expr) -> bool:
        """Whether a value is computed from ``global_steps``, directly or by way of variables."""
        seen: set[str] = set()
        todo: list[ast.AST] = [value]
        while todo:
            node = todo.pop()
            if _reads_step(node):
                return True
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - seen
            seen |= names
            todo += [
                n.value for n in self._all(ast.Assign) if {_text(t) for t in n.targets} & names
            ]
        return False

    def client_states(self) -> Iterator[Finding]:
        """Find values that the script reads from a checkpoint's client state.

        A version in memory does not contain them unless the script passes them to reft.
        """
        attached = self._calls("attach", "initialize")
        if any(keyword.arg == "client_state" for call in attached for keyword in call.keywords):
            return
        loaded = [target for target, call in self._assigned() if _name(call) in _LOADS]
        states = {_text(t.elts[1]) for t in loaded if isinstance(t, ast.Tuple) and len(t.elts) == 2}
        reads: list[tuple[ast.expr, ast.expr, ast.expr]] = [
            (node, node.value, node.slice)
            for node in self._all(ast.Subscript)
            if isinstance(node.ctx, ast.Load)
        ]
        reads += [
            (c, c.func.value, c.args[0])
            for c in self._calls("get")
            if isinstance(c.func, ast.Attribute) and c.args
        ]
        for node, owner, key in reads:
            if _text(owner) in states:
                yield _finding(
                    node,
                    f"`{_text(node)}` is read from the client state of a checkpoint. A version in "
                    "memory, which the job is resumed from after a failure, does not have it",
                    f"write reft.attach(engine, client_state=lambda: {{{_text(key)}: ...}}) after "
                    f"deepspeed.initialize, or derive it from engine.global_steps",
                )

    def counted_early(self) -> Iterator[Finding]:
        """Find client state that changes before the forward pass of a step.

        Without a loader, a version is taken at the forward pass and includes the change; a resumed
        step would then change the state once more.
        """
        attached = self._calls("attach", "resume")
        states = [k.value for call in attached for k in call.keywords if k.arg == "client_state"]
        kept = {
            _text(part)
            for state in states
            for part in ast.walk(state)
            if isinstance(part, ast.expr)
        }
        if not kept or self._calls("begin_step"):
            return
        for loop in self._all(ast.While):
            steps = [c for c in ast.walk(loop) if isinstance(c, ast.Call) and _name(c) in _TRAINS]
            changes = [node for node in ast.walk(loop) if isinstance(node, ast.AugAssign)]
            first = min((call.lineno for call in steps), default=0)
            for change in changes:
                # A loop over a loader is different: its version is taken before the loader is read.
                early = change.lineno < first and self._loop_around(change) is loop
                if early and _text(change.target) in kept:
                    yield _finding(
                        change,
                        f"`{_text(change.target)}` is client state, and changes before the step's "
                        "forward "
                        "pass, where a version is taken: a resumed step would change it once more",
                        "write reft.begin_step(engine) where the loop begins, or change it after "
                        "engine.step()",
                    )

    def _not_looked_for(self) -> Finding:
        """Note that the analysis cannot find all state that a script holds itself."""
        call = "reft.attach(engine, state={...}) or its client_state"
        if self._is_megatrons():
            call = "reft.keep_state({...}) before pretrain()"
        return Finding(
            Severity.NOTE,
            "numbers and objects that the script keeps itself, such as counters, best losses and "
            "guards, are not found by reading it",
            f"pass them to {call}, and compare a killed run with an undisturbed one: reft rehearse",
        )

    def _no_load(self) -> Iterator[Finding]:
        after = "After a failure it would not be resumed: it would stop with an error"
        if self._calls(*_LOADS) or self._is_megatrons():
            return
        if not self._has_trainer():
            yield _finding(
                None,
                f"the script calls neither engine.load_checkpoint nor reft.resume. {after}",
                "write reft.resume(engine) after deepspeed.initialize",
            )
        elif not self._calls("resumable"):
            yield _finding(
                None,
                f"the script trains with a Hugging Face Trainer without reft.hf.resumable. {after}",
                "write trainer = reft.hf.resumable(trainer) before trainer.train()",
            )

    def _data(self) -> Iterator[Finding]:
        if any(_is_resumable(call) or _name(call) == "train_batch" for call in self._calls()):
            return
        for call in self._calls("DataLoader"):
            yield _finding(
                call,
                "a DataLoader is read in the script's own loop. After a failure the script "
                "continues with other samples, unless it skips those that were already used",
                "write loader = reft.resumable(loader), and for epoch in range(loader.epoch, "
                "epochs), and leave out any skipping of batches",
            )

    def _calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with the given names; without names, all calls."""
        return [call for call in self._all(ast.Call) if not names or _name(call) in names]

    def _all(self, kind: type[N]) -> Iterator[N]:
        return (node for node in self._nodes if isinstance(node, kind))

    def _assigned(self) -> Iterator[tuple[ast.expr, ast.Call]]:
        for node in self._all(ast.Assign):
            if isinstance(node.value, ast.Call):
                yield node.targets[0], node.value

    def _has_trainer(self) -> bool:
        """Whether the script creates a Hugging Face ``Trainer``, which loads checkpoints by itself.

        A class of the script's own counts only if it is derived from such a Trainer.
        """
        classes = self._all(ast.ClassDef)
        own = {
            c.name for c in classes if not any(_text(base).endswith("Trainer") for base in c.bases)
        }
        return any(
            _name(call).endswith("Trainer") and _name(call) not in own for call in self._calls()
        )

    def _is_megatrons(self) -> bool:
        """Whether the script calls Megatron's ``pretrain``, which loads checkpoints by itself."""
        imports = (
            i for i in self._all(ast.ImportFrom) if f"{i.module}.".startswith("megatron.training.")
        )
        names = (name for i in imports for name in i.names)
        return any(n.name == "pretrain" and self._calls(n.asname or n.name) for n in names)

    def _condition(self, node: ast.AST, within: ast.AST | None = None) -> ast.expr | None:
        """Find the innermost condition under which a node is executed.

        Args:
            node: the node.
            within: loop beyond which conditions are ignored; None: ignore those outside of the
                node's function.

        Returns:
            The condition; None if there is none. An ``if`` does not count if all its branches load
            a checkpoint.
        """
        while (parent := self._parents.get(node)) is not within and parent is not None:
            if isinstance(parent, _FUNCTIONS):
                return None
            is_test = isinstance(parent, ast.If | ast.IfExp | ast.While) and node is not parent.test
            if is_test and not (isinstance(parent, ast.If) and _always_loads(parent)):
                return None if "__name__" in _text(parent.test) else parent.test  # type: ignore[attr-defined]
            if isinstance(parent, ast.BoolOp) and node is not parent.values[0]:
                return parent.values[0]
            node = parent
        return None

    def _always_trains(self, loop: ast.For) -> bool:
        """Whether each iteration of a loop makes a training step.

        False for a loop that is nested, has no index, or is in a function that a loop calls: such a
        loop counts micro-batches or repetitions.
        """
        around: ast.AST | None = loop
        while around is not None and not isinstance(around, _FUNCTIONS):
            around = self._parents.get(around)
        name = getattr(around, "name", None)
        callers = [self._parents[loop], *(self._calls(name) if name is not None else ())]
        if _text(loop.target) == "_" or any(
            self._loop_around(node) is not None for node in callers
        ):
            return False
        calls = (c for c in self._calls("train_batch", "backward") if self._loop_around(c) is loop)
        return any(self._condition(call, within=loop) is None for call in calls)

    def _loop_around(self, node: ast.AST) -> ast.AST | None:
        around: ast.AST | None = node
        while around is not None and not isinstance(around, ast.For | ast.While):
            around = self._parents.get(around)
        return around


def _finding(node: ast.expr | ast.stmt | None, found: str, change: str) -> Finding:
    return Finding(Severity.WARNING, found, change, 0 if node is None else node.lineno)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _name(node: ast.AST) -> str:
    """Return the name of the called function; empty if the node is no call."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _is_resumable(call: ast.Call) -> bool:
    return _name(call) == "resumable" or _text(call.func) == "reft.data.loader"


def _always_loads(test: ast.If) -> bool:
    def loads(nodes: list[ast.stmt]) -> bool:
        return any(
            _always_loads(node)
            if isinstance(node, ast.If)
            else any(_name(n) in _LOADS for n in ast.walk(node))
            for node in nodes
        )

    return loads(test.body) and loads(test.orelse)


def _counted_from_zero(over: ast.expr) -> ast.Call | None:
    """Return the iterable of a loop if it is a ``range`` from 0 without the engine's step in it."""
    if not (isinstance(over, ast.Call) and _name(over) == "range" and over.args) or _reads_step(
        over
    ):
        return None
    return (
        over
        if len(over.args) == 1 or (len(over.args) == 2 and _text(over.args[0]) == "0")
        else None
    )


def _skips(loop: ast.For) -> bool:
    """Whether the loop may skip steps that were made before, or end when all have been made."""
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return any(
        isinstance(node, ast.Continue)
        or (isinstance(node, ast.Compare) and isinstance(node.ops[0], orders) and _reads_step(node))
        for node in ast.walk(loop)
    )


def _reads_step(node: ast.AST) -> bool:
    return any(getattr(part, "attr", None) == "global_steps" for part in ast.walk(node))


# -- Releases of DeepSpeed: checkpoints that each of them cannot load, and versions of torch with
# which reft was tested. docs/support.md contains this table, and the pages on clusters must agree
# with this table.

ZERO1_FP32 = 'ZeRO-1 with "grad_accum_dtype": "fp32"'
ZERO0 = "ZeRO-0"
ZERO0_PIPELINE = "ZeRO-0 in a pipeline"


@dataclass(frozen=True)
class Releases:
    """A range of DeepSpeed's releases: from release ``first`` up to, but not including, ``first``
    of the next row."""

    first: str
    # Engines in bf16 whose checkpoints these releases can save but not load; they can load those of
    # all other engines
    unloadable: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()  # Releases of torch with which tests were run
    clusters: tuple[str, ...] = ()  # Releases of torch on the pages about clusters; not tested
    patch: str = ""  # File in megatron_patches/ that Megatron-DeepSpeed needs


RELEASES = (
    Releases("0.17.0"),
    Releases("0.17.6", (ZERO1_FP32, ZERO0), ("2.4", "2.13")),
    Releases("0.18.0", (ZERO1_FP32,)),
    Releases("0.18.5", (ZERO0_PIPELINE,), ("2.13",), ("2.10+rocm7.1", "2.10+cu126")),
    Releases("0.19.0", (ZERO0_PIPELINE,), ("2.13", "2.15"), patch="4efb479/deepspeed-0.19.patch"),
)
END = "0.20"
"""The first release of DeepSpeed that is not supported."""


def release(deepspeed: str) -> Releases | None:
    """Return the row for a release of DeepSpeed; None if the release is not supported."""
    number = _number(deepspeed)
    known = [row for row in RELEASES if _number(row.first) <= number < _number(END)]
    return known[-1] if known else None


def unloadable(config: Mapping[str, Any], deepspeed: str) -> str | None:
    """Return the configured kind of engine if DeepSpeed saves checkpoints of it that it cannot
    load.

    Args:
        config: DeepSpeed's configuration. It does not show whether the script uses a pipeline, so
            kinds with and without one are considered.
        deepspeed: DeepSpeed's release.
    """
    bf16 = find_part(config, "bf16") or find_part(config, "bfloat16")
    row = release(deepspeed)
    if row is None or not bf16.get("enabled"):
        return None
    engines: tuple[str, ...] = (ZERO0, ZERO0_PIPELINE)
    if stage := find_part(config, "zero_optimization").get("stage", 0):
        # DeepSpeed does not use BF16_Optimizer for an offloaded optimizer.
        in_fp32 = _accumulates_bf16_in_fp32(config) and not is_offloaded(config)
        engines = (ZERO1_FP32,) if stage == 1 and in_fp32 else ()
    return next((engine for engine in engines if engine in row.unloadable), None)


def installed(config: Mapping[str, Any]) -> Finding:
    # DeepSpeed or torch may be a source tree on PYTHONPATH, which has no record of its release.
    found = (next(iter(distributions(name=name)), None) for name in ("deepspeed", "torch"))
    deepspeed, torch = (one.version if one else "of an unknown release" for one in found)
    row, engine, severity = release(deepspeed), unloadable(config, deepspeed), Severity.WARNING
    if row is None:
        text, change = "is not known", f"install {RELEASES[0].first} or later, below {END}"
    elif engine:
        text = f"cannot load its own checkpoints in bf16 of {engine}: that resumes from memory only"
        change = "install DeepSpeed 0.18.5 or later" if engine == ZERO1_FP32 else 'write "stage": 1'
    else:
        severity, text = Severity.NOTE, "loads its own checkpoints of this configuration"
        change = ""
    return Finding(severity, f"DeepSpeed {deepspeed} with torch {torch} {text}", change)


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))
