"""The DeepSpeed hook: wraps one engine's methods on the instance, never the class.

Works for ``PipelineEngine`` (``train_batch``) and for the plain engine (``forward``/``backward``/
``step``). What is wrapped:

- ``_take_model_step``: the fence, or its approach. Both engines pass here before weights change;
  ``step()`` would not do, a pipeline engine never calls it (trap 8). Once a step has shown that the
  innermost optimizer's hooks come first, the fence is there, behind the norm of the gradients.
- ``train_batch`` / ``step``: the step boundary. ``forward`` of a plain engine: what must be known before the
  first step is asked there.
- ``_exec_schedule``, ``_aggregate_total_loss``: a pipeline engine's windows (:mod:`reft.engine.weave`).
- ``load_checkpoint`` / ``save_checkpoint``.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reft import log
from reft.config import Variant
from reft.config_read import load_config, parse_block
from reft.engine.calls import LoadCall, bind, replace
from reft.engine.deepspeed_engine import DeepSpeedEngine
from reft.engine.device_paths import report_untried
from reft.engine.engine_state import ClientState
from reft.engine.install import ds_config_of
from reft.engine.model_size import TokensSeen, flops_per_token, own_flops_per_token
from reft.engine.programs import running_program
from reft.engine.restore import Restorer
from reft.engine.save import save_with_host_state
from reft.engine.session import Session
from reft.engine.start_checks import warn
from reft.engine.watching import at_instruction, at_phase
from reft.errors import ConfigError
from reft.node.progress import Phase
from reft.refusal import end_in_words
from reft.state.support import why_not_loadable

logger = logging.getLogger(__name__)

_SESSION = "_reft_session"


def attach(
    engine: Any,
    client_state: ClientState | None = None,
    config: Mapping[str, Any] | None = None,
) -> Session:
    """Put an engine under reft's care. Collective: call it on all ranks at the same point.

    Args:
        engine: what ``deepspeed.initialize`` returned first; Megatron's list of it too.
        client_state: called at every snapshot; returns a mapping that ``load_checkpoint`` gives back.
            Megatron-DeepSpeed's is captured without it.
            Values may be anything :mod:`reft.state.codec` encodes (numbers, strings, containers,
            tensors, arrays).
        config: the ``reft`` block; by default it is read from the engine's DeepSpeed configuration.

    Returns:
        The session; calling again only sets ``client_state``.

    Raises:
        ConfigError: the block is wrong, or says ``"enabled": false``.
        UnsupportedStateError: the engine holds state reft does not know.
    """
    if isinstance(engine, list):
        if len(engine) != 1:
            raise ConfigError(
                f"reft.attach was given a list of {len(engine)}; expected one, or a list of one"
            )
        engine = engine[0]
    session = session_of(engine)
    if session is not None:
        if config is not None:
            warn(
                session,
                "reft.attach was given a config, but the engine is under reft's care already, by the reft "
                "block of its DeepSpeed configuration, and keeps that; write the settings into the block",
            )
        if client_state is not None:
            session.state.client_state = client_state
        return session
    import os

    log.install()
    end_in_words()
    parsed = load_config(ds_config_of(engine)) if config is None else parse_block(dict(config), os.environ)
    if not parsed.enabled:
        raise ConfigError(
            'reft.attach was called, but reft is not enabled; write "reft": {"enabled": true} into the '
            'DeepSpeed configuration or pass config={"enabled": True}'
        )
    program = running_program(engine) if client_state is None else None
    seen = DeepSpeedEngine(engine)
    if program is not None and program.data_is_bound:
        seen.resizing.bind(program.data_is_bound)
    session = Session(seen, parsed, client_state if program is None else program.client_state)
    if (unloadable := why_not_loadable(engine)) is not None:
        warn(session, unloadable)
    session.progress.set_samples(int(engine.train_batch_size()))
    own = own_flops_per_token(engine, session.coordinate)
    session.progress.set_flops(flops_per_token(row[0] for row in session.control.gather_ints([own])))
    setattr(engine, _SESSION, session)
    _wrap(seen, session)
    report_untried(session)
    atexit.register(session.close)
    if program is not None:
        program.join(session)
    return session


def resume(engine: Any) -> tuple[Any, Any]:
    """Go on where the job was: at the newest version in memory or in the persist directory. For scripts that
    have no directory to load from, or look for a file first. Collective, behind ``deepspeed.initialize``:

        reft.resume(engine)
        for step in range(engine.global_steps, steps): ...

    Returns:
        ``(path, client_state)``, as ``engine.load_checkpoint`` does; ``(None, None)`` where the job begins,
        and where the engine is not under reft's care.

    Raises:
        UnrecoverableError: the job made progress, but no whole version of it is left.
    """
    if session_of(engine) is None:
        return None, None
    path, client_state = engine.load_checkpoint(None)
    return path, client_state


def session_of(engine: Any) -> Session | None:
    """The session of an engine, or None."""
    return getattr(engine, _SESSION, None)


def _wrap(seen: DeepSpeedEngine, session: Session) -> None:
    engine, restorer, progress = seen.engine, Restorer(session, seen), session.progress
    tokens = TokensSeen(progress, int(engine.train_micro_batch_size_per_gpu()))

    def model_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            session.before_optimizer_step()
            try:
                return original(*args, **kwargs)
            finally:
                session.fence.after_optimizer_step()

        return wrapped

    def train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(data_iter: Any = None, *args: Any, **kwargs: Any) -> Any:
            restorer.before_batch(data_iter)
            progress.begin_step()
            try:
                result = original(data_iter, *args, **kwargs)
            finally:
                restorer.after_batch()
            if session.coordinate.pp == 0:
                tokens.look(engine.pipe_buffers.get("inputs"))
            session.after_step()
            restorer.after_step()
            return result

        return wrapped

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            training = engine.training and torch.is_grad_enabled()
            restorer.before_forward(training=training)
            if not training:
                with progress.during(Phase.EVALUATION):
                    return original(*args, **kwargs)
            progress.begin_step()
            tokens.look(args, kwargs)
            return original(*args, **kwargs)

        return wrapped

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            restorer.before_first_step()
            result = original(*args, **kwargs)
            session.after_step()
            restorer.after_step()
            return result

        return wrapped

    replace(engine, "_take_model_step", model_step)
    innermost = seen.adapter.state.optimizer
    if isinstance(innermost, torch.optim.Optimizer):
        innermost.register_step_pre_hook(session.fence.before_write)
    if hasattr(engine, "grid"):
        replace(engine, "train_batch", train_batch)
        replace(engine, "eval_batch", at_phase(progress, Phase.EVALUATION))
        _weave(engine, session)
    else:
        for name in ("forward", "backward", "step"):
            replace(engine, name, at_instruction(progress, name.capitalize()))
        replace(engine, "forward", forward)
        replace(engine, "step", step)
    _wrap_checkpoints(engine, session, restorer)


def _wrap_checkpoints(engine: Any, session: Session, restorer: Restorer) -> None:
    def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return restorer.load(original, LoadCall.of(original, args, kwargs))

        return wrapped

    def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return save_with_host_state(session, original, bind(original, args, kwargs))

        return wrapped

    for name, wrapper, phase in (
        ("load_checkpoint", load_checkpoint, Phase.LOADING),
        ("save_checkpoint", save_checkpoint, Phase.SAVING),
    ):
        replace(engine, name, wrapper)
        replace(engine, name, at_phase(session.progress, phase))


def _weave(engine: Any, session: Session) -> None:
    from reft.engine.weave import Weaver

    weaver = Weaver(
        engine,
        session.copying.pacer,
        take_snapshot=session.boundary,
        active=lambda: (
            session.worker is not None
            and (session.copying.variant is Variant.HAS or session.copying.pacer.gate.wanted)
        ),
        traced=lambda: session.tracer.active,
        progress=session.progress,
    )
    session.tracer.weaver = weaver
