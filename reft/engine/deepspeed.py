"""The DeepSpeed hook: wraps one engine's methods on the instance, never the class.

Works for ``PipelineEngine`` (``train_batch``) and for the plain engine (``forward``/``backward``/
``step``). What is wrapped:

- ``_take_model_step``: the fence, or its approach. Both engines pass here before weights change;
  ``step()`` would not do, a pipeline engine never calls it (trap 8). Once a step has shown that the
  innermost optimizer's hooks come first, the fence is there, behind the norm of the gradients.
- ``train_batch`` / ``step``: the step boundary. ``forward`` of a plain engine: what must be known before the
  first step is asked there.
- ``_exec_schedule``, ``_aggregate_total_loss``: a pipeline engine's windows.
- ``load_checkpoint`` / ``save_checkpoint``.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from reft import integrations, log
from reft.config import Variant, load_config, parse_block
from reft.engine.checks.start import say_untried_device, warn
from reft.engine.deepspeed_engine import DeepSpeedEngine
from reft.engine.engine import ClientState
from reft.engine.load.disk import SAVED_BY, host_file
from reft.engine.load.restore import LoadCall, Restorer, bind
from reft.engine.on_import import ds_config_of, wrap
from reft.engine.session import Session
from reft.errors import ConfigError, ReftError, UnsupportedStateError
from reft.grid import Coordinate
from reft.node.progress import Phase, ProgressPage, at_instruction
from reft.refusal import end_in_words
from reft.snapshot.copying.gate import queues_transfers, waits
from reft.snapshot.schedule import InstructionRecord
from reft.state.adapters import why_not_loadable
from reft.state.codec import encode

logger = logging.getLogger(__name__)


def save_with_host_state(session: Session, original: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    """``engine.save_checkpoint``, with the client state that was attached and the one that is given."""
    attached = dict(session.state.client_state()) if session.state.client_state else {}
    client_state = {**attached, **(call.get("client_state") or {})}
    result = original(**{**call, "client_state": client_state})
    from reft.state.deepspeed_format import write_host_file

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
        state = session.engine.capture(kept)
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
"""In the place of a number: a token passes some of the experts, and the engine does not say how many."""


def own_flops_per_token(engine: Any, at: Coordinate) -> int:
    """Of the parameters that this rank answers for: those of the first replica, of a tied parameter the first
    of its stages, and of one that tensor-parallel ranks have alike the first of them. :data:`EXPERTS` where
    there are experts."""
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
    """By the first micro-batch of token ids among the inputs of a forward pass, tensors in lists, tuples and
    mappings; 0 where there is none."""
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


def attach(
    engine: Any, client_state: ClientState | None = None, config: Mapping[str, Any] | None = None
) -> Session:
    """Protect an engine. Collective: call it on all ranks at the same point.

    Args:
        engine: what ``deepspeed.initialize`` returned first; Megatron's list of it too.
        client_state: called at every snapshot; returns a mapping that ``load_checkpoint`` gives back.
            Megatron-DeepSpeed's is captured without it.
            Values may be anything ``reft.state.codec`` encodes (numbers, strings, containers,
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
                "reft.attach was given a config, but the reft block of its DeepSpeed configuration already "
                "protects the engine, and that block stays in force; write the settings into it",
            )
        if client_state is not None:
            session.state.client_state = client_state
        return session
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
    innermost = seen.adapter.state.optimizer
    if isinstance(innermost, torch.optim.Optimizer):
        innermost.register_step_pre_hook(session.fence.before_write)
    _wrap(seen, session)
    say_untried_device(session)
    atexit.register(session.close)
    if program is not None:
        program.join(session)
    return session


def resume(engine: Any) -> tuple[Any, Any]:
    """Go on where the job was: at the newest version in memory or in the persist directory. For scripts that
    have no directory to load from, or look for a file first. Collective, after ``deepspeed.initialize``:

        reft.resume(engine)
        for step in range(engine.global_steps, steps): ...

    Returns:
        ``(path, client_state)``, as ``engine.load_checkpoint`` does; ``(None, None)`` where the job begins,
        and where the engine is not protected.

    Raises:
        UnrecoverableError: the job made progress, but no whole version of it is left.
    """
    if session_of(engine) is None:
        return None, None
    path, client_state = engine.load_checkpoint(None)
    return path, client_state


def session_of(engine: Any) -> Session | None:
    return getattr(engine, _SESSION, None)


def _during(page: ProgressPage, phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with page.during(phase):
        return original(*args, **kwargs)


def _wrap(seen: DeepSpeedEngine, session: Session) -> None:
    engine, restorer, progress = seen.engine, Restorer(session, seen), session.progress
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

    def train_batch(original: Callable[..., Any], data_iter: Any = None, *args: Any, **kwargs: Any) -> Any:
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
        restorer.before_forward(training=training)
        if not training:
            return _during(progress, Phase.EVALUATION, original, *args, **kwargs)
        progress.begin_step()
        look_for_tokens((args, kwargs))
        return original(*args, **kwargs)

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        wrap(engine, "eval_batch", partial(_during, progress, Phase.EVALUATION))
        Weaver(engine, session)
    else:
        for name in ("forward", "backward", "step"):
            wrap(engine, name, at_instruction(progress, name.capitalize()))
        wrap(engine, "forward", forward)
        wrap(engine, "step", step)
    for name, around, phase in (
        ("load_checkpoint", load, Phase.LOADING),
        ("save_checkpoint", save, Phase.SAVING),
    ):
        wrap(engine, name, around)
        wrap(engine, name, partial(_during, progress, phase))


# -- weaving: snapshot instructions in the schedule that a pipeline engine is about to execute ---------------
#
# The engine's ``_exec_schedule`` is wrapped on the instance; it gets the same schedule, yielding the same
# training instructions in the same order, with instructions of ours around those in which the device may
# wait, and behind the optimizer step. They are DeepSpeed's own kind of instruction and are looked up in a
# copy of ``_INSTRUCTION_MAP`` that belongs to this engine. Any schedule class works: 1F1B, inference, data
# parallel, zero-bubble, a user's own. Nothing is known about it beforehand but the names of instructions.
#
# Bubble time is spent *inside* receives, so a window opens before one and closes after it; where a schedule
# queues its transfers (DualPipeV), that is the instruction which carries them out. The wait for the other
# stages at the end of a step is inside ``_aggregate_total_loss``, which follows the schedule.


class OpenSnapshotWindow(PipeInstruction):  # type: ignore[misc]
    """The device is about to wait: snapshot copies may run. ``window_id``: position of the waiting
    instruction in the step's stream; ``receives``: whether it is a receive."""


class CloseSnapshotWindow(PipeInstruction):  # type: ignore[misc]
    """The device goes on: no snapshot copy runs any more. ``window_id``: of the window."""


class TakeSnapshot(PipeInstruction):  # type: ignore[misc]
    """The state after the optimizer step is final: a version begins here."""


@dataclass
class _Stream:
    """What is known about a schedule from having executed it."""

    names: list[str] = field(default_factory=list)
    ends_with_optimizer_step: bool = False
    queues: bool = False


class WovenSchedule:
    """A schedule with snapshot instructions; everything else is the schedule's own. ``take``: insert
    :class:`TakeSnapshot` behind the optimizer step. ``seen``: takes the names of the training
    instructions, in order. ``queues``: its transfers are known to be queued, as in DualPipeV; else that
    shows with the first."""

    def __init__(self, schedule: Any, *, take: bool, seen: list[str], queues: bool = False) -> None:
        self._schedule = schedule
        self._take = take
        self._seen = seen
        self._queues = queues

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def __iter__(self) -> Iterator[list[Any]]:
        for commands in self._schedule:
            yield list(self._weave(commands))

    def _weave(self, commands: Any) -> Iterator[Any]:
        for command in commands:
            name = type(command).__name__
            position = len(self._seen)
            self._seen.append(name)
            self._queues = self._queues or queues_transfers((name,))
            may_wait, receives = waits(self._seen, self._queues)
            if may_wait:
                yield OpenSnapshotWindow(window_id=position, receives=receives)
                yield command
                yield CloseSnapshotWindow(window_id=position)
            else:
                yield command
            if self._take and name == "OptimizerStep":
                yield TakeSnapshot()


class Weaver:
    """Weaves the schedules of a session's pipeline engine. Made once, at ``attach``. Whether anything is to
    be woven, and whether every instruction is timed, is asked before every schedule."""

    def __init__(self, engine: Any, session: Session) -> None:
        self._session, self._tracer = session, session.tracer
        self._tracer.woven = True
        self._progress = session.progress
        self._pacer = session.copying.pacer
        self._computing: dict[str, list[tuple[Any, Any]]] = {"ForwardPass": [], "BackwardPass": []}
        self._streams: dict[Hashable, _Stream] = {}
        self._counts: Counter[str] = Counter()
        self._position = 0
        self._drains = False
        self._key: Hashable = None
        self._source: Mapping[type, Callable[..., Any]] = {}
        self._maps: dict[bool, Mapping[type, Callable[..., Any]]] = {}
        for name, around in (
            ("_exec_schedule", self._exec_schedule),
            ("_aggregate_total_loss", self._aggregate),
        ):
            if hasattr(engine, name):
                wrap(engine, name, partial(around, engine))

    # -- execution -----------------------------------------------------------------------------------

    def _exec_schedule(self, engine: Any, original: Callable[..., Any], schedule: Any) -> Any:
        self._tracer.began = time.perf_counter()
        traced = self._tracer.active
        for stamps in self._computing.values():
            stamps.clear()
        # P1: on the instance; the class, and every other engine, executes as before.
        engine._INSTRUCTION_MAP = self._instruction_map(engine, traced)
        copying = self._session.copying
        paced = copying.variant is Variant.HAS or copying.pacer.gate.wanted
        if not (traced or (paced and self._session.worker is not None)):
            return original(schedule)
        key = _key_of(schedule)
        known = self._streams.get(key)
        stream = _Stream()
        woven = WovenSchedule(
            schedule,
            take=known is not None and known.ends_with_optimizer_step,
            seen=stream.names,
            queues=known is not None and known.queues,
        )
        self._position = 0
        self._counts.clear()
        self._pacer.begin_step(key)
        try:
            result = original(woven)
        finally:
            self._pacer.close()  # whatever happened, no window stays open
        stream.ends_with_optimizer_step = stream.names[-1:] == ["OptimizerStep"]
        stream.queues = queues_transfers(stream.names)
        self._streams[key] = stream
        self._drains = stream.ends_with_optimizer_step
        if not self._drains:
            self._end_step(key, stream)
        else:
            self._key = key
        return result

    def _aggregate(self, engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of the step: the first stages wait here for the last one, or all for all."""
        self._progress.instruction(self._progress.number_of("AggregateTotalLoss"))
        if not self._drains:
            return original(*args, **kwargs)
        self._drains = False
        stream = self._streams[self._key]
        self._pacer.open(len(stream.names), receives=True)
        mark = self._mark() if self._tracer.active else None
        began = time.perf_counter()
        try:
            result = original(*args, **kwargs)
        finally:
            ended = time.perf_counter()
            self._pacer.close()
        if self._tracer.active:
            self._tracer.records.append(
                InstructionRecord(len(stream.names), "AggregateTotalLoss", None, began, ended)
            )
            self._mark_end(mark)
        self._end_step(self._key, stream)
        return result

    def _end_step(self, key: Hashable, stream: _Stream) -> None:
        forwards, backwards = (tuple(self._computing[name]) for name in ("ForwardPass", "BackwardPass"))
        self._pacer.end_step(key, stream.names, forwards, backwards)

    # -- timing --------------------------------------------------------------------------------------

    def _instruction_map(self, engine: Any, traced: bool) -> Mapping[type, Callable[..., Any]]:
        """This engine's map: what its class has now, with clocks (around everything if traced, else
        around computation), and the snapshot instructions."""
        source = type(engine)._INSTRUCTION_MAP
        if source != self._source:
            self._source = dict(source)
            self._maps.clear()
        if traced not in self._maps:
            own: dict[type, Callable[..., Any]] = {
                OpenSnapshotWindow: lambda engine, window_id, receives: self._pacer.open(window_id, receives),
                CloseSnapshotWindow: lambda engine, window_id: self._pacer.close(),
                TakeSnapshot: lambda engine: self._session.boundary(),
            }
            told = {kind: self._told(kind.__name__, execute, traced) for kind, execute in source.items()}
            self._maps[traced] = {**told, **own}
        return self._maps[traced]

    def _told(self, name: str, execute: Callable[..., Any], traced: bool) -> Callable[..., Any]:
        """``execute``, noted and, where that is wanted, with clocks around it."""
        stamps, stamp = self._computing.get(name), self._pacer.stamp
        number, note = self._progress.number_of(name), self._progress.instruction

        def noted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            note(number)
            return execute(engine, *args, **kwargs)

        def clocked(engine: Any, *args: Any, **kwargs: Any) -> Any:
            note(number)
            mark = self._mark() if traced else None
            came = stamp() if stamps is not None else None
            began = time.perf_counter()
            try:
                return execute(engine, *args, **kwargs)
            finally:
                ended = time.perf_counter()
                if stamps is not None:
                    stamps.append((came, stamp()))
                if traced:
                    self._record(name, "buffer_id" in kwargs, began, ended)
                    self._mark_end(mark)

        return clocked if traced or stamps is not None else noted

    def _mark(self) -> Any:
        return None if self._tracer.mark is None else self._tracer.mark()

    def _mark_end(self, began: Any) -> None:
        if began is not None and self._tracer.mark is not None:
            self._tracer.marks.append((began, self._tracer.mark()))

    def _record(self, name: str, of_micro_batch: bool, began: float, ended: float) -> None:
        micro_batch = self._counts[name] if of_micro_batch else None
        self._counts[name] += 1
        self._tracer.records.append(InstructionRecord(self._position, name, micro_batch, began, ended))
        self._position += 1


def _key_of(schedule: Any) -> Hashable:
    """Tells apart schedules whose streams differ."""
    facts = (getattr(schedule, n, None) for n in ("micro_batches", "stages", "stage_id", "forward_only"))
    return (type(schedule).__module__, type(schedule).__qualname__, *facts)
