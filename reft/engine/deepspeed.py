"""The DeepSpeed hook: wraps one engine's methods on the instance, never the class.

Works for ``PipelineEngine`` (``train_batch``) and for the plain engine (``forward``/``backward``/
``step``). What is wrapped:

- ``_take_model_step``: the fence, or its approach. Both engines pass here before weights change;
  ``step()`` would not do, a pipeline engine never calls it (trap 8). Once a step has shown that the
  innermost optimizer's hooks come first, the fence is there, behind the norm of the gradients.
- ``train_batch`` / ``forward`` of a plain engine: where a step begins, its version is taken.
  ``step``: where it ends.
- ``_exec_schedule``, ``_aggregate_total_loss``: a pipeline engine's windows.
- ``load_checkpoint`` / ``save_checkpoint``.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch

from reft import integrations, log
from reft.checks.preflight import engine_findings
from reft.checks.start import warn, warn_untried_device
from reft.config import load_config, parse_block
from reft.data.position import DataPosition
from reft.engine.fingerprint import Fact, read_argument_facts
from reft.engine.load import LoadCall, Restorer, bind
from reft.engine.marks import find_ds_config, wrap
from reft.engine.protocol import ClientState, find_coordinate, flat_facts, read_shapes
from reft.engine.session import Session, record
from reft.engine.weave import Weaver
from reft.errors import ConfigError, ReftError, UnsupportedStateError
from reft.grid import Coordinate, Degrees
from reft.naming import own_program
from reft.node.progress import Phase, ProgressPage, at_instruction
from reft.refusal import end_in_words
from reft.relayout.layouts import HELD, LayoutChange, describe_layouts
from reft.state.adapters import adapter_for
from reft.state.blob import capture_host_state, restore_data_free_state, restore_host_state
from reft.state.catalogue import SectionImage
from reft.state.codec import encode
from reft.state.supported import explain_not_loadable
from reft.storage.load import SAVED_BY, host_file

logger = logging.getLogger(__name__)


def save_with_host_state(
    session: Session, original: Callable[..., Any], call: Mapping[str, Any]
) -> Any:
    """``engine.save_checkpoint``, with the client state that was attached and the one that is
    given."""
    attached = dict(session.state.client_state()) if session.state.client_state else {}
    client_state = {**attached, **(call.get("client_state") or {})}
    result = original(**{**call, "client_state": client_state})
    from reft.storage.deepspeed_format import write_host_file

    step = session.engine.global_steps
    name = f"global_step{step}" if call.get("tag") is None else str(call["tag"])
    kept: dict[str, Any] | None = client_state
    if attached:
        kept = {k: v for k, v in client_state.items() if k in attached}
    try:
        try:
            encode(kept)
        except UnsupportedStateError:
            kept = None  # DeepSpeed's own file holds it
        state = session.state.host_state(kept)
        state[SAVED_BY] = {
            "job_id": session.job_id,
            "incarnation": session.memory.incarnation,
            "step": step,
            "fingerprint": session.memory.identity.fingerprint.encode().decode(),
        }
        write_host_file(host_file(Path(call["save_dir"]) / name, session.coordinate), state)
    except Exception as error:
        # Whatever it is: the other ranks have their checkpoint and go on (P6).
        logger.warning(
            "the checkpoint is complete, but without random and data state: %s: %s",
            *(type(error).__name__, error),
            exc_info=not isinstance(error, (ReftError, OSError)),
        )
    return result


TRAINED_FLOPS, FROZEN_FLOPS = 6, 4
EXPERTS = -1
"""In the place of a number: a token passes some of the experts, and the engine does not say how
many."""


def own_flops_per_token(engine: Any, at: Coordinate) -> int:
    """Of the parameters that this rank answers for: those of the first replica, of a tied parameter
    the first of its stages, and of one that tensor-parallel ranks have alike the first of them.
    :data:`EXPERTS` where there are experts."""
    module = engine.module
    parameters = dict.fromkeys(module.parameters())
    if any(getattr(p, "allreduce", True) is False for p in parameters):
        return EXPERTS
    if at.dp:
        return 0
    others = set(_tied_elsewhere(module))
    return sum(
        p.numel() * (TRAINED_FLOPS if p.requires_grad else FROZEN_FLOPS)
        for p in parameters
        if p not in others
        # Tensor-parallel ranks have other parts of what is marked so.
        and (at.tp == 0 or getattr(p, "tensor_model_parallel", getattr(p, "model_parallel", False)))
    )


def _tied_elsewhere(module: Any) -> Iterator[Any]:
    rank = getattr(module, "global_rank", 0)
    for comm in getattr(module, "tied_comms", {}).values():
        if rank != min(comm["ranks"]):
            names = comm["weight_attr"]
            for name in [names] if isinstance(names, str) else names:
                yield attrgetter(name)(comm["module"])


def flops_per_token(gathered: Iterable[int]) -> int:
    """Of the whole model, from what all ranks answer for."""
    found = list(gathered)
    return EXPERTS if EXPERTS in found else sum(found)


def tokens_per_sample(micro_batch: int, inputs: Any) -> int:
    """By the first micro-batch of token ids among the inputs of a forward pass, tensors in lists,
    tuples and mappings; 0 where there is none."""
    for tensor in _tensors(inputs):
        is_integer = tensor.dtype in (torch.int64, torch.int32)
        if is_integer and tensor.ndim == 2 and len(tensor) == micro_batch:
            return tensor.shape[1]
    return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


class Program(Protocol):
    """The program that has made an engine. ``data_is_bound``: why its data are others at another
    data-parallel degree, and what to write; "" where they are not."""

    data_is_bound: str

    def client_state(self) -> dict[str, Any]:
        """What its own checkpoint of the engine's step would hold beside the engine's files."""

    def join(self, session: Session) -> None:
        """Called once on all ranks, before the program loads."""


def running_program(engine: Any) -> Program | None:
    """The program that has made the engine, if it can be resumed; None for a script of nobody's."""
    for module, function in integrations.found("PROGRAMS"):
        if module in sys.modules:
            program: Program | None = integrations.load(function)(engine)
            if program is not None:
                return program
    return None


_SESSION = "_reft_session"
_BEGIN_STEP = "_reft_begin_step"
_sessions: list[Session] = []  # of this process


def attach(
    engine: Any,
    client_state: ClientState | None = None,
    config: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Session:
    """Protect an engine. Collective: call it on all ranks at the same point.

    Args:
        engine: what ``deepspeed.initialize`` returned first; Megatron's list of it too.
        client_state: called at every snapshot; returns a mapping that ``load_checkpoint`` gives
            back. Megatron-DeepSpeed's is captured without it.
            Values may be anything ``reft.state.codec`` encodes (numbers, strings, containers,
            tensors, arrays).
        config: the ``reft`` block; by default it is read from the engine's DeepSpeed configuration.
        state: objects of the script by name, such as ``{"ema": ema, "rng": generator}``, whose
            state is part of
            every version and put back in place by a load, also by one that was made before. They
            have ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers), or are
            generators (``torch.Generator``, NumPy's ``Generator`` and ``RandomState``,
            ``random.Random``).

    Returns:
        The session; calling again only sets ``client_state`` and adds ``state``.

    Raises:
        ConfigError: the block is wrong, or says ``"enabled": false``; an object of ``state`` is of
        another
            kind,
            or the version that was loaded does not hold it.
        UnsupportedStateError: the engine holds state reft does not know.
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
            warn(
                session,
                "reft.attach was given a config, but the reft block of its DeepSpeed "
                "configuration already "
                "protects the engine, and that block stays in force; write the settings into it",
            )
        if client_state is not None:
            session.state.client_state = client_state
        session.state.followed.give(state or {})
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
            'reft.attach was called, but reft is not enabled; write "reft": {"enabled": true} '
            "into the "
            'DeepSpeed configuration or pass config={"enabled": True}'
        )
    program = running_program(engine) if client_state is None else None
    seen = DeepSpeedEngine(engine)
    if program is not None and program.data_is_bound:
        seen.resizing.bind(program.data_is_bound)
    session = Session(seen, parsed, client_state if program is None else program.client_state)
    if (unloadable := explain_not_loadable(engine)) is not None:
        warn(session, unloadable)
    session.progress.set_samples(int(engine.train_batch_size()))
    own = own_flops_per_token(engine, session.coordinate)
    session.progress.set_flops(
        flops_per_token(row[0] for row in session.control.gather_ints([own]))
    )
    setattr(engine, _SESSION, session)
    innermost = seen.adapter.state.optimizer
    if isinstance(innermost, torch.optim.Optimizer):
        innermost.register_step_pre_hook(session.fence.before_write)
    _wrap(seen, session)
    session.state.followed.give(state or {})
    record(session)
    warn_untried_device(session)
    _sessions.append(session)
    atexit.register(session.close)
    if program is not None:
        program.join(session)
    return session


def resume(engine: Any, state: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Go on where the job was: at the newest version in memory or in the persist directory. For
    scripts that have no directory to load from, or look for a file first. Collective, after
    ``deepspeed.initialize``:

        reft.resume(engine)
        for step in range(engine.global_steps, steps): ...

    Args:
        state: objects of the script that are restored, too: see :func:`attach`.

    Returns:
        ``(path, client_state)``, as ``engine.load_checkpoint`` does; ``(None, None)`` where the job
        begins, and where the engine is not protected.

    Raises:
        UnrecoverableError: the job made progress, but no whole version of it is left.
    """
    session = find_session(engine)
    if session is None:
        return None, None
    session.state.followed.give(state or {})
    path, client_state = engine.load_checkpoint(None)
    return path, client_state


def begin_step(engine: Any) -> None:
    """Say that the next step begins here. A version is then the state at this call, except for
    tensors, which are as they are when the forward pass or ``train_batch`` begins.

    Only a script needs it that makes its batches itself, without a ``DataLoader``, and changes its
    own state (a position, a counter) between this point and the forward pass:

        while engine.global_steps < steps:
            reft.begin_step(engine)
            batch = stream.read()
            loss = engine(batch)

    It does nothing where the engine is not protected.
    """
    begin = getattr(engine, _BEGIN_STEP, None)
    if begin is not None:
        begin()


def find_session(engine: Any) -> Session | None:
    return getattr(engine, _SESSION, None)


def close_sessions() -> None:
    """Close what :func:`attach` has made in this process, before the interpreter does."""
    for session in _sessions:
        session.close()


def _during(
    page: ProgressPage, phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with page.during(phase):
        return original(*args, **kwargs)


def _wrap(seen: DeepSpeedEngine, session: Session) -> None:  # noqa: PLR0915 -- one wrapper after the other
    engine, restorer, progress = seen.engine, Restorer(session, seen), session.progress
    setattr(engine, _BEGIN_STEP, restorer.begin_by_script)
    micro_batch, tokens = int(engine.train_micro_batch_size_per_gpu()), 0

    def look_for_tokens(inputs: Any) -> None:
        nonlocal tokens
        if not tokens and (tokens := tokens_per_sample(micro_batch, inputs)):
            progress.set_tokens(tokens)

    def model_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.before_optimizer_step()
        try:
            return original(*args, **kwargs)
        finally:
            session.fence.after_optimizer_step()

    def stepped() -> None:
        session.after_step()
        restorer.after_step()

    def train_batch(
        original: Callable[..., Any], data_iter: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        session.begin_step()
        restorer.before_batch(data_iter)
        progress.begin_step()
        try:
            result = original(data_iter, *args, **kwargs)
        finally:
            restorer.after_batch()
        if session.coordinate.pp == 0:
            look_for_tokens(engine.pipe_buffers.get("inputs"))
        stepped()
        return result

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = engine.training and torch.is_grad_enabled()
        if training:
            session.begin_step()
        restorer.before_forward(training=training)
        if not training:
            return _during(progress, Phase.EVALUATION, original, *args, **kwargs)
        progress.begin_step()
        look_for_tokens((args, kwargs))
        return original(*args, **kwargs)

    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.begin_step()  # of a script that computes by engine.module
        session.check_tensors()
        result = original(*args, **kwargs)
        session.check_tensors()
        return result

    def set_mode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        seen.data.mode_set()
        return result

    def evaluate_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with seen.data.evaluating():
            return original(*args, **kwargs)

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.begin_step()
        restorer.before_first_step()
        result = original(*args, **kwargs)
        stepped()
        return result

    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return restorer.load(original, LoadCall.of(original, args, kwargs))

    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return save_with_host_state(session, original, bind(original, args, kwargs))

    wrap(engine, "_take_model_step", model_step)
    if hasattr(engine, "grid"):
        wrap(engine, "train_batch", train_batch)
        wrap(engine, "eval_batch", evaluate_batch)
        wrap(engine, "eval_batch", partial(_during, progress, Phase.EVALUATION))
        Weaver(engine, session)
    else:
        for name in ("forward", "backward", "step"):
            wrap(engine, name, at_instruction(progress, name.capitalize()))
        wrap(engine, "forward", forward)
        wrap(engine, "backward", backward)
        wrap(engine, "step", step)
        wrap(engine, "train", set_mode)
    for name, around, phase in (
        ("load_checkpoint", load, Phase.LOADING),
        ("save_checkpoint", save, Phase.SAVING),
    ):
        wrap(engine, name, around)
        wrap(engine, name, partial(_during, progress, phase))


# -- a DeepSpeed engine as a session sees it -------------------------------------------------------

_CONFIG = (
    *(
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "bfloat16",
        "amp",
        "data_types",
        "communication_data_type",
    ),
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients"),
    *("progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training"),
)
"""Parts of DeepSpeed's configuration that change the numbers."""
_ZERO = ("stage", "round_robin_gradients", "offload_optimizer.device", "offload_param.device")
"""Of ``zero_optimization``: the rest is about speed."""


class DeepSpeedEngine:
    """One rank's part of a DeepSpeed training (:class:`~reft.engine.protocol.TrainingEngine`).

    Raises:
        UnsupportedStateError: the engine holds state that reft does not know.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.name = type(engine).__name__
        self.adapter = adapter_for(engine)
        for finding in engine_findings(find_ds_config(engine)):
            raise UnsupportedStateError(str(finding))
        self.device: torch.device = torch.device(getattr(engine, "device", "cpu"))
        self.micro_batches = int(engine.gradient_accumulation_steps())
        self.data = DataPosition(engine, self._replica)
        self._held: tuple[Any, bytes | str] = (None, "")
        self.resizing = LayoutChange(engine, self.adapter, find_ds_config(engine))

    @property
    def global_steps(self) -> int:
        return int(self.engine.global_steps)

    def place(self) -> tuple[Coordinate, Degrees]:
        return find_coordinate(self.engine)

    def _replica(self) -> tuple[int, int]:
        coordinate, degrees = self.place()
        return coordinate.dp, degrees.dp

    def shapes(self) -> str:
        return read_shapes(
            type(self.engine.module).__qualname__, self.engine.module.named_parameters()
        )

    def settings(self) -> dict[str, Fact]:
        engine = self.engine
        config = find_ds_config(engine)
        facts: dict[str, Fact] = {
            **read_argument_facts(sys.argv[1:]),
            "script": own_program()[0],
            "seed": torch.initial_seed(),
            "config.train_batch_size": int(engine.train_batch_size()),
            "config.train_micro_batch_size_per_gpu": int(engine.train_micro_batch_size_per_gpu()),
            "config.gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        }
        for name in _CONFIG:
            if name in config:
                facts |= {f"config.{key}": fact for key, fact in flat_facts(name, config[name])}
        zero = dict(flat_facts("zero_optimization", config.get("zero_optimization") or {}))
        facts["config.zero_optimization.stage"] = 0
        facts |= {
            f"config.{k}": v
            for k, v in zero.items()
            if k.removeprefix("zero_optimization.") in _ZERO
        }
        if "optimizer" not in config:
            facts |= dict(_hyperparameters(engine.optimizer))
        if "scheduler" not in config and engine.lr_scheduler is not None:
            facts["lr_scheduler"] = type(engine.lr_scheduler).__qualname__
        return facts

    def capture(self, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        state = capture_host_state(self.engine, self.adapter, client_state, self.data.state())
        signature = self.adapter.signature()
        if self._held[0] != signature:  # tensors have appeared or moved
            self._held = signature, describe_layouts(self.engine, self.adapter)
        return {**state, HELD: self._held[1]}

    def restore(self, state: dict[str, Any]) -> None:
        restore_host_state(self.engine, self.adapter, state)

    def restore_beside_checkpoint(self, state: dict[str, Any], *, scheduler: bool) -> None:
        """Behind DeepSpeed's own ``load_checkpoint``: what its files do not hold."""
        restore_data_free_state(self.engine, state, scheduler=scheduler)

    def template(self, images: tuple[SectionImage, SectionImage], state: dict[str, Any]) -> bytes:
        from reft.storage.deepspeed_format import capture_template

        return capture_template(self.engine, images, state)


def _hyperparameters(optimizer: Any) -> Iterator[tuple[str, Fact]]:
    """Of an optimizer that the script made itself, group by group."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    yield "optimizer.type", type(inner).__qualname__
    for index, group in enumerate(getattr(inner, "param_groups", ())):
        # A scheduler has moved "lr" already; "initial_lr" is what the script wrote.
        settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        for key, value in sorted(settings.items()):
            if key not in ("params", "initial_lr"):
                yield from flat_facts(f"optimizer.group{index}.{key}", value)
