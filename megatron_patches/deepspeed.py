"""Captures and restores Megatron-DeepSpeed's own training state, which its checkpoints hold in
addition to DeepSpeed's.

The program's training loop keeps counters in its parsed arguments, and updates them after the
optimizer step; a version is taken when the next step begins, so it contains them.
``load_checkpoint`` returns the state as the program expects it. The only thing that is changed
in the program is the option ``--load``: it is set if it was not given, because without it the
program would not load the state.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from reft.data.degrees import nodes_may_change
from reft.engine.context import JobContext
from reft.errors import ConfigError, UnsupportedStateError
from reft.wrapping import wrap

logger = logging.getLogger(f"reft.{__name__}")

_CHECKPOINTING = "megatron.checkpointing"
_CHECKPOINT_VERSION = 3.0
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype})
_START_ONCE = (
    "Start once without the reft block and with --save DIR --save-interval 1 --exit-interval 1, "
    "then train with --load DIR"
)
_REFUSED = {
    "finetune": "every restart after a failure would start again from the weights alone. "
    f"{_START_ONCE}",
    "reset_iteration": f"every restart after a failure would begin at iteration 0. {_START_ONCE}",
    "universal_checkpoint": f"reft persists no universal checkpoints. {_START_ONCE}",
    "curriculum_learning_legacy": "reft does not know how many tokens its steps consume",
    "data_efficiency_curriculum_learning": "reft does not know how many tokens its steps consume",
    "random_ltd": "reft does not know how many tokens its steps consume",
    "compression_training": "the state of the compression is not captured",
    "mos": "the teacher's state is not captured",
    "kd": "the teacher's state is not captured",
}
"""Options with which a resumed run would differ from an uninterrupted one, each with the reason."""
_REFUSED_ABOVE_ONE = {
    "num_experts": "its checkpoints are distributed by expert; reft knows dense models only",
    "ds_sequence_parallel_size": "reft knows stages, data-parallel and tensor-parallel ranks only",
}
"""Options whose value must be 1, each with the reason."""
_DEGREES = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_SINGLE, _CYCLIC = "single", "cyclic"
_BOUND = (
    "Megatron's MegatronPretrainingRandomSampler (--dataloader-type cyclic) distributes a pass by "
    "the data-parallel degree: at another degree, some samples of the pass are used twice and "
    "others never. Use --dataloader-type single, whose order is the same at every degree"
)
_IN_CONFIG = {
    "curriculum_learning_legacy": "curriculum_learning",
    "compression_training": "compression_training",
}
"""Options that users set in the DeepSpeed configuration, each with its key there."""


def running_program(engine: Any) -> MegatronProgram | None:
    """Return the Megatron-DeepSpeed program that created the engine; None for any other script."""
    checkpointing = sys.modules.get(_CHECKPOINTING)
    get_args = getattr(checkpointing, "get_args", None)
    if get_args is None:
        return None
    try:
        args = get_args()
    # No arguments were parsed, so the module was imported for another reason
    except AssertionError:
        return None
    return (
        MegatronProgram(engine, args, checkpointing) if getattr(args, "deepspeed", False) else None
    )


def warn_attention(model: torch.nn.Module) -> None:
    """Set on each fused attention parameter how queries, keys and values are laid out in it.

    Depending on the release of the program, the three are stored as three blocks or head by
    head. Only the code of the forward pass shows which; if that code is unknown, nothing is set.
    """
    attention: Any
    parameter: Any
    for attention in model.modules():
        fused = getattr(attention, "query_key_value", None)
        if not isinstance(fused, torch.nn.Module):
            continue
        code = inspect.getsource(type(attention).forward)
        heads, width = (
            attention.num_attention_heads_per_partition,
            attention.hidden_size_per_attention_head,
        )
        keys = getattr(attention, "num_key_value_heads_per_partition", heads)
        blocks: tuple[int, ...] | None = None
        if "self.split_tensor(mixed_x_layer)" in code:
            blocks = ((heads + 2 * keys) * width,)
        elif "each_hidden_size" in code or "[heads.shape[2] - 2 * groups, groups, groups]" in code:
            blocks = (heads * width, keys * width, keys * width)
        for parameter in fused.parameters() if blocks is not None else ():
            parameter.partition_blocks = blocks


class MegatronProgram:
    """Provides the client state of ``pretrain_gpt.py`` and similar programs.

    Args:
        engine: DeepSpeed's engine.
        args: parsed arguments of the program, which also hold its counters.
        checkpointing: the program's module ``checkpointing``.

    Attributes:
        data_is_bound: reason why the order of the data depends on the data-parallel degree;
            empty if it does not.

    Raises:
        ConfigError: the program was started with an option that reft cannot resume.
    """

    def __init__(self, engine: Any, args: Any, checkpointing: Any) -> None:
        self._engine = engine
        self._args = args
        self._checkpointing = checkpointing
        self._universal: dict[str, Any] | None = None
        kind = check_options(args, _REFUSED | _REFUSED_ABOVE_ONE)
        self.data_is_bound = _BOUND if kind == _CYCLIC else ""

    def join(self, context: JobContext) -> None:
        """Connect the program to a session.

        The program derives its position in the data from the samples that it has consumed.
        Without ``--load`` the program would not call ``load_checkpoint``. In this case the job
        is resumed here, and if there was a state to resume, ``--load`` is set so that the
        program loads its counters.
        """
        context.engine.data.leave_to_program()  # type: ignore[union-attr]  # DeepSpeed's has one
        warn_attention(self._engine.module)
        wrap(self._engine, "load_checkpoint", self._load)
        if self.data_is_bound and (nodes := nodes_may_change()):
            context.warn(f"the number of nodes may change ({nodes}). {self.data_is_bound}")
        if context.is_rank_zero:
            logger.info(
                "the program is Megatron-DeepSpeed. It needs no patch; its iteration, consumed "
                "samples and "
                "tokens, arguments and random states are part of every version. reft refuses %s",
                ", ".join(map(_option, sorted((*_REFUSED, *_REFUSED_ABOVE_ONE)))),
            )
        if context.is_rank_zero and getattr(self._args, "exit_signal_handler", False):
            logger.warning(
                "with reft, --exit-signal-handler has no effect: on SIGTERM the job commits its "
                "step in memory and ends, and the program writes no checkpoint to --save. To get a "
                'checkpoint then, write "persist": {"dir": ...} into the reft block'
            )
        if self._args.load is None:
            if context.is_rank_zero:
                logger.info(
                    "Megatron was started without --load: it resumes from the job's memory only"
                )
            if self._engine.load_checkpoint(None)[0] is not None:
                self._args.load = str(context.job_dir.path)

    def client_state(self) -> dict[str, Any]:
        """Return the client state that the program's ``save_checkpoint`` would pass to DeepSpeed
        after this step.

        Raises:
            UnsupportedStateError: the program's iteration differs from the engine's step.
        """
        args, step = self._args, int(self._engine.global_steps)
        counted = int(getattr(args, "iteration", 0))
        if step != counted:
            raise UnsupportedStateError(
                f"Megatron is in iteration {counted}, the engine has made {step} steps; expected "
                "the same number"
            )
        args = Namespace(**{name: value for name, value in vars(args).items() if _is_plain(value)})
        return {
            "args": args,
            "checkpoint_version": _CHECKPOINT_VERSION,
            "iteration": step,
            "tokens": args.consumed_train_tokens,
            **self._universal_info(),
            "rng_state": self._rng_state(),
        }

    def _load(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Load, and adapt the client state if the version was taken with other parallel degrees.

        The program refuses a state with degrees that differ from its own, so they are replaced
        by its own. Random states of another layout do not fit, so the program keeps the current
        ones.
        """
        path, client = original(*args, **options)
        saved_args = (client or {}).get("args")
        saved = [getattr(saved_args, name, None) for name in _DEGREES]
        current = [getattr(self._args, name, None) for name in _DEGREES]
        if isinstance(saved_args, Namespace) and saved != current:
            vars(saved_args).update(zip(_DEGREES, current, strict=True))
            client["rng_state"] = self._rng_state()
        return path, client

    def _universal_info(self) -> dict[str, Any]:
        """Return the data that a conversion to DeepSpeed's universal checkpoints needs; empty in
        releases of the program that have none.
        """
        if self._universal is None:
            describe = getattr(self._checkpointing, "_universal_checkpoint_info", None)
            key = getattr(self._checkpointing, "UNIVERSAL_CHECKPOINT_INFO", "")
            info = describe([self._engine]) if describe is not None else None
            self._universal = {key: info} if _is_plain(info) and info else {}
        return self._universal

    def _rng_state(self) -> list[dict[str, Any]]:
        """Return the random states in the form of the program: a list with one entry, or with
        one per data-parallel rank."""
        from deepspeed.accelerator import get_accelerator

        tracker = self._checkpointing.tensor_parallel.get_cuda_rng_tracker()
        states = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": get_accelerator().get_rng_state(),
            "rng_tracker_states": tracker.get_states(),
        }
        several = getattr(self._args, "data_parallel_random_init", False)
        return [states] * (int(self._engine.dp_world_size) if several else 1)


def check_options(args: Any, refused: Mapping[str, str]) -> str:
    """Check the arguments of a program.

    Args:
        args: the parsed arguments.
        refused: options that are refused, each with the reason.

    Returns:
        The kind of the program's data loader: ``single`` or ``cyclic``.

    Raises:
        ConfigError: a refused option is given, or the kind of the data loader is unknown.
    """
    for name, reason in refused.items():
        if _is_given(args, name):
            raise ConfigError(
                f"Megatron was started with {_option(name)}, which reft cannot resume: {reason}"
            )
    kind = getattr(args, "dataloader_type", None) or _SINGLE
    if kind not in {_SINGLE, _CYCLIC}:
        raise ConfigError(
            f"Megatron was started with --dataloader-type {kind}, whose position reft does not "
            f"know; use {_SINGLE} or {_CYCLIC}"
        )
    return str(kind)


def _option(name: str) -> str:
    """Return the option as a user writes it."""
    if name in _IN_CONFIG:
        return f'"{_IN_CONFIG[name]}" in the DeepSpeed configuration'
    return "--" + name.replace("_", "-")


def _is_given(args: Any, name: str) -> bool:
    value = getattr(args, name, None)
    if name not in _REFUSED_ABOVE_ONE:
        return bool(value)
    return any(degree > 1 for degree in (value if isinstance(value, list) else [value or 1]))


def _is_plain(value: Any) -> bool:
    """Return whether an argument's value can be stored and decoded in any process. The program
    itself computes all other arguments again."""
    kind = type(value)
    if kind in _PLAIN:  # Fast path, because some hundred arguments are checked in every step
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    return kind is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
