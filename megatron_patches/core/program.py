"""Protects NVIDIA's Megatron-LM (``pretrain_gpt.py`` and similar programs) without changing it.

``megatron.training`` looks up its own functions by name in its modules, so they can be wrapped
when a module is imported. The functions that set up a training, and that begin and end an
iteration, are wrapped:

==============================  ====================================================================
function                        what the wrapper does
==============================  ====================================================================
``validate_args``               refuses what reft cannot resume; versions replace local checkpoints
``setup_model_and_optimizer``   resumes a program without ``--load`` afterwards
``load_checkpoint``, in it      restores the newest version in memory, else the program loads
``train_step``                  begins an iteration
``training_log``                lets a resumed program print the means that it would have printed
``save_checkpoint``             sets separate limits for hang detection
``checkpoint_and_decide_exit``  takes the version: the iteration is evaluated, counted and saved
==============================  ====================================================================

The program restores the position in its data itself: its loaders begin after the samples that it
has consumed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_patches.core.attach import MegatronProtection, attach_megatron
from megatron_patches.core.engine import PROGRAM_RELEASES, check_release
from megatron_patches.deepspeed import check_options
from reft import log
from reft.config import parse_block, read_block
from reft.env import ENV_CONFIG
from reft.errors import ConfigError, UnrecoverableError
from reft.node.progress import Phase
from reft.refusal import end_in_words
from reft.wrapping import bind, wrap

logger = logging.getLogger(f"reft.{__name__}")

_PLACES = {
    "megatron.training.arguments": ("validate_args",),
    "megatron.training.training": (
        "setup_model_and_optimizer",
        "load_checkpoint",
        "train_step",
        "training_log",
        "checkpoint_and_decide_exit",
    ),
}
"""Names of the functions to wrap, by module."""
_PHASES = {
    "evaluate_and_print_results": Phase.EVALUATION,
    "save_checkpoint": Phase.SAVING,
    "save_checkpoint_and_time": Phase.SAVING,
}
"""Functions of ``megatron.training.training`` that get limits of their own for hang detection."""
_COUNTED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Counters in the program's parsed arguments that the program's checkpoints contain."""
_ITERATION, _OPERATIONS = "iteration", "num_floating_point_operations_so_far"
# Name of the dict of sums from which the program computes the means that it prints; all but the
# counts are tensors
_SUMS = "total_loss_dict"
_REFUSED = {
    "inprocess_restart": "it keeps trainers alive that reft restarts; leave it out",
    "perform_rl_step": "the rollouts are not captured",
    "moe_use_upcycling": (
        "every restart would upcycle again. Start once without the reft block and with --save DIR "
        "--exit-interval 1, then train with --load DIR and without it"
    ),
}
"""Options with which a resumed run would differ from an uninterrupted one, each with the reason."""
Function = Callable[..., Any]

# The program of this process, once a module of Megatron-LM was imported
programs: list[TrainingProgram] = []


def keep_state(state: Mapping[str, Any]) -> None:
    """Have versions hold objects of a script that trains with Megatron-LM's ``pretrain``.

    Call it on every rank before ``pretrain``. Without a block, or with ``"enabled": false``, it
    does nothing.

    Args:
        state: objects by name, as in :func:`reft.attach`. A resumed trainer restores their state in
            place before its first iteration.

    Raises:
        ConfigError: the program has set up its training already.
    """
    for program in programs:
        program.keep_state(state)


def install(module: ModuleType) -> None:
    """Wrap the functions of a Megatron-LM module that was just imported.

    Does nothing if the block says ``"enabled": false``.

    Raises:
        ConfigError: the block is invalid, or a function to wrap does not have the expected form.
    """
    if not programs:
        log.install()
        end_in_words()
        programs.append(TrainingProgram(read_block(Path(os.environ[ENV_CONFIG]))))
    program = programs[0]
    if not program.enabled:
        return
    names = _PLACES[module.__name__]
    if missing := [name for name in names if not callable(getattr(module, name, None))]:
        raise ConfigError(
            f"{ENV_CONFIG} is set, but {module.__name__} has no {', '.join(missing)}: reft does "
            f"not know this release of Megatron-LM; use core_v0.16, or unset {ENV_CONFIG} and call "
            "reft.attach_megatron in the script"
        )
    program.modules[module.__name__] = module
    for name in names:
        wrap(module, name, getattr(program, name))
    for name, phase in _PHASES.items():
        if hasattr(module, name):
            wrap(module, name, partial(program.during, phase))


class TrainingProgram:
    """The Megatron-LM program of this process.

    Attributes:
        enabled: whether the block enables reft.
        modules: the imported modules of Megatron-LM, by name.
    """

    def __init__(self, block: dict[str, Any]) -> None:
        self.enabled = parse_block(dict(block), os.environ).enabled
        self.modules: dict[str, ModuleType] = {}
        self._block = block
        self._protection: MegatronProtection | None = None
        self._state: dict[str, Any] = {}
        self._sets_up = False
        self._iteration = 0
        self._operations: float = 0
        self._sums: dict[str, Any] = {}
        self._resumed_sums: dict[str, Any] | None = None

    @property
    def _training(self) -> Any:
        return self.modules["megatron.training.training"]

    def keep_state(self, state: Mapping[str, Any]) -> None:
        """See :func:`keep_state`."""
        if self._protection is not None:
            raise ConfigError(
                "reft.keep_state was called after the training was set up, so that a restore has "
                "missed these objects; call it before pretrain()"
            )
        self._state.update(state)

    # -- wrappers of Megatron's functions ----------------------------------------------------------

    def validate_args(self, original: Function, args: Any, *more: Any, **options: Any) -> Any:
        check_release(PROGRAM_RELEASES)
        check_options(args, _REFUSED)
        self._take_over_local_checkpoints(args)
        return original(args, *more, **options)

    def setup_model_and_optimizer(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._sets_up = True
        try:
            model, optimizer, scheduler = original(*args, **kwargs)
        finally:
            self._sets_up = False
        if self._protection is None and optimizer is not None:
            into = self._training.get_args()
            resumed = self._resume(model, optimizer, scheduler, None)
            into.iteration, into.num_floating_point_operations_so_far = resumed
        return model, optimizer, scheduler

    def load_checkpoint(
        self,
        original: Function,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *a: Any,
        **k: Any,
    ) -> Any:
        load = partial(original, ddp_model, optimizer, opt_param_scheduler, *a, **k)
        if not self._sets_up or self._protection is not None or optimizer is None:
            return load()
        return self._resume(ddp_model, optimizer, opt_param_scheduler, load)

    def train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self._protection is not None:
            # Do this before the program saves the random states, from which it may repeat a
            # step.
            self._protection.begin_step()
        return original(*args, **kwargs)

    def training_log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        call = bind(original, args, kwargs)
        if self._resumed_sums is not None:
            call[_SUMS].update(self._resumed_sums)
            # Otherwise Megatron would, after the first iteration of a process, print an extra
            # line and not reset its sums.
            call["is_first_iteration"], self._resumed_sums = False, None
        result = original(**call)
        # These copies add no wait: to check the losses, the program has just waited for the
        # device.
        self._sums = {
            k: v.cpu().clone() if torch.is_tensor(v) else v for k, v in call[_SUMS].items()
        }
        return result

    def checkpoint_and_decide_exit(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Take the iteration's version, then call the original function.

        If the job is being stopped, the process exits here; if all ranks exit together, the
        program's own checkpoint is saved first.
        """
        exits = original(*args, **kwargs)
        if self._protection is not None:
            call = bind(original, args, kwargs)
            self._iteration, self._operations = int(call[_ITERATION]), call[_OPERATIONS]
            try:
                self._protection.end_step()
            except SystemExit:
                if self._protection.session.stops_together:
                    self._save(call)
                raise
        return exits

    def during(self, phase: Phase, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self._protection is None:
            return original(*args, **kwargs)
        with self._protection.progress.during(phase):
            return original(*args, **kwargs)

    # -- start -------------------------------------------------------------------------------------

    def _take_over_local_checkpoints(self, args: Any) -> None:
        """Turn off Megatron's local checkpoints (``--non-persistent-ckpt-type local``), which
        versions replace.

        Like versions, they keep the state in the memory of the node and, with ``--replication``,
        of other nodes. For them the program would import packages that it does not need
        otherwise.
        """
        if getattr(args, "non_persistent_ckpt_type", None) != "local":
            return
        if every := args.non_persistent_save_interval:
            self._block = {"interval_steps": every, **self._block}
        if args.rank == 0:
            logger.warning(
                "--non-persistent-ckpt-type local: reft's versions in memory replace local "
                'checkpoints. "interval_steps" and "protection" of the reft block say how often '
                "they are taken and how many nodes may be lost; --replication-factor and the "
                "directory are not used"
            )
        args.non_persistent_ckpt_type = args.non_persistent_save_interval = None
        args.replication, args.replication_jump = False, None

    def _resume(
        self, model: Any, optimizer: Any, scheduler: Any, load: Callable[[], Any] | None
    ) -> tuple[int, float]:
        """Protect the training, and restore the newest version in memory or, if there is none,
        let ``load`` load.

        Returns:
            The numbers of completed iterations and floating-point operations, as the program
            counts them.
        """
        protection = attach_megatron(
            model,
            optimizer,
            scheduler,
            client_state=self._client_state,
            config=self._block,
            state=self._state,
        )
        found: list[Any] = []

        def from_disk() -> int | None:
            assert load is not None
            iteration, operations = load()
            if not iteration:
                return None
            self.check_loaded_whole(protection)
            found.extend((iteration, operations))
            # On a CPU, the program's loaders draw from the generator that dropout also uses.
            protection.memory.keep_rng()
            return int(iteration)

        resumed = protection.load(None if load is None else from_disk)
        if resumed is not None and not found:
            found = list(
                self._go_on(resumed.client_state, protection.session.context.engine.device)
            )
        self._protection = protection
        self._iteration, self._operations = found or (0, 0)
        return self._iteration, self._operations

    def check_loaded_whole(self, protection: MegatronProtection) -> None:
        """Refuse a partial load after a restore that failed because memory was corrupt.

        Raises:
            UnrecoverableError: the load has not replaced all of the state that was partly
                restored.
        """
        args = self._training.get_args()
        partly = getattr(args, "no_load_optim", False) or getattr(args, "finetune", False)
        if protection.half_written and partly:
            raise UnrecoverableError(
                "the job's memory was found to be corrupt during the restore, after part of the "
                "optimizer was written, and the program loads without its optimizer: leave "
                "--no-load-optim and --finetune out"
            )

    def _go_on(self, client_state: dict[str, Any], device: torch.device) -> tuple[int, float]:
        """Restore the program's counters from a version's client state."""
        sums = client_state[_SUMS].items()
        self._resumed_sums = {k: v.to(device) if torch.is_tensor(v) else v for k, v in sums}
        args = self._training.get_args()
        for name in _COUNTED:
            setattr(args, name, client_state[name])
        self._training.update_num_microbatches(
            consumed_samples=args.consumed_train_samples, verbose=True
        )
        return client_state[_ITERATION], client_state[_OPERATIONS]

    # -- every iteration ---------------------------------------------------------------------------

    def _client_state(self) -> dict[str, Any]:
        """Return what the program's checkpoint contains in addition to model, optimizer and
        random states.
        """
        args = self._training.get_args()
        counted = {name: getattr(args, name) for name in _COUNTED}
        return {
            _ITERATION: self._iteration,
            _OPERATIONS: self._operations,
            _SUMS: self._sums,
            **counted,
        }

    def _save(self, call: dict[str, Any]) -> None:
        """Save a checkpoint as the program does when it exits: only with ``--save``, and not if
        it has just saved."""
        args = self._training.get_args()
        every = args.save_interval
        if not args.save or (every and self._iteration % every == 0):
            return
        self._training.save_checkpoint_and_time(
            *(call[name] for name in ("iteration", "model", "optimizer", "opt_param_scheduler")),
            *(self._operations, call["checkpointing_context"]),
            train_data_iterator=call["train_data_iterator"],
        )
        self._training.maybe_finalize_async_save(blocking=True)
