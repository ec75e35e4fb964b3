"""The DeepSpeed hook: creates a session for an engine, and wraps the engine's methods on the
instance, never on the class.

Works for ``PipelineEngine`` (``train_batch``) and for the plain engine (``forward``/``backward``/
``step``). What is wrapped:

- ``_take_model_step``: both engines call it before weights change (a pipeline engine never calls
  ``step()``), so training waits here until copies of its tensors have ended (the *fence*). Once
  a step has shown that the innermost optimizer's hooks run before that optimizer writes, the
  fence moves into these hooks, where the gradient norm is already computed.
- ``train_batch``, or ``forward`` of a plain engine: a step begins, and its version is taken.
  ``step``: the step ends.
- ``_exec_schedule``, ``_aggregate_total_loss``: a pipeline engine opens and closes its windows
  here (the idle intervals in which versions are copied).
- ``load_checkpoint`` and ``save_checkpoint``.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from reft import integrations, log
from reft.config import load_config, parse_block
from reft.engine.capture import EngineState
from reft.engine.context import JobContext
from reft.engine.deepspeed import DeepSpeedEngine
from reft.engine.job_memory import JobMemory
from reft.engine.load import Restorer
from reft.engine.load_call import LoadCall
from reft.engine.load_disk import CheckpointLoader
from reft.engine.marks import find_ds_config
from reft.engine.model_size import flops_per_token, own_flops_per_token, tokens_per_sample
from reft.engine.protocol import ClientState, OnResize
from reft.engine.session import Session, record
from reft.engine.steps import StepHooks
from reft.errors import ConfigError, ReftError, UnsupportedStateError
from reft.node.progress import Phase, ProgressPage, at_instruction
from reft.pacing.weave import Weaver
from reft.refusal import end_in_words
from reft.state.codec import encode
from reft.state.supported import explain_not_loadable
from reft.storage.load import SAVED_BY, host_file
from reft.wrapping import bind, wrap

logger = logging.getLogger(__name__)


def save_with_host_state(
    context: JobContext,
    memory: JobMemory,
    state: EngineState,
    original: Callable[..., Any],
    call: Mapping[str, Any],
) -> Any:
    """Run ``engine.save_checkpoint``, and write the host state into a file next to DeepSpeed's
    own.

    Args:
        context: the job.
        memory: describes the job and the incarnation that save the checkpoint.
        state: captures the host state.
        original: DeepSpeed's method.
        call: arguments of the script's call, by name. The attached client state is added to
            them.

    Returns:
        The result of DeepSpeed's method.
    """
    attached = dict(state.client_state()) if state.client_state else {}
    client_state = {**attached, **(call.get("client_state") or {})}
    result = original(**{**call, "client_state": client_state})
    from reft.storage.deepspeed_format import write_host_file

    step = context.engine.global_steps
    name = f"global_step{step}" if call.get("tag") is None else str(call["tag"])
    stored: dict[str, Any] | None = client_state
    if attached:
        stored = {key: value for key, value in client_state.items() if key in attached}
    try:
        try:
            encode(stored)
        except UnsupportedStateError:
            stored = None  # Cannot be encoded; DeepSpeed's own file holds these values
        host_state = {**state.host_state(stored), SAVED_BY: memory.describe_save(step)}
        directory = Path(call["save_dir"]) / name
        write_host_file(host_file(directory, context.coordinate), host_state)
    except Exception as error:
        # Do not raise: the other ranks have their checkpoint and continue (P6).
        logger.warning(
            "the checkpoint is complete, but without random and data state: %s: %s",
            *(type(error).__name__, error),
            exc_info=not isinstance(error, (ReftError, OSError)),
        )
    return result


class Program(Protocol):
    """The training program that created an engine, such as Megatron's.

    Attributes:
        data_is_bound: reason why the program would read different data at a different data-parallel
            degree, and what to change; "" if it would read the same.
    """

    data_is_bound: str

    def client_state(self) -> dict[str, Any]:
        """Return the values that the program's own checkpoint stores next to the engine's files."""

    def join(self, context: JobContext) -> None:
        """Connect the program to the session. Called once on all ranks, before the program loads
        a checkpoint."""


def running_program(engine: Any) -> Program | None:
    """Return the program that created the engine, if an integration knows it; None for other
    scripts.
    """
    for module, function in integrations.entries("PROGRAMS"):
        if module in sys.modules:
            program: Program | None = integrations.load(function)(engine)
            if program is not None:
                return program
    return None


_SESSION = "_reft_session"

_BEGIN_STEP = "_reft_begin_step"
_FINISH_TRAINING = "_reft_finish_training"

_sessions: list[Session] = []  # Sessions of this process, to be closed at its end


def attach(
    engine: Any,
    client_state: ClientState | None = None,
    config: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    on_resize: OnResize | None = None,
) -> Session:
    """Protect an engine. Collective: call it on all ranks at the same point.

    Args:
        engine: what ``deepspeed.initialize`` returned first, or a list of one.
        client_state: function that is called for every version; ``load_checkpoint`` returns its
            mapping after a restart. Values are anything that ``reft.state.codec`` encodes
            (numbers, strings, containers, tensors, arrays). Megatron-DeepSpeed's client state is
            captured without this argument.
        config: the ``reft`` block; by default it is read from the engine's DeepSpeed configuration.
        state: objects of the script by name, such as ``{"ema": ema, "rng": generator}``. Their
            state is part of every version, and a load restores it in place; so does this call if
            a version was loaded before. Objects have ``state_dict`` and ``load_state_dict``
            (modules, optimizers, schedulers), or are random generators (``torch.Generator``,
            NumPy's ``Generator`` and ``RandomState``, ``random.Random``).
        on_resize: function that is called on every rank when ``load_checkpoint`` has loaded a
            state that was written at another data-parallel degree, before it returns. Arguments
            are the parallel degrees before and now (:class:`reft.grid.Degrees`, with ``dp`` and
            ``world_size``). What it changes in the optimizer's groups, or in objects of
            ``state``, is part of the next version. If it raises an error on any rank, the start
            ends with that error on all ranks, and the loaded version stays.

    Returns:
        The session. A second call only sets ``client_state`` and ``on_resize``, and adds ``state``.

    Raises:
        ConfigError: the block is invalid, or contains ``"enabled": false``; an object in
            ``state`` has an unsupported type, or is missing in the version that was loaded;
            ``on_resize`` is given after the load.
        UnsupportedStateError: the engine holds state that reft does not know.
    """
    if isinstance(engine, list):
        if len(engine) != 1:
            raise ConfigError(
                f"reft.attach was given a list of {len(engine)}; expected one, or a list of one"
            )
        engine = engine[0]
    session = find_session(engine)
    if session is not None:
        if config is not None:
            session.context.warn(
                "reft.attach was given a config, but the reft block of its DeepSpeed "
                "configuration already protects the engine, and that block stays in force; write "
                "the settings into it"
            )
        if client_state is not None:
            session.set_client_state(client_state)
        if on_resize is not None:
            session.set_on_resize(on_resize)
        session.give(state or {})
        return session
    log.install()
    end_in_words()
    parsed = (
        load_config(find_ds_config(engine))
        if config is None
        else parse_block(dict(config), os.environ)
    )
    if not parsed.enabled:
        raise ConfigError(
            'reft.attach was called, but reft is not enabled; write "reft": {"enabled": true} into '
            'the DeepSpeed configuration or pass config={"enabled": True}'
        )
    program = running_program(engine) if client_state is None else None
    adapted = DeepSpeedEngine(engine)
    if program is not None and program.data_is_bound:
        adapted.resizing.bind(program.data_is_bound)
    session = Session(adapted, parsed, client_state if program is None else program.client_state)
    context = session.context
    if (unloadable := explain_not_loadable(engine)) is not None:
        context.warn(unloadable)
    own = own_flops_per_token(engine, context.coordinate)
    flops = flops_per_token(row[0] for row in context.control.gather_ints([own]))
    session.progress.set_samples(int(engine.train_batch_size()))
    session.progress.set_flops(flops)
    setattr(engine, _SESSION, session)
    innermost = adapted.adapter.state.optimizer
    if isinstance(innermost, torch.optim.Optimizer):
        innermost.register_step_pre_hook(session.fence.before_write)
    EngineWrappers(adapted, session)
    session.give(state or {})
    session.on_resize = on_resize
    record(session)
    _sessions.append(session)
    atexit.register(session.close)
    if program is not None:
        program.join(context)
    return session


def resume(engine: Any, state: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Restore the newest version from memory or the persist directory. Collective, after
    ``deepspeed.initialize``. For scripts that have no directory to load from, or that call
    ``load_checkpoint`` only if a file exists:

        reft.resume(engine)
        for step in range(engine.global_steps, steps): ...

    Args:
        engine: the engine, protected or not.
        state: further objects of the script to restore, as in :func:`attach`.

    Returns:
        ``(path, client_state)``, as ``engine.load_checkpoint`` does; ``(None, None)`` if the job
        has just begun, or the engine is not protected.

    Raises:
        UnrecoverableError: the job made progress, but no complete version of it is left.
    """
    session = find_session(engine)
    if session is None:
        return None, None
    session.give(state or {})
    path, client_state = engine.load_checkpoint(None)
    return path, client_state


def begin_step(engine: Any) -> None:
    """Mark the beginning of the next step. The step's version then holds the host state as of
    this call, and the tensors as of the forward pass or ``train_batch``.

    Only needed by scripts that make their batches themselves, without a ``DataLoader``, and change
    their own state (a position, a counter) between this call and the forward pass:

        while engine.global_steps < steps:
            reft.begin_step(engine)
            batch = stream.read()
            loss = engine(batch)

    This function does nothing if the engine is not protected.
    """
    begin = getattr(engine, _BEGIN_STEP, None)
    if begin is not None:
        begin()


def finish_training(engine: Any) -> None:
    """Mark that the script has no step left to train. A checkpoint that it loads from here on
    replaces the state, even if it is older, such as a Trainer's best model.

    This function does nothing if the engine is not protected.
    """
    finish = getattr(engine, _FINISH_TRAINING, None)
    if finish is not None:
        finish()


def find_session(engine: Any) -> Session | None:
    return getattr(engine, _SESSION, None)


def close_sessions() -> None:
    """Close all sessions of this process. Registered to run when the interpreter exits."""
    for session in _sessions:
        session.close()


def _during(
    page: ProgressPage, phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with page.during(phase):
        return original(*args, **kwargs)


class EngineWrappers:
    """Wrappers around the methods of one engine. Each calls the original method.

    Args:
        adapter: the engine as seen by the session.
        session: session of the engine, which takes its versions.
    """

    def __init__(self, adapter: DeepSpeedEngine, session: Session) -> None:
        self._engine, self._data = adapter.engine, adapter.data
        self._session, self._context = session, session.context
        self._progress, self._state = session.progress, session.state
        self._job_memory = session.memory
        memory = session.memory_restorer()
        checkpoints = CheckpointLoader(self._context, adapter, session, memory, session.memory)
        self._restorer = Restorer(self._context, session, memory, checkpoints)
        self._hooks = StepHooks(
            self._context, session, session.state, self._restorer, memory, adapter.data
        )
        self._micro_batch = int(self._engine.train_micro_batch_size_per_gpu())
        self._tokens = 0  # Tokens in a sample; 0 until a batch of token ids has been read
        setattr(self._engine, _BEGIN_STEP, self._hooks.begin_by_script)
        setattr(self._engine, _FINISH_TRAINING, self._restorer.finish_training)
        self._wrap_steps(session)
        for name, around, phase in (
            ("load_checkpoint", self._load, Phase.LOADING),
            ("save_checkpoint", self._save, Phase.SAVING),
        ):
            wrap(self._engine, name, around)
            wrap(self._engine, name, partial(_during, self._progress, phase))

    def _wrap_steps(self, session: Session) -> None:
        engine, progress = self._engine, self._progress
        wrap(engine, "_take_model_step", self._take_model_step)
        if hasattr(engine, "grid"):
            wrap(engine, "train_batch", self._train_batch)
            wrap(engine, "eval_batch", self._eval_batch)
            wrap(engine, "eval_batch", partial(_during, progress, Phase.EVALUATION))
            Weaver(engine, session.copying, session.tracer, progress, session)
            return
        for name in ("forward", "backward", "step"):
            wrap(engine, name, at_instruction(progress, name.capitalize()))
        wrap(engine, "forward", self._forward)
        wrap(engine, "backward", self._backward)
        wrap(engine, "step", self._step)
        wrap(engine, "train", self._train)

    # -- both engines ------------------------------------------------------------------------------

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._session.before_optimizer_step()
        try:
            return original(*args, **kwargs)
        finally:
            self._session.after_optimizer_step()

    def _after_step(self) -> None:
        self._session.after_step()
        self._hooks.after_step()

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._restorer.load(LoadCall.of(original, args, kwargs))

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = bind(original, args, kwargs)
        return save_with_host_state(self._context, self._job_memory, self._state, original, call)

    def _look_for_tokens(self, inputs: Any) -> None:
        if not self._tokens:
            self._tokens = tokens_per_sample(self._micro_batch, inputs)
            if self._tokens:
                self._progress.set_tokens(self._tokens)

    # -- a pipeline engine -------------------------------------------------------------------------

    def _train_batch(
        self, original: Callable[..., Any], data_iter: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        self._session.begin_step()
        self._hooks.before_batch(data_iter)
        self._progress.begin_step()
        try:
            result = original(data_iter, *args, **kwargs)
        finally:
            self._hooks.after_batch()
        if self._context.coordinate.pp == 0:
            self._look_for_tokens(self._engine.pipe_buffers.get("inputs"))
        self._after_step()
        return result

    def _eval_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._data.evaluating():
            return original(*args, **kwargs)

    # -- the plain engine --------------------------------------------------------------------------

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = self._engine.training and torch.is_grad_enabled()
        if training:
            self._session.begin_step()
        self._hooks.before_forward(training=training)
        if not training:
            return _during(self._progress, Phase.EVALUATION, original, *args, **kwargs)
        self._progress.begin_step()
        self._look_for_tokens((args, kwargs))
        return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Needed for scripts that call engine.module instead of the engine
        self._session.begin_step()
        self._session.check_tensors()
        result = original(*args, **kwargs)
        self._session.check_tensors()
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._session.begin_step()
        self._hooks.before_step()
        result = original(*args, **kwargs)
        self._after_step()
        return result

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``engine.train()`` or ``engine.eval()``, and notify the data position, which must
        tell training reads from evaluation reads."""
        result = original(*args, **kwargs)
        self._data.mode_set()
        return result
