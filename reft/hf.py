"""Resumes Hugging Face's ``Trainer`` with DeepSpeed exactly where a version was taken.

    trainer = reft.hf.resumable(Trainer(...))
    trainer.train()

The Trainer creates the DeepSpeed engine within ``train()``, after it has decided where to begin.
Therefore methods of the Trainer instance are wrapped. As soon as the engine exists, its state is
restored; and the Trainer skips the data on which it trained before the failure, in the same way as
when it resumes from a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from reft.engine.host_state import HostState
from reft.engine.protocol import OnResize
from reft.errors import ConfigError
from reft.state import attributes
from reft.state.codec import class_path
from reft.state.objects import is_stateful
from reft.wrapping import wrap

_STATE = "trainer"
"""Key of the Trainer's state in the client state, which versions include."""
_KEPT = (
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of the Trainer's state that versions include, in addition to the step. The Trainer's log
is not included, because it grows with every step."""
_CALLBACKS, _CONTROL = "callbacks", "control"
"""Keys, in the client state, of the states of callbacks and of the Trainer's control."""
_PREPARE, _PASS, _RNG = "_prepare_for_training", "_run_epoch", "_load_rng_state"
_NEEDED = {
    _PREPARE: {"max_steps", "train_dataloader", "resume_from_checkpoint"},
    _PASS: {
        *("epoch", "num_update_steps_per_epoch", "resume_from_checkpoint", "epochs_trained"),
        "steps_trained_in_current_epoch",
    },
    _RNG: {"checkpoint"},
}


def resumable(trainer: Any, on_resize: OnResize | None = None) -> Any:
    """Make a ``transformers.Trainer`` resume from the newest version after a failure.

    Restored are weights, optimizer, scheduler, random states, the step, the position in the data,
    the Trainer's control and the state of callbacks. The state of a callback is what it exports (as
    ``EarlyStoppingCallback`` does), its ``state_dict``, or its attributes that are plain values or
    random generators. The Trainer's log begins again. Without a ``reft`` block in the DeepSpeed
    configuration, this changes nothing.

    Args:
        trainer: a Trainer with ``TrainingArguments(deepspeed=...)``, before ``train()`` is called.
        on_resize: function that is called when a state of another data-parallel degree was loaded,
            as in :func:`reft.attach`.

    Returns:
        The same Trainer.

    Raises:
        ConfigError: the object is no Trainer of a supported transformers release (5.0 or later).
    """
    for name, arguments in _NEEDED.items():
        method = getattr(trainer, name, None)
        if method is None or not arguments <= inspect.signature(method).parameters.keys():
            kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
            raise ConfigError(
                f"found {kind}, whose method {name} is missing or takes other arguments; expected "
                "the Trainer of transformers 5.0 or later"
            )
    wrapped = Resumption(trainer, on_resize)
    for name, wrapper in (
        (_PREPARE, wrapped.prepare),
        (_PASS, wrapped.run_pass),
        (_RNG, wrapped.load_rng),
    ):
        wrap(trainer, name, wrapper)
    return trainer


class Callbacks(HostState):
    """Captures and restores the state of the script's callbacks that do not export it themselves.

    The state is a callback's ``state_dict`` or its attributes. At a restore, states and callbacks
    are matched by class, in order.
    """

    name = "trainer.callbacks"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.capture()  # So that attributes.capture() knows the values before training

    def _followed(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [
            callback
            for callback in self._trainer.callback_handler.callbacks
            if not isinstance(callback, ExportableState)
            and not type(callback).__module__.startswith("transformers.")
        ]

    def capture(self) -> list[list[Any]]:
        return [
            [class_path(callback), attributes.capture(callback)] for callback in self._followed()
        ]

    def restore(self, saved: list[list[Any]]) -> None:
        left = list(saved)
        for callback in self._followed():
            found = next((state for state in left if state[0] == class_path(callback)), None)
            if found is not None:
                left.remove(found)
                attributes.restore(callback, found[1])


class Scheduler(HostState):
    """Captures and restores the Trainer's learning-rate scheduler if it is not one of torch's.

    Torch's schedulers are found and restored without this.
    """

    name = "trainer.lr_scheduler"

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def capture(self) -> Any:
        return self._scheduler.state_dict()

    def restore(self, saved: Any) -> None:
        self._scheduler.load_state_dict(saved)


def followers(trainer: Any, engine: Any) -> Iterator[HostState]:
    """Yield the objects that capture and restore a Trainer's state outside of its engine."""
    from torch.optim.lr_scheduler import LRScheduler

    yield Callbacks(trainer)
    scheduler = trainer.lr_scheduler
    # The engine's scheduler, which Accelerate may have wrapped, is restored with the engine.
    is_engines = engine.lr_scheduler in (scheduler, getattr(scheduler, "scheduler", None))
    if is_stateful(scheduler) and not is_engines and not isinstance(scheduler, LRScheduler):
        yield Scheduler(scheduler)


class Resumption:
    """Restores the state of one Trainer, and skips the data that was trained on before."""

    def __init__(self, trainer: Any, on_resize: OnResize | None) -> None:
        self._trainer, self._on_resize = trainer, on_resize
        self._rng: dict[str, Any] | None = None
        """Random states of the version; None once they are restored, or if there are none."""
        self._step: int | None = None
        """The restored step; None once its epoch has begun, or if nothing was restored."""
        self._has_stopped = False
        """Whether a callback had stopped the training when the version was taken."""

    def capture(self) -> dict[str, Any]:
        state = self._trainer.state
        callbacks = [[type(c).__name__, c.state()["attributes"]] for c in self._stateful()]
        control = self._trainer.control.state()["args"]
        return {
            _STATE: {name: getattr(state, name) for name in _KEPT},
            _CALLBACKS: callbacks,
            _CONTROL: control,
        }

    def _stateful(self) -> list[Any]:
        """Return the callbacks that export their state, as in the Trainer's own checkpoints."""
        from transformers.trainer_callback import ExportableState

        return [
            c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)
        ]

    def restore_callbacks(self, saved: list[list[Any]]) -> None:
        """Restore the states of callbacks that export them, matched by class name, in order.

        The script creates the callbacks again at every start.
        """
        states = list(saved)
        for callback in self._stateful():
            found = next((state for state in states if state[0] == type(callback).__name__), None)
            if found is not None:
                states.remove(found)
                for name, value in found[1].items():
                    setattr(callback, name, value)

    def prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the Trainer's method that creates the engine; restore the state afterwards."""
        from reft.engine.attach import attach, find_session
        from reft.state.blob import capture_rng

        result = original(*args, **kwargs)
        trainer = self._trainer
        engine = trainer.model_wrapped
        if find_session(engine) is None:
            return result
        session = attach(engine, client_state=self.capture, on_resize=self._on_resize)
        for follower in followers(trainer, engine):
            session.follow(follower)
        given = (
            inspect.signature(original).bind(*args, **kwargs).arguments["resume_from_checkpoint"]
        )
        path, client_state = engine.load_checkpoint(given or trainer.args.output_dir)
        saved = (client_state or {}).get(_STATE)
        if path is None or saved is None:
            return result
        for name, value in saved.items():
            setattr(trainer.state, name, value)
        self._has_stopped = (
            (client_state or {}).get(_CONTROL, {}).get("should_training_stop", False)
        )
        self.restore_callbacks((client_state or {}).get(_CALLBACKS) or [])
        trainer.state.global_step = self._step = int(engine.global_steps)
        session.context.engine.data.leave_to_script()  # type: ignore[union-attr]  # DeepSpeed's has one
        self._rng = capture_rng()
        return result

    def run_pass(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap the Trainer's method for one epoch; skip the batches before the restored step."""
        from reft.engine.attach import finish_training

        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        if self._step is not None:
            trainer = self._trainer
            if self._has_stopped or trainer.state.global_step >= trainer.state.max_steps:
                trainer.control.should_training_stop = True
                finish_training(trainer.model_wrapped)  # The Trainer loads its best model next
                return
            first, steps = divmod(self._step, bound["num_update_steps_per_epoch"])
            if bound["epoch"] < first:
                return
            skipped = (
                0
                if trainer.args.ignore_data_skip
                else steps * trainer.args.gradient_accumulation_steps
            )
            bound |= {"epochs_trained": first, "steps_trained_in_current_epoch": skipped}
            bound |= {"resume_from_checkpoint": trainer.args.output_dir}
            self._step = None
        original(**bound)

    def load_rng(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap the Trainer's loading of random states; restore those of the version instead.

        The Trainer calls the method when it has skipped the data before the restored step.
        """
        from reft.state.blob import restore_rng

        if self._rng is None:
            original(*args, **kwargs)
        else:
            restore_rng(self._rng)
            self._rng = None
