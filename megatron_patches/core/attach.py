"""``reft.attach_megatron``: protects a training loop on Megatron-core.

These methods are wrapped on the instances, never on the classes:

- ``zero_grad_buffer`` of the model chunks, the first call of every step. The version is taken
  there, and restored random states are set there.
- ``optimizer.step``: training waits here until copies of its tensors have ended (the fence, P2).
  Once a step has shown that the innermost optimizer's hooks run before that optimizer writes,
  the fence moves into these hooks, where the gradient norm is already computed.

In a pipeline, copies run while a stage waits for a neighbour. Megatron's schedules (1F1B and
interleaved) are functions that create a ``P2PCommunicator`` for every step, and look up
``forward_step`` and ``backward_step`` in their module. These three names are replaced in the
module by objects that do the same and notify reft before and after. Nothing is reordered, and
for a training that reft does not protect the objects do nothing more. If a receive is only
started (``overlap_p2p_comm``), the window is the later wait for its end.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from megatron_patches.core.engine import MegatronEngine, check_release
from reft import log
from reft.config import parse_block
from reft.engine.protocol import ClientState
from reft.engine.session import Session, record
from reft.errors import ConfigError, UnrecoverableError
from reft.pacing.pacer import Pacer
from reft.pacing.schedule import InstructionRecord
from reft.pacing.tracer import Tracer
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.recover.recover import RecoveryOutcome
from reft.wrapping import wrap

logger = logging.getLogger(f"reft.{__name__}")

_LINES = """
    client_state = lambda: {"samples": ...}
    protected = reft.attach_megatron(model, optimizer, scheduler, client_state=client_state)
    resumed = protected.load()    # None at the first start
    if resumed is not None:
        iteration, client_state = resumed"""


class ResumeState(NamedTuple):
    """The state from which a job continues.

    Attributes:
        iteration: number of completed steps.
        client_state: the mapping that the function ``client_state`` returned after the last of
            these steps; empty if the script loaded the state itself.
    """

    iteration: int
    client_state: dict[str, Any]


def attach_megatron(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any = None,
    *,
    client_state: ClientState | None = None,
    config: Mapping[str, Any] | None = None,
    micro_batches: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> MegatronProtection:
    """Protect a training loop on Megatron-core.

    Collective: call it on all ranks at the same point, after ``get_megatron_optimizer``, and call
    ``MegatronProtection.load`` before the first step.

    Args:
        model: the model chunks of this rank, each in Megatron's ``DistributedDataParallel``.
        optimizer: the result of ``get_megatron_optimizer``.
        scheduler: ``OptimizerParamScheduler``, or another one with ``state_dict`` and
            ``load_state_dict``.
        client_state: function that is called for every version; ``load`` returns its mapping
            after a restart. It holds, for example, the number of consumed samples. Values are
            anything that ``reft.state.codec`` encodes.
        config: the ``reft`` block; ``"enabled"`` is not needed.
        micro_batches: number of micro-batches in a step; by default that of Megatron's
            calculator.
        state: further objects of the script to restore, as in :func:`reft.attach`.

    Raises:
        ConfigError: the block is invalid or asks for something that is not available with
            Megatron-core, or this release of Megatron-core is unknown.
        UnsupportedStateError: the model or the optimizer holds state that reft does not know.
    """
    check_release()
    log.install()
    parsed = parse_block({"enabled": True, **(config or {})}, os.environ)
    if not parsed.enabled:
        raise ConfigError(
            'reft.attach_megatron was called with "enabled": false; leave the call out instead'
        )
    if parsed.persist.dir is not None:
        raise ConfigError(
            f"persist.dir is {parsed.persist.dir}, but reft writes no checkpoints of Megatron-core "
            "to disk; remove it, save with Megatron's own functions, and pass to load() the "
            "function that loads such a checkpoint"
        )
    engine = MegatronEngine(list(model), optimizer, scheduler, micro_batches or _micro_batches())
    session = Session(engine, parsed, client_state)
    session.give(state or {})
    protection = MegatronProtection(engine, session)
    record(session)
    atexit.register(session.close)
    return protection


class MegatronProtection:
    """A protected training loop. Made by ``reft.attach_megatron``.

    Attributes:
        session: the session, which takes the versions.
        progress: the progress page of this trainer, a shared-memory page that the node's daemon
            reads.
        memory: restores the session from the job's memory.
        half_written: whether a version was found corrupt when it was partly restored, so that
            the complete state has to be loaded from elsewhere.
    """

    def __init__(self, engine: MegatronEngine, session: Session) -> None:
        self.session = session
        self._engine, self._context, self._state = engine, session.context, session.state
        self.progress = session.progress
        self.memory = session.memory_restorer()
        self.half_written = False
        self._begun = self._stepped = self._said = False
        self._weaver: MegatronWeaver | None = None
        if self._context.topology.degrees.pp > 1:
            self._weaver = MegatronWeaver(session.copying.pacer, session.tracer)
        for chunk in engine.chunks:
            wrap(chunk, "zero_grad_buffer", self._beginning)
        wrap(engine.optimizer, "step", self._stepping)
        for part in engine.adapter.parts:
            if isinstance(part.wrapper.optimizer, torch.optim.Optimizer):
                part.wrapper.optimizer.register_step_pre_hook(session.fence.before_write)

    # -- called by the script ----------------------------------------------------------------------

    def load(self, otherwise: Callable[[], int | None] | None = None) -> ResumeState | None:
        """Restore the newest version in the job's memory. Collective, before the first step.

        Args:
            otherwise: function of the script that is called on all ranks if memory has no
                version, or its version was found corrupt during the restore. It loads the
                complete state from the script's checkpoint on disk and returns the number of
                completed steps; None if there is no checkpoint.

        Returns:
            The state from which the job continues; None if it starts from scratch.

        Raises:
            UnrecoverableError: the job made progress, but no state of it is left.
            ConfigError: load was called before, or training has begun.
        """
        if self.session.started:
            raise ConfigError(
                "load() was called a second time, or after the first step; call it once, before "
                "the first step"
            )
        recovery, plan = self.memory.survey()
        if isinstance(plan, RecoveryPlan):
            self.memory.check_identity(plan)
            outcome = self.memory.restore(recovery)
            if isinstance(outcome, RecoveryOutcome):
                return ResumeState(self._engine.global_steps, self.memory.client_state)
            plan, self.half_written = outcome, True
        began = time.perf_counter()
        steps = self._load_otherwise(otherwise)
        if steps is None:
            if self.half_written:
                assert isinstance(plan, NotRecoverable)
                self.memory.refuse_half_written(plan)
            self.memory.refuse_silent_restart(plan)
            self.session.start({})
            return None
        if self._context.is_rank_zero and not plan.empty:
            logger.warning("resuming from disk: %s", plan)
        self._engine.global_steps = steps
        self.session.restored()
        self.session.start({})
        self.memory.report("disk, loaded by the script", began)
        return ResumeState(steps, {})

    def end_step(self) -> None:
        """Take the version of a completed step, after the scheduler has stepped and the samples
        are counted.

        Called automatically when the next step begins. After the last step, the script has to
        call it on all ranks.

        Raises:
            SystemExit: the job stops here on request.
        """
        if not self._stepped:
            return
        self._stepped = False
        if self._weaver is not None:
            self._weaver.end_step()
        self.session.begin_step()
        if not self._said:
            self._said = True
            self.memory.made_first_step()
            if self._state.client_state is None:
                self._context.warn(
                    "reft does not know how many samples were consumed: after a failure the job "
                    "continues with other data, unless batches follow from the iteration that "
                    f"load() returns. Write{_LINES}",
                )

    def begin_step(self) -> None:
        """Begin a step. Called in ``zero_grad_buffer``; further calls in the same step do
        nothing."""
        if self._begun:
            return
        self._begun = True
        if not self.session.started:
            self._start_at_first_step()
        self.end_step()
        self.memory.restore_rng()
        self._state.followed.begin_step(is_first=True)
        self.progress.begin_step()
        self._state.restored_client = None
        if self._weaver is not None:
            self._weaver.begin_step()

    def close(self) -> None:
        """Finish pending work and release all resources. The job's memory stays."""
        self.session.close()

    # -- called by Megatron ------------------------------------------------------------------------

    def _beginning(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin a step, then call the original ``zero_grad_buffer`` of a model chunk."""
        self.begin_step()
        return original(*args, **kwargs)

    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's original ``step``, and let training wait for copies before it
        writes."""
        if not self._begun:
            raise ConfigError(
                "optimizer.step() was called, but zero_grad_buffer() of the model chunks was not "
                "called since the previous step; call it on every chunk when a step begins: reft "
                "takes its versions there"
            )
        if self._weaver is not None:
            self._weaver.pause()
        self.session.before_optimizer_step()
        try:
            result = original(*args, **kwargs)
        finally:
            self.session.after_optimizer_step()
        self._engine.global_steps += 1
        self.session.after_step()
        self._begun, self._stepped = False, True
        return result

    # -- start -------------------------------------------------------------------------------------

    def _load_otherwise(self, otherwise: Callable[[], int | None] | None) -> int | None:
        """Let the script load its state.

        Returns:
            The number of completed steps; None if there is nothing to load.

        Raises:
            UnrecoverableError: the ranks have loaded different steps.
        """
        steps = None if otherwise is None else otherwise()
        gathered = self._context.control.gather_ints([-1 if steps is None else steps])
        steps_of_ranks = {values[0] for values in gathered}
        if len(steps_of_ranks) > 1:
            raise UnrecoverableError(
                f"the ranks have loaded checkpoints of different steps: {sorted(steps_of_ranks)}, "
                "-1 where there was none; expected the same one on all ranks"
            )
        return steps

    def _start_at_first_step(self) -> None:
        """Start the session in a script that has not called load(), and warn of the consequences
        (P12)."""
        did = "the script trains without calling load() of what reft.attach_megatron returned"
        _, plan = self.memory.survey()
        if isinstance(plan, RecoveryPlan):
            self.memory.refuse_to_overwrite(plan, did, f"Write{_LINES}", persistable=False)
        self.memory.refuse_silent_restart(plan)
        self._context.warn(
            f"{did}. After a failure the job would stop with an error. Write{_LINES}"
        )
        self.session.start({})


def _micro_batches() -> int:
    """Return the number of micro-batches in a step, from Megatron's calculator."""
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise ConfigError(
            "Megatron's calculator of micro-batches is not initialised; pass micro_batches=..."
        )
    return int(calculator.get_num_microbatches())


# -- windows in a pipeline -------------------------------------------------------------------------

_running: list[MegatronWeaver] = []
"""Contains the weaver of the current step, if there is one. A process trains one model at a
time."""


class MegatronWeaver:
    """Opens the windows (idle intervals) of one training. It sets no marks on the device's
    clock.

    Before every step it decides whether to time every instruction.
    """

    def __init__(self, pacer: Pacer, tracer: Tracer) -> None:
        self._pacer, self._tracer = pacer, tracer
        tracer.woven = True
        self._computing: dict[str, list[tuple[Any, Any]]] = {"ForwardPass": [], "BackwardPass": []}
        self._is_traced = False
        self._names: list[str] = []
        self._step_began = False
        _weave_schedules()

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for the forward and backward passes and the optimizer step."""
        self._names = []
        for stamps in self._computing.values():
            stamps.clear()
        self._is_traced, self._tracer.began = self._tracer.active, time.perf_counter()
        self._step_began = True
        self._pacer.begin_step("megatron")
        _running[:] = [self]

    def pause(self) -> None:
        """Stop opening windows after the optimizer step, for example in an evaluation."""
        self._names.append("OptimizerStep")
        _running.clear()

    def end_step(self) -> None:
        """Report the instructions of the step that has ended. Called when the next step begins."""
        if self._step_began:
            forwards, backwards = (
                tuple(self._computing[n]) for n in ("ForwardPass", "BackwardPass")
            )
            self._pacer.end_step("megatron", tuple(self._names), forwards, backwards)
        self._step_began = False

    # -- instructions ------------------------------------------------------------------------------

    @contextmanager
    def executing(self, name: str) -> Iterator[None]:
        """Time the instruction in the ``with`` block: a computation, or a wait for a neighbour,
        during which a window is open."""
        position, stamps = len(self._names), self._computing.get(name)
        self._names.append(name)
        if stamps is None:
            self._pacer.open(position, name.startswith("Recv"))
        came, began = None if stamps is None else self._pacer.stamp(), time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            if stamps is None:
                self._pacer.close()
            else:
                stamps.append((came, self._pacer.stamp()))
            if self._is_traced:
                micro_batch = self._names[:position].count(name)
                self._tracer.records.append(
                    InstructionRecord(position, name, micro_batch, began, ended)
                )


def _executing(name: str) -> AbstractContextManager[None]:
    """Time the instruction in the ``with`` block if reft protects the training of the current
    step."""
    return _running[0].executing(name) if _running else nullcontext()


class _Awaited:
    """A transfer that was started; while its end is awaited, a window is open."""

    def __init__(self, work: Any, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with _executing(self._name):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_NAMES = {
    "recv_prev": "RecvActivation",
    "recv_next": "RecvGrad",
    "send_next": "SendActivation",
    "send_prev": "SendGrad",
}
"""Names of the corresponding DeepSpeed instructions, by the communicator's transfer. A call that
both receives and sends gets the name of the receive."""


def _find_name(arguments: dict[str, Any]) -> str | None:
    """Return the instruction name of a call's transfer; None if nothing is sent or received."""
    for key, name in _NAMES.items():
        if key.startswith("recv") and arguments.get(key):
            return name
        if key.startswith("send") and arguments.get(f"tensor_{key}") is not None:
            return name
    return None


def _weave_schedules() -> None:
    """Replace the functions in the module of Megatron's schedules, once per process."""
    from megatron.core.pipeline_parallel import schedules

    names = vars(schedules)
    communicator = names["P2PCommunicator"]
    if getattr(communicator, "_reft_woven", False):
        return

    class WovenP2PCommunicator(communicator):  # type: ignore[misc, valid-type]
        """Megatron's communicator, which opens windows while it waits."""

        _reft_woven = True

        def _communicate(self, **arguments: Any) -> Any:
            name = _find_name(arguments)
            if not _running or name is None:
                return super()._communicate(**arguments)
            if arguments.get("wait_on_reqs", True):
                with _executing(name):
                    return super()._communicate(**arguments)
            *received, begun = super()._communicate(**arguments)
            if isinstance(begun, dict):
                begun = {key: _Awaited(work, _NAMES[key]) for key, work in begun.items()}
            return (*received, begun)

    names["P2PCommunicator"] = WovenP2PCommunicator
    for function, name in (("forward_step", "ForwardPass"), ("backward_step", "BackwardPass")):
        names[function] = _logged(names[function], name)


def _logged(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _executing(name):
            return original(*args, **kwargs)

    return wrapper
