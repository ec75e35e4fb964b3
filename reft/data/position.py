"""The data position: which samples the training has consumed (P8).

reft follows and restores the position in:

- an iterator for ``train_batch`` with ``state_dict`` and ``load_state_dict`` (torchdata's stateful
  protocol);
- an endless ``RepeatingLoader`` over a ``DataLoader`` for ``train_batch``, including DeepSpeed's
  own from ``training_data``;
- loaders that the script has made :func:`reft.resumable`;
- loaders of :func:`reft.data.loader`, whose position is that of the whole job.

A ``DataLoader`` that the script iterates over in its own loop is only observed: after a restart
the script itself must skip to the position, and reft checks that it does. Any other position has
to be part of the script's client state. Data that is not followed is reported at the first step
(P12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from reft.data.accelerate import DISPATCHED, is_dispatched, is_shard
from reft.data.comparison import Orders
from reft.data.degrees import (
    ITERATOR_OF,
    LEFT,
    LINES_OWN,
    POSITION_OF_JOB,
    explain_bound_data,
    explain_bound_iterator,
    nodes_may_change,
)
from reft.data.passes import (
    LoaderIterator,
    PassReader,
    Position,
    capture_start,
    described,
    find_length,
    find_order,
    iterates_itself,
    reads_lazily,
)
from reft.data.resumable import LOADERS
from reft.data.watch import WATCH, ResumePhase
from reft.state.codec import class_path

READ_BY_SCRIPT = "read_by_script"
"""Key of a flag, which is stored next to the positions. True if the script makes its batches
itself, before ``train_batch`` or the forward pass; the version's random states are then those
before it makes its next batch."""
BEGINS = "begins"  # Key of a flag, next to the positions: the script was about to begin a pass

_LINES_PLAIN = """
    loader = reft.resumable(loader)
    for epoch in range(loader.epoch, epochs):    # after engine.load_checkpoint(save_dir)
        for batch in loader: ..."""
_LINES_PIPELINE = """
    engine.train_batch(data_iter)    # data_iter = iter(deepspeed.utils.RepeatingLoader(loader))"""
_LINES_STATE = """
    reft.attach(engine, client_state=lambda: {"position": ...})
    _, client_state = engine.load_checkpoint(save_dir)    # and go there"""

_AHEAD = (
    "the script reads the resumable loader ahead of training: after a failure the batches in "
    "between would be skipped. Take a batch from the loader only when it is trained on; "
    "DataLoader's worker processes prefetch by themselves. Skip no batches either: the loader "
    "continues after those that were trained on"
)


class ReadListener(Protocol):
    """Receives the script's reads between two steps; implemented by ``StepBoundary``."""

    def mark(self) -> None: ...
    def begins_pass(self) -> None: ...
    def began_pass(self, read: PassReader) -> None: ...
    def before_read(self, read: PassReader) -> None: ...
    def evaluated(self, read: PassReader | None) -> None: ...


class DataPosition:
    """Follows the data that feeds an engine. Observes all loaders as soon as it is constructed.

    Args:
        engine: DeepSpeed's engine.
        replica: returns the index of this rank's replica and the number of replicas; None if
            unknown.

    Attributes:
        why_equal: reason why all replicas must train on the same number of micro-batches in a
            step; None if they need not.
        is_pipeline: whether the engine is a pipeline engine.
        boundary: receives the script's reads between two steps; None if no host state is
            captured.
        left_to_program: whether the training program stores and restores its position itself.
    """

    def __init__(self, engine: Any, replica: Callable[[], tuple[int, int]] | None = None) -> None:
        self._engine = engine
        self._replica = replica
        self.why_equal = _explain_equal(engine)
        self.is_pipeline = hasattr(engine, "grid")
        self._thread = threading.get_ident()
        self._stateful: Any = None
        self._stateful_saved: Any = None
        self._source: Any = None  # Argument of the last ``train_batch`` call
        self._repeating = False
        self._inside = False
        self._read_inside = False  # Whether the last ``train_batch`` call has read from a loader
        self.boundary: ReadListener | None = None
        # The next three are set only while host state is captured. The pass that the script is
        # about to read; None if it is not about to read
        self._upcoming: PassReader | None = None
        # Whether the script marks the beginning of a step (``reft.begin_step``)
        self._is_marking = False
        # The loader of which the script is about to begin a pass; None for none
        self._begins: Any = None
        # Passes over loaders from which the script has read since the last step, one entry for each
        # batch
        self._reads: list[PassReader] = []
        self._batches = 0
        self._micro_batches = 0
        self._datasets: set[int] = set()
        # Resumable loaders by name. These references keep the loaders alive for the last
        # version, which is taken when the script's variables are gone.
        self._trained_loaders: dict[str, Any] = {}
        self._elsewhere = False  # Whether another thread has read batches for the script
        self._ahead = False  # Whether the script has read batches ahead since the last version
        # Whether a step, unlike earlier ones, was trained without a batch from a loader
        self._unread = False
        # How much of a pass over a loader was trained on when the script left the pass, as text; ""
        # if the script has left no pass early; None after that was reported
        self._left_pass: str | None = ""
        self._reported_unread = False
        self._may_skip = (
            # Whether the script may still be skipping batches to return to the version's
            # position
            True
        )
        self._pass: PassReader | None = None
        self._known = False
        self._saved: Position | None = None
        self._lost: Position | None = None
        self._check: Position | None = None
        # The restored position, until training reads; then None
        self._unmoved: dict[str, Any] | None = None
        self.left_to_program = False
        # A warning about the restored position, which is logged before training continues; None for
        # none
        self._left: str | None = None
        WATCH.join(self)
        if self.is_pipeline:
            _watch_begun(getattr(engine, "data_iterator", None))

    def close(self) -> None:
        WATCH.leave(self)
        self._pass = self._source = None
        self._reads.clear()
        self._trained_loaders.clear()

    def leave_to_program(self) -> None:
        """Neither store nor restore the position, because the program's client state holds it."""
        self.left_to_program = WATCH.reopens = True

    def is_training(self) -> bool:
        return bool(self._engine.training) and torch.is_grad_enabled()

    def replica(self) -> tuple[int, int] | None:
        """Return the index of this rank's replica and the number of replicas; None if unknown."""
        return None if self._replica is None else self._replica()

    def step_samples(self) -> int | None:
        """Return the number of samples that all replicas together read in a step; None if
        unknown."""
        return None if self._replica is None else int(self._engine.train_batch_size())

    def epoch_batches(self) -> int:
        """Return the number of batches of the pass that training reads; 0 if unknown."""
        reader = self._pass
        if reader is None:
            return 0
        follow = None if reader.follow is None else reader.follow()
        return find_length(reader.loader if follow is None else follow.__self__) or 0

    # -- the reads of training ---------------------------------------------------------------------

    def before_batch(self, reader: PassReader) -> None:
        if (
            isinstance(reader, LoaderIterator)
            and self._inside
            and self._repeating
            and self._saved is not None
        ):
            reader.go_to(self._saved)
            self._saved = None

    def before_read(self, reader: PassReader) -> None:
        """Capture the state before a batch is read and its random numbers are drawn."""
        if self.boundary is not None and self._may_train(reader.loader):
            self._upcoming = reader
            try:
                self.boundary.before_read(reader)
            finally:
                self._upcoming = None

    def begins_pass(self, loader: Any) -> None:
        reader, of_step = self._pass, int(self._engine.gradient_accumulation_steps())
        if (
            isinstance(reader, LoaderIterator)
            and reader.loader is loader
            and self._may_train(loader)
        ):
            length = find_length(loader)
            # If the script begins a pass for each step, it leaves passes early on purpose.
            if length is not None and of_step < reader.taken < length and self._left_pass == "":
                self._left_pass = f"{reader.taken} of {length} batches"
        if self.boundary is not None and self._may_train(loader):
            self._begins = loader
            try:
                self.boundary.begins_pass()
            finally:
                self._begins = None

    def began_pass(self, reader: PassReader) -> None:
        if self.boundary is not None and self._may_train(reader.loader):
            self.boundary.began_pass(reader)

    def _may_train(self, loader: Any) -> bool:
        """Return whether the script itself, now, reads ``loader`` and may train on the batch.

        This excludes reads in ``train_batch``, in a thread that reads ahead, and in evaluations.
        """
        if self._inside or self._read_inside or threading.get_ident() != self._thread:
            return False
        # A script may read the next batch before engine.train() ends an evaluation.
        return self.is_training() or (self._pass is not None and self._pass.loader is loader)

    def read_to_train(self) -> PassReader | None:
        """Return the pass over a loader whose batch is about to be trained on; None if unknown."""
        if self.is_pipeline:
            return None
        passes = _without_looks(self._reads)
        return passes[-1] if passes else None

    def mark(self) -> None:
        """Capture the host state when the script marks the beginning of the next step."""
        if self.boundary is not None:
            self._is_marking = True
            try:
                self.boundary.mark()
            finally:
                self._is_marking = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Note that a pipeline engine's ``eval_batch`` runs in the ``with`` block and reads its
        own batches."""
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside
            if self.boundary is not None:
                self.boundary.evaluated(None)

    def mode_set(self) -> None:
        """Called after ``engine.train()`` and ``engine.eval()``, which may end an evaluation."""
        if self.boundary is not None and self._engine.training:
            self.boundary.evaluated(None)

    def after_batch(self, reader: PassReader) -> None:
        if threading.get_ident() != self._thread:
            self._elsewhere = True  # Another thread reads ahead, by an unknown number of batches
        elif self._inside:
            self._read_inside = True
            self._take([reader])
            expected, self._saved = self._saved, None
            if expected is not None and not _follows(reader, expected):
                self._lost = expected
        elif not self.is_pipeline:
            self._reads.append(reader)

    def _take(self, passes: list[PassReader]) -> None:
        for reader in passes:
            if reader.loader.dataset is not passes[-1].loader.dataset:
                continue  # Read by an evaluation since the last step
            self._datasets.add(id(reader.loader.dataset))
            self._batches += 1
            self._pass = reader
            if reader.follow is not None and (follow := reader.follow()) is not None:
                self._trained_loaders[follow.__self__.name] = follow.__self__
            reader.train()

    def orders(self, iterator: Any) -> Orders:
        """Return the orders in which this rank reads, for comparison with the other ranks.

        Args:
            iterator: the argument of ``train_batch`` in its first step; None for a plain engine.

        Returns:
            Facts by loader; empty on stages that read nothing.
        """
        engine, replicas = self._engine, (self.replica() or (0, 1))[1]
        if self.is_pipeline and not (engine.is_first_stage() or engine.is_last_stage()):
            return {}
        found = LOADERS.orders(replicas)
        source = self._source_of(iterator)
        loader = self._reads[-1].loader if self._reads else None
        if loader is None and _is_repeating(source):
            # source.loader may be DeepSpeed's wrapper; torch's DataLoader is then its attribute
            # dataloader.
            loader = getattr(source.loader, "dataloader", source.loader)
        facts = find_order(loader, replicas)
        return found if facts is None else {**found, "the DataLoader of the training": facts}

    def _source_of(self, iterator: Any) -> Any:
        return iterator if iterator is not None else getattr(self._engine, "data_iterator", None)

    def begin_batch(self, iterator: Any) -> None:
        """Handle a call of ``train_batch``: apply a restored position to its iterator."""
        if all(
            callable(getattr(iterator, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            self._stateful = iterator
            self._apply_stateful()
        self._read_inside = self._stateful is not None
        source = self._source_of(iterator)
        self._source, self._repeating = source, _is_repeating(source)
        _watch_begun(source)
        self._micro_batches += int(self._engine.gradient_accumulation_steps())
        self._inside = True

    def end_batch(self) -> None:
        self._inside = False

    def forward(self, *, training: bool) -> str | None:
        """Handle the forward pass of a plain engine.

        Returns:
            A warning if the script has not skipped to the position of the version, otherwise
            None.
        """
        passes, self._reads = self._reads, []
        if not training:
            # The last pass over a loader was read by an evaluation. A batch that was read before
            # the evaluation, for training, is still to be trained on.
            evaluated = passes[-1] if passes and passes[-1] is not self._pass else None
            self._reads = list(
                dict.fromkeys(reader for reader in passes if reader is not evaluated)
            )
            if self.boundary is not None:
                self.boundary.evaluated(evaluated)
            return None
        passes = _without_looks(passes)
        if (
            self._may_skip
            and passes
            and passes[-1].follow is not None
            and passes.count(passes[-1]) > 1
        ):
            # The script has skipped batches of a loader that reft has positioned already
            self._elsewhere = True
        self._take(passes[-1:] if self._may_skip else passes)
        self._may_skip = False
        self._micro_batches += 1
        expected, self._check = self._check, None
        if expected is None or not passes or _follows(passes[-1], expected):
            return None
        return (
            f"the version was taken after batch {expected.taken} of a pass over the data, but the "
            f"script continues after batch {passes[-1].taken - 1}: from here on its losses differ "
            f"from those of the undisturbed run. Write{_LINES_PLAIN}"
        )

    def trains(self) -> None:
        """Handle the beginning of the first step: the script has skipped to its position in all
        its engines."""
        WATCH.resuming = self._unmoved = None

    def leave_to_script(self) -> None:
        """Neither change nor check anything, because the script restores position and random
        states itself."""
        WATCH.resuming = self._unmoved = self._saved = self._check = None

    # -- versions ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        if self.left_to_program:
            return {}
        if self._unmoved is not None:
            return self._unmoved
        self._count_up()
        found: dict[str, Any] = {}
        reads = self._upcoming is not None or self._begins is not None
        if self._is_marking or (self.is_pipeline and reads):
            found[READ_BY_SCRIPT] = True
        if self._begins is not None:
            found[BEGINS] = True
        if self._stateful is not None:
            found["iterator"] = self._stateful.state_dict()
            if not getattr(self._stateful, POSITION_OF_JOB, False):
                found[ITERATOR_OF] = class_path(self._stateful)
        if self._known and isinstance(self._pass, LoaderIterator):
            found["pass"] = dict(vars(self._position_of(self._pass)))
        return found | LOADERS.positions(self._upcoming, self._begins)

    def _position_of(self, trained: LoaderIterator) -> Position:
        """Return the position, in the pass that training reads, before the batch that is read
        next."""
        if isinstance(self._upcoming, LoaderIterator) and self._upcoming.loader is trained.loader:
            return self._upcoming.position()
        if self._begins is trained.loader:
            return replace(trained.position(), evaluates=True)
        return trained.position()

    def _count_up(self) -> None:
        """Determine again whether the position is known. It is known only if every micro-batch
        since the last version was one batch of the same loader."""
        if self._micro_batches:
            if not (self._batches or self._pass is None or self.left_to_program):
                self._unread = True
            self._ahead = self._elsewhere or self._batches > self._micro_batches
            one_each = self._batches == self._micro_batches and len(self._datasets) == 1
            itself = self._pass is not None and iterates_itself(self._pass.loader)
            itself = itself or is_dispatched()
            self._known = one_each and not self._ahead and not itself
            self._batches = self._micro_batches = 0
            self._datasets.clear()

    def restore(self, state: dict[str, Any], rng: dict[str, Any] | None) -> None:
        """Move to a captured position, now or as soon as the iterator is known."""
        self._left = state.get(LEFT)
        self._unmoved = state
        position = Position(**state["pass"]) if "pass" in state else None
        self._reads.clear()
        self._may_skip = True
        self._batches = self._micro_batches = 0
        if rng is not None:
            begins = bool(state.get(BEGINS))
            WATCH.resuming = ResumePhase(position, rng, self.is_training, begins=begins)
        self._saved, self._check = (position, None) if self.is_pipeline else (None, position)
        LOADERS.restore(state)
        if "iterator" in state:
            self._stateful_saved = state["iterator"]
            self._apply_stateful()

    def _apply_stateful(self) -> None:
        if self._stateful is not None and self._stateful_saved is not None:
            self._stateful.load_state_dict(self._stateful_saved)
            self._stateful_saved = None

    def epochs(self) -> int | None:
        """Return how many passes over the training data have ended after the last step.

        Returns:
            The number; None if training reads no loader that keeps its position itself.
        """
        loaders = self._trained_loaders.values()
        return max((loader.ended_epochs() for loader in loaders), default=None)

    # -- reports (P12) -----------------------------------------------------------------------------

    def left_behind(self) -> str | None:
        """Describe positions that were not restored, and what to write in the script. Called
        before the first step."""
        left, self._left = self._left, None
        return left

    def found_on_the_way(self) -> str | None:
        """Describe problems that would make a recovery differ and that show only during
        training. Each is reported once.

        Called after every step.
        """
        self._count_up()
        if self._left_pass:
            taken, self._left_pass = self._left_pass, None
            return (
                f"the script left a pass after {taken}, by a count of its own that no version "
                "holds: after a failure within a pass it counts from 0 again and stays longer in "
                "it. Let the loop end by engine.global_steps, or give the loader a sampler of as "
                "many samples"
            )
        if not self._unread or self._reported_unread:
            return None
        self._reported_unread = True
        return (
            "the script trains on, but no longer reads from the loader that it has read from: it "
            "keeps the batches of an earlier pass, as itertools.cycle does. After a failure it "
            "would keep those of another part of a pass, and train on others from then on. Write"
            """
    while engine.global_steps < steps:
        for batch in loader: ..."""
        )

    def advice(self) -> str | None:
        """Describe what reft would not restore, and the lines of code that change this; None if
        there is nothing to report.

        Called after a step.
        """
        self._count_up()
        lost, self._lost = self._lost or self._saved, None
        if lost is not None:
            self._saved = None
            return (
                f"the version was taken after batch {lost.taken} of a pass over the data, but "
                "train_batch was given other data: from here on the losses differ from those of "
                f"the undisturbed run. Write{_LINES_PIPELINE}"
            )
        if self.left_to_program:
            return None
        if self._stateful is not None:
            return explain_bound_iterator(self._stateful)
        if is_dispatched():
            return f"the script trains from {DISPATCHED}"
        if self.comes_back():
            return LOADERS.wrong() or (_AHEAD if self._ahead else None) or self._advice_on_degrees()
        return self._advice_for_loop()

    def comes_back(self) -> bool:
        """Return whether a loader that training reads keeps its position itself.

        Also true on pipeline stages that read no data.
        """
        if isinstance(self._pass, LoaderIterator) or self._pass is None:
            reads = LOADERS.positions()
            return "resumable" in reads or (self._pass is None and "samples" in reads)
        return True

    def _advice_on_degrees(self) -> str | None:
        """Return advice for a job whose number of replicas may change."""
        if isinstance(self._pass, LoaderIterator) and nodes_may_change():
            return explain_bound_data(self._pass.loader, int(self._engine.train_batch_size()))
        return None

    def _advice_for_loop(self) -> str | None:
        """Return advice for a script that reads its loader without one of reft's wrappers."""
        if self._known and self._pass is not None:
            if self.is_pipeline and self._repeating:
                return self._advice_on_degrees()
            lines = _LINES_PIPELINE if self.is_pipeline else _LINES_PLAIN
            return (
                f"the script iterates over its DataLoader ({described(self._pass.loader)}) in its "
                "own loop. After a failure the script has to find its position itself, or it "
                f"trains on other samples; to let reft do that, write{lines}"
            )
        loader = _LINES_PIPELINE if self.is_pipeline else _LINES_PLAIN
        return (
            "the position in the data is not known: the data does not come from one "
            f"DataLoader{_named(self._source)}. After a failure the job continues with other data, "
            f"unless batches follow from engine.global_steps. Write{LINES_OWN}{loader}\nor keep "
            f"the position yourself:{_LINES_STATE}"
        )


def _explain_equal(engine: Any) -> str | None:
    if hasattr(engine, "grid"):
        return "the stages of a pipeline run a fixed number of micro-batches"
    stage = getattr(engine, "zero_optimization_stage", int)()
    return f"ZeRO-{stage} sends gradients with every micro-batch" if stage > 1 else None


def _named(source: Any) -> str:
    if source is None:
        return ""
    if _is_repeating(source):
        return f" (RepeatingLoader over {_named(source.loader).strip(' ()')})"
    kind = type(source)
    # Name of the function, if ``source`` is a generator
    own = getattr(source, "__qualname__", None)
    return f" ({kind.__name__} {own})" if own else f" ({class_path(source)})"


def _without_looks(passes: list[PassReader]) -> list[PassReader]:
    """Remove passes of which the script only looked at a batch since the last step.

    Of several passes over the loader that is trained on, training uses the pass whose iterator
    the script still holds; of several such passes, the one trained on before; if the script
    holds none, the last pass.
    """
    last = passes[-1:]
    of_loader = [reader for reader in reversed(passes) if reader.loader is last[0].loader]
    held = [reader for reader in of_loader if reader.is_held] or of_loader[:1]
    found = max(held, key=lambda reader: (reader.counts, reader.taken), default=None)
    others = [
        reader for reader in passes if found is not None and reader.loader is not found.loader
    ]
    return others + [reader for reader in passes if reader is found]


def _follows(reader: PassReader, expected: Position) -> bool:
    """Return whether the batch just taken is the one that follows ``expected``."""
    begins = expected.complete or expected.evaluates
    return reader.taken == expected.taken + 1 or (begins and reader.taken == 1)


def _is_repeating(source: Any) -> bool:
    from deepspeed.runtime.dataloader import RepeatingLoader

    return isinstance(source, RepeatingLoader) and not is_shard(source.loader)


def _watch_begun(source: Any) -> None:
    """Observe the pass that a RepeatingLoader has already begun, if nothing was taken from it."""
    if not _is_repeating(source):
        return
    loader, begun = source.loader, source.data_iter
    if isinstance(loader, DataLoader) and (reader := _adopted(loader, begun)) is not None:
        source.data_iter = reader
    inner = getattr(loader, "dataloader", None)
    frame = getattr(getattr(loader, "data", None), "gi_frame", None)
    # In a DeepSpeedDataLoader, ``data`` is a generator over the DataLoader's iterator.
    raw = frame.f_locals.get(".0") if frame is not None else None
    if (
        begun is loader
        and isinstance(inner, DataLoader)
        and (reader := _adopted(inner, raw)) is not None
    ):
        loader.data = reader


def _adopted(loader: Any, begun: Any) -> LoaderIterator | None:
    """Wrap a pass whose beginning was not observed.

    Returns:
        The iterator; None if something was taken from the pass, or its order is unknown because
        workers were already given their samples.
    """
    is_told = reads_lazily(loader) or isinstance(
        loader.sampler, SequentialSampler | DistributedSampler
    )
    if (
        isinstance(begun, LoaderIterator)
        or getattr(begun, "_num_yielded", None) != 0
        or not is_told
    ):
        return None
    return LoaderIterator(loader, begun, capture_start(loader), WATCH, adopted=True)
