"""Records the steps of a trainer for ``reft rehearse``, as JSON lines in one file per rank.

If ``REFT_REHEARSE`` names a directory, :func:`attach` is called after reft has been attached to the
engine. The file :data:`PLAN` in that directory says how many steps to train and when to die. The
trainer writes ``rank-N.jsonl`` there, with these events:

- ``trained``: digests of a step's batches, and the losses that the engine knows;
- ``state``: digests of the state after a step, tensor by tensor;
- ``between``: an evaluation or a save after a step;
- ``killed``: this rank dies now, or waits for its node to be killed;
- ``said``: a warning that reft has logged.

The first two become :class:`~reft.rehearse.compare.ComparedStep` objects.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from reft.engine.boundary import Encoded
from reft.engine.capture import EngineState
from reft.engine.context import JobContext
from reft.engine.fence import OptimizerFence
from reft.engine.job_memory import JobMemory
from reft.engine.stopping import StopController
from reft.env import ENV_REHEARSE
from reft.grid import VersionId
from reft.memory.header import checksum
from reft.rehearse.compare import (
    CLIENT,
    DATA,
    GENERATORS,
    HOST,
    LOSS,
    RATES,
    STATE,
    TRAINED,
    WEIGHTS,
)
from reft.rehearse.keep import keep_files
from reft.snapshot.plan import LiveImages
from reft.state import codec
from reft.state.blob import DecodedBlob, LateBlob
from reft.state.catalogue import SectionImage
from reft.wrapping import wrap

PLAN = "plan.json"
BETWEEN, KILLED, SAID = "between", "killed", "said"
_CAUSES = {
    "data": DATA,
    "rng": GENERATORS,
    "lr_scheduler": RATES,
    "last_lr": RATES,
    "followed.schedulers": RATES,
    "followed.param_groups": RATES,
    "client": CLIENT,
    "followed": CLIENT,
    "followed.flags": HOST,
    "buffers": WEIGHTS,
    # Values that follow from the loss
    "engine._global_grad_norm": LOSS,
    "adapter.scaler": LOSS,
}
"""Kind of difference (cause) to which items of the captured state belong, by prefix of their key;
other items belong to :data:`HOST`."""
_NOT_COMPARED = ("data.pass.", "client.args.load")
"""Prefixes of keys of values that may differ, in order:

- The position in a loader that the script itself iterates over. After a restart a different loader
  may be in use: Hugging Face's Trainer uses one to skip batches. The batches themselves are
  compared.
- Megatron-DeepSpeed's argument ``load``, a directory that reft sets after a restart, so that the
  program loads its counters.
"""
_COMMIT_SECS = 3.0  # Longest wait for a commit before a kill; hang detection takes longer
_POLL_SECS = 0.01
_MOST_CHARS = 60
_MOST_ITEMS = 8

Where = Literal["step", "evaluation", "save", "boundary"]


@dataclass(frozen=True)
class RunPlan:
    """What the trainers have to do in one run.

    Attributes:
        steps: number of steps to train.
        kill_after: number of steps, counted from the first one of the run, after which a trainer is
            killed; 0: none is killed.
        kill_at: when the trainer is killed after step ``kill_after``: "step": within the next step;
            "evaluation" or "save": in such an activity; "boundary": where the next step begins.
        kills_node: whether the trainer waits until everything on its node is killed, rather than
            kill itself.
        overwrites: whether the script may overwrite existing files.
    """

    steps: int
    kill_after: int = 0
    kill_at: Where = "step"
    kills_node: bool = False
    overwrites: bool = False

    @classmethod
    def read(cls, directory: Path) -> RunPlan:
        return cls(**json.loads((directory / PLAN).read_text()))

    def write(self, directory: Path) -> None:
        (directory / PLAN).write_text(json.dumps(asdict(self)))


def attach(  # noqa: PLR0917 -- the parts of a session
    context: JobContext,
    session: object,
    memory: JobMemory,
    state: EngineState,
    fence: OptimizerFence,
    stopping: StopController,
) -> None:
    """Record every step of a training engine from now on.

    Args:
        context: facts about the job.
        session: reft's session for the engine; its ``after_step`` is called after every step.
        memory: provides the number of the job's start (incarnation).
        state: captures the state of versions.
        fence: its ``hold`` is called before the optimizer writes the tensors.
        stopping: ends the run after its last step.
    """
    recorder = Recorder(context, memory, stopping, Path(os.environ[ENV_REHEARSE]))
    state.listener = recorder.captured
    wrap(fence, "hold", recorder.hold)
    wrap(session, "after_step", recorder.after_step)


class Recorder:
    """Records the steps of one rank, and kills its process as planned (training thread)."""

    def __init__(
        self, context: JobContext, memory: JobMemory, stopping: StopController, directory: Path
    ) -> None:
        self._context, self._memory, self._stopping = context, memory, stopping
        self._plan = RunPlan.read(directory)
        self._rank = context.rank
        self._path = directory / f"rank-{self._rank}.jsonl"
        self._base_file = directory / f"base-{self._rank}"
        self._batches: list[str] = []  # Digests of the current step's micro-batches
        self._losses: list[str] = []
        self._began = 0.0  # Time in Unix seconds at which the current step began; 0 between steps
        self._last_step: int | None = None  # Newest step that was recorded or restored
        # Step at which the run began, before any failure; steps in the plan are counted from it
        self._base: int | None = None
        if self._base_file.exists():
            self._start_from(int(self._base_file.read_text()))
        logging.getLogger("reft").addHandler(_Warnings(self))
        self._watch_engine()

    # -- observed events ---------------------------------------------------------------------------

    def _watch_engine(self) -> None:
        """Hook batches, losses, evaluations and saves of the engine (or of Megatron-core)."""
        engine: Any = getattr(self._context.engine, "engine", None)
        keep_files(Path(os.environ[ENV_REHEARSE]), engine, overwrites=self._plan.overwrites)
        if engine is None:
            for chunk in self._context.engine.chunks:  # type: ignore[attr-defined]  # Megatron-core's
                chunk.register_forward_pre_hook(self._chunk_forward, with_kwargs=True)
            return
        wrap(engine, "save_checkpoint", self._save)
        if hasattr(engine, "grid"):
            wrap(engine, "train_batch", self._train_batch)
            wrap(engine, "eval_batch", self._eval_batch)
            wrap(engine, "_next_batch", self._next_batch)
            wrap(engine, "_aggregate_total_loss", self._aggregate_total_loss)
        else:
            wrap(engine, "forward", self._forward)
            # Hook the module, because Hugging Face's Trainer evaluates it without the engine.
            # torch.compile must not compile the hook.
            hook = torch.compiler.disable(self._module_forward)  # type: ignore[no-untyped-call]
            engine.module.register_forward_pre_hook(hook)
            wrap(engine, "backward", self._backward)

    def _module_forward(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if not module.training:
            self._between("evaluation")

    def _chunk_forward(self, chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_forward((args, kwargs), training=chunk.training)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin_forward((args, kwargs), training=self._context.engine.engine.training)  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    def _begin_forward(self, inputs: Any, *, training: bool) -> None:
        if training and torch.is_grad_enabled():
            self._begin_training()
            self._batches.append(digest_tensors(inputs))
        else:
            self._between("evaluation")

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin_training()
        return original(*args, **kwargs)

    def _eval_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._between("evaluation")
        return original(*args, **kwargs)

    def _begin_training(self) -> None:
        """Note that a step, or a further micro-batch of a step, begins."""
        step = self._context.engine.global_steps
        if self._last_step is None:
            self._last_step = step
        self._write_trained()
        self._began = self._began or time.time()
        if self._base is None:
            self._base_file.write_text(str(step))
            self._start_from(step)
        self._die_at("boundary")

    def _start_from(self, step: int) -> None:
        self._base = step
        self._stopping.replayed_step = step + self._plan.steps

    def _next_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a micro-batch; only the first and the last stage of a pipeline load them."""
        batch = original(*args, **kwargs)
        if self._context.engine.engine.module.training:  # type: ignore[attr-defined]  # a pipeline's
            self._batches.append(digest_tensors(batch))
        return batch

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._losses += scalars(loss)
        return original(loss, *args, **kwargs)

    def _aggregate_total_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the loss of a pipeline, which all its stages receive."""
        loss = original(*args, **kwargs)
        self._losses += scalars(loss)
        return loss

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._between("save")
        return result

    # -- writing -----------------------------------------------------------------------------------

    def after_step(self, original: Callable[..., Any]) -> Any:
        """Record the last step, before the original ``after_step``, which may end the process."""
        self._write_trained()
        return original()

    def _write_trained(self) -> None:
        """Write the record of the newest step, unless it was written before."""
        step = self._context.engine.global_steps
        if step == self._last_step:
            return
        self._last_step = step
        batches = {f"batch.{number}": batch for number, batch in enumerate(self._batches)}
        losses = {f"loss.{number}": loss for number, loss in enumerate(self._losses)}
        self.write(TRAINED, step=step, values={DATA: batches, LOSS: losses}, began=self._began)
        self._batches, self._losses, self._began = [], [], 0.0

    def captured(self, label: VersionId, images: LiveImages, encode: Encoded) -> None:
        """Record the state with which the next step begins. Called for every version."""
        block = encode()
        if isinstance(block, LateBlob):
            block.settle()
        state = DecodedBlob(bytes(block)).state
        values = defaultdict[str, dict[str, str]](dict)
        values[RATES] |= self._rates()
        for part, value in state.items():
            for key, text in digest_items(part, value):
                if not key.startswith(_NOT_COMPARED):
                    values[find_cause(key)][key] = text
        sections = (("replicated", images.replicated), ("owned", images.owned))
        for name, image in sections:
            values[WEIGHTS] |= dict(digest_image(name, image))
        self.write(STATE, step=label.step, values=values)

    def _rates(self) -> dict[str, str]:
        engine = self._context.engine
        optimizer = getattr(getattr(engine, "engine", engine), "optimizer", None)
        groups = getattr(optimizer, "param_groups", ())
        return {f"group{number}": repr(float(group["lr"])) for number, group in enumerate(groups)}

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps(
            {"event": event, "rank": self._rank, "life": self._memory.incarnation, **facts}
            | {"time": time.time()}
        )
        with self._path.open("a") as file:
            file.write(line + "\n")

    # -- the failure -------------------------------------------------------------------------------

    def _between(self, what: Where) -> None:
        """Record that the script evaluates or saves between two steps; die there if planned."""
        if self._base is not None:
            self.write(BETWEEN, what=what, step=self._context.engine.global_steps)
            self._die_at(what)

    def hold(self, original: Callable[[], None]) -> None:
        """Die, if planned, within a step: once the step's version is copied, before the optimizer
        step."""
        original()
        self._die_at("step")

    def _die_at(self, where: Where) -> None:
        """Die if the plan says so for this point and step.

        Only the last rank ever dies: in a pipeline, it is one that computes the loss.
        """
        plan, context = self._plan, self._context
        is_first_life = self._memory.incarnation == 1
        is_last_rank = self._rank == context.topology.degrees.world_size - 1
        if not (plan.kill_after and where == plan.kill_at and is_first_life and is_last_rank):
            return
        step = context.engine.global_steps
        assert self._base is not None
        if step != self._base + plan.kill_after:
            return
        # Wait for a commit, without which the job would start from scratch. Between two steps, the
        # version of the last step is not taken yet, so wait for the version before.
        self._await_commit(step if where == "step" else step - 1)
        memory_dir = str(context.job_dir.path)
        self.write(KILLED, step=step, committed=context.stats.committed_step, memory_dir=memory_dir)
        while plan.kills_node:
            time.sleep(1.0)  # `reft rehearse` kills all processes of this node
        os.kill(os.getpid(), signal.SIGKILL)

    def _await_commit(self, step: int) -> None:
        deadline, stats = time.monotonic() + _COMMIT_SECS, self._context.stats
        while (stats.committed_step or 0) < step and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)


class _Warnings(logging.Handler):
    """Records the warnings that reft logs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.write(SAID, text=record.getMessage())


def find_cause(key: str) -> str:
    """Return the kind of difference (one of CAUSES) for an item of the captured state."""
    if ".start." in key:  # States of the generators that chose the order of the data
        return GENERATORS
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in (2, 1))
    return next((_CAUSES[prefix] for prefix in prefixes if prefix in _CAUSES), HOST)


# -- digests ---------------------------------------------------------------------------------------


def digest_items(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Flatten nested mappings and short lists.

    Yields:
        The dotted name and the value of each item; a long value is replaced by a digest.
    """
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from digest_items(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple) and 0 < len(value) <= _MOST_ITEMS:
        for index, item in enumerate(value):
            yield from digest_items(f"{name}.{index}", item)
    else:
        yield name, digest(value)


def digest(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        if len(text) <= _MOST_CHARS:
            return text
    return f"#{checksum(codec.encode(value)):016x}"


def digest_image(section: str, image: SectionImage) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of every tensor of a section's image."""
    for spec, offset in zip(image.specs, image.offsets, strict=True):
        if spec.nbytes:
            (live,) = image.live(offset, offset + spec.nbytes)
            yield f"{section}.{spec.name}", f"#{checksum(live.cpu().numpy().data):016x}"


def digest_tensors(value: Any) -> str:
    """Return one digest over all tensors in nested containers, with their shapes and dtypes."""
    found = [[str(t.dtype), list(t.shape), t.detach().cpu()] for t in find_tensors(value)]
    return f"#{checksum(codec.encode(found)):016x}"


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from find_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)


def scalars(loss: Any) -> list[str]:
    """Return the exact values of all one-element tensors in a loss."""
    return [repr(t.item()) for t in find_tensors(loss) if t.numel() == 1]
