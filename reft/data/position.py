"""The data position: which samples the training has consumed (P8).

What is followed, and restored:

- an iterator for ``train_batch`` with ``state_dict`` and ``load_state_dict`` (torchdata's stateful
  protocol);
- an endless ``RepeatingLoader`` over a ``DataLoader`` for ``train_batch``, also DeepSpeed's own
  from ``training_data``;
- loaders that the script has made :func:`reft.resumable`;
- loaders of :func:`reft.data.loader`, whose position is that of the whole job.

A ``DataLoader`` that the script iterates over in a loop of its own is observed: the script must
skip to where it was, and that is checked. Everything else belongs into the client state. What is
not followed is reported at the first step (P12).
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
    SAYS_SO,
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
"""Key next to the positions: the random states are those before the script makes its next batch,
which it does before ``train_batch`` or the forward pass."""
BEGINS = "begins"  # key next to the positions: the script was about to begin a pass

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
    """Receives what the script reads between two steps: a session's ``StepBoundary``."""

    def mark(self) -> None: ...
    def begins_pass(self) -> None: ...
    def began_pass(self, read: PassReader) -> None: ...
    def before_read(self, read: PassReader) -> None: ...
    def evaluated(self, read: PassReader | None) -> None: ...


class DataPosition:
    """Follows the data that feeds an engine. Loaders are observed from now on.

    Args:
        engine: DeepSpeed's.
        replica: returns which replica it trains, and how many there are; None if that is not known.
    """

    def __init__(self, engine: Any, replica: Callable[[], tuple[int, int]] | None = None) -> None:
        self._engine = engine
        self._replica = replica
        self.why_equal = _explain_equal(engine)
        """Why all replicas train on equally many micro-batches of a step; None if they need not."""
        self.is_pipeline = hasattr(engine, "grid")
        self._thread = threading.get_ident()
        self._stateful: Any = None
        self._stateful_saved: Any = None
        self._source: Any = None  # what ``train_batch`` was given
        self._repeating = False
        self._inside = False
        self._read_inside = False  # the last ``train_batch`` read from a loader itself
        self.boundary: ReadListener | None = None
        """Receives the reads between two steps; None if nothing is captured."""
        self._upcoming: PassReader | None = None
        """The pass that the script is about to read, while the state before the read is captured.
        """
        self._is_marking = False  # the script marks a step, likewise
        self._begins: Any = None  # the loader that a pass is about to begin of, likewise
        self._maybe: list[PassReader] = []
        self._batches = 0
        self._micro_batches = 0
        self._datasets: set[int] = set()
        self._trained_loaders: dict[str, Any] = {}
        """Resumable loaders by name. The last version is taken when the variables of the script are
        gone."""
        self._elsewhere = self._ahead = False
        """Whether batches were read ahead by the script, or since the last version."""
        # a step trained on no batch that was read for it, unlike earlier steps
        self._unread = False
        # how much of a pass was trained on when the script left it; None: reported
        self._cut_off: str | None = ""
        self._said_unread = False
        self._goes_there = True  # batches that are read may be those that the script skips
        self._pass: PassReader | None = None
        self._known = False
        self._saved: Position | None = None
        self._lost: Position | None = None
        self._check: Position | None = None
        self._unmoved: dict[str, Any] | None = None
        """The captured position that was restored, until training reads on."""
        self.left_to_program = False  # a program keeps the position itself
        # a warning about what was restored, before training continues
        self._left: str | None = None
        WATCH.join(self)
        if self.is_pipeline:
            _watch_begun(getattr(engine, "data_iterator", None))

    def close(self) -> None:
        WATCH.leave(self)
        self._pass = self._source = None
        self._maybe.clear()
        self._trained_loaders.clear()

    def leave_to_program(self) -> None:
        """The program makes its loaders at the position that its client state holds."""
        self.left_to_program = WATCH.reopens = True

    def is_training(self) -> bool:
        return bool(self._engine.training) and torch.is_grad_enabled()

    def replica(self) -> tuple[int, int] | None:
        """Which replica this rank trains, and how many there are; None if that is not known."""
        return None if self._replica is None else self._replica()

    def step_samples(self) -> int | None:
        """Samples of a step of all replicas; None if that is not known."""
        return None if self._replica is None else int(self._engine.train_batch_size())

    # -- what training reads -----------------------------------------------------------------------

    def before_batch(self, one: PassReader) -> None:
        if (
            isinstance(one, LoaderIterator)
            and self._inside
            and self._repeating
            and self._saved is not None
        ):
            one.go_to(self._saved)
            self._saved = None

    def before_read(self, one: PassReader) -> None:
        """The next batch of a pass is about to be read. Its random numbers have not been drawn."""
        if self.boundary is not None and self._may_train(one.loader):
            self._upcoming = one
            try:
                self.boundary.before_read(one)
            finally:
                self._upcoming = None

    def begins_pass(self, loader: Any) -> None:
        one, of_step = self._pass, int(self._engine.gradient_accumulation_steps())
        if isinstance(one, LoaderIterator) and one.loader is loader and self._may_train(loader):
            length = find_length(loader)
            # A script that begins a pass for each step has no loop over passes.
            if length is not None and of_step < one.taken < length and self._cut_off == "":
                self._cut_off = f"{one.taken} of {length} batches"
        if self.boundary is not None and self._may_train(loader):
            self._begins = loader
            try:
                self.boundary.begins_pass()
            finally:
                self._begins = None

    def began_pass(self, one: PassReader) -> None:
        if self.boundary is not None and self._may_train(one.loader):
            self.boundary.began_pass(one)

    def _may_train(self, loader: Any) -> bool:
        """Whether the script reads ``loader`` itself, on the training thread, and may train on its
        batch: not ``train_batch``, a thread that reads ahead, or an evaluation."""
        if self._inside or self._read_inside or threading.get_ident() != self._thread:
            return False
        # A script may read the next batch before it ends an evaluation by engine.train().
        return self.is_training() or (self._pass is not None and self._pass.loader is loader)

    def read_to_train(self) -> PassReader | None:
        """The pass whose batch is about to be trained on; None if that is not known."""
        if self.is_pipeline:
            return None
        passes = _without_looks(self._maybe)
        return passes[-1] if passes else None

    def mark(self) -> None:
        """The script marks the beginning of the next step."""
        if self.boundary is not None:
            self._is_marking = True
            try:
                self.boundary.mark()
            finally:
                self._is_marking = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around ``eval_batch`` of a pipeline engine, which reads its batches itself."""
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside
            if self.boundary is not None:
                self.boundary.evaluated(None)

    def mode_set(self) -> None:
        """The script has called ``engine.train()`` or ``engine.eval()``: an evaluation by
        ``engine.module`` may have ended."""
        if self.boundary is not None and self._engine.training:
            self.boundary.evaluated(None)

    def after_batch(self, one: PassReader) -> None:
        if threading.get_ident() != self._thread:
            self._elsewhere = True  # read ahead by another thread: how far is not known
        elif self._inside:
            self._read_inside = True
            self._take([one])
            expected, self._saved = self._saved, None
            if expected is not None and not _is_behind(one, expected):
                self._lost = expected
        elif not self.is_pipeline:
            self._maybe.append(one)

    def _take(self, passes: list[PassReader]) -> None:
        for one in passes:
            if one.loader.dataset is not passes[-1].loader.dataset:
                continue  # an evaluation, read since the last step
            self._datasets.add(id(one.loader.dataset))
            self._batches += 1
            self._pass = one
            if one.follow is not None and (follow := one.follow()) is not None:
                self._trained_loaders[follow.__self__.name] = follow.__self__
            one.train()

    def orders(self, iterator: Any) -> Orders:
        """What this rank reads, to be compared with the other ranks; nothing on stages that read
        nothing.

        Args:
            iterator: what ``train_batch`` is given in its first step; None for a plain engine.
        """
        engine, replicas = self._engine, (self.replica() or (0, 1))[1]
        if self.is_pipeline and not (engine.is_first_stage() or engine.is_last_stage()):
            return {}
        found = LOADERS.orders(replicas)
        source = self._source_of(iterator)
        loader = self._maybe[-1].loader if self._maybe else None
        if loader is None and _is_repeating(source):
            # DeepSpeed's own repeats it too
            loader = getattr(source.loader, "dataloader", source.loader)
        facts = find_order(loader, replicas)
        return found if facts is None else {**found, "the DataLoader of the training": facts}

    def _source_of(self, iterator: Any) -> Any:
        return iterator if iterator is not None else getattr(self._engine, "data_iterator", None)

    def begin_batch(self, iterator: Any) -> None:
        """``train_batch`` was called with this iterator. A restored position is applied to
        it now."""
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
        """A plain engine computes.

        Returns:
            A warning if its data are not where they were.
        """
        passes, self._maybe = self._maybe, []
        if not training:
            # The last pass was evaluated. A batch that training has read before it is still to be
            # trained on.
            evaluated = passes[-1] if passes and passes[-1] is not self._pass else None
            self._maybe = list(dict.fromkeys(one for one in passes if one is not evaluated))
            if self.boundary is not None:
                self.boundary.evaluated(evaluated)
            return None
        passes = _without_looks(passes)
        if (
            self._goes_there
            and passes
            and passes[-1].follow is not None
            and passes.count(passes[-1]) > 1
        ):
            self._elsewhere = True  # nothing must be skipped there
        self._take(passes[-1:] if self._goes_there else passes)
        self._goes_there = False
        self._micro_batches += 1
        expected, self._check = self._check, None
        if expected is None or not passes or _is_behind(passes[-1], expected):
            return None
        return (
            f"the version was taken after batch {expected.taken} of a pass over the data, but the "
            f"script continues after batch {passes[-1].taken - 1}: from here on its losses differ "
            f"from those of the undisturbed run. Write{_LINES_PLAIN}"
        )

    def trains(self) -> None:
        """A step begins: the script has skipped to where it was, with all its engines."""
        WATCH.resuming = self._unmoved = None

    def leave_to_script(self) -> None:
        """The script itself goes to where the version was, random states included: nothing is
        changed or checked."""
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
            if not getattr(self._stateful, SAYS_SO, False):
                found[ITERATOR_OF] = class_path(self._stateful)
        if self._known and isinstance(self._pass, LoaderIterator):
            found["pass"] = dict(vars(self._position_of(self._pass)))
        return found | LOADERS.positions(self._upcoming, self._begins)

    def _position_of(self, trained: LoaderIterator) -> Position:
        """The position of the pass that is trained on, with the batch that the script is about to
        read."""
        if isinstance(self._upcoming, LoaderIterator) and self._upcoming.loader is trained.loader:
            return self._upcoming.position()
        if self._begins is trained.loader:
            return replace(trained.position(), evaluates=True)
        return trained.position()

    def _count_up(self) -> None:
        """A position is known if every micro-batch was one batch of one loader."""
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
        """Go to a captured position, now or as soon as the iterator is known."""
        self._left = state.get(LEFT)
        self._unmoved = state
        position = Position(**state["pass"]) if "pass" in state else None
        self._maybe.clear()
        self._goes_there = True
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

    # -- reports (P12) -----------------------------------------------------------------------------

    def left_behind(self) -> str | None:
        """What of the version's position was not restored, and what to write. Called before the
        first step."""
        left, self._left = self._left, None
        return left

    def found_on_the_way(self) -> str | None:
        """What shows only after the first step, and would make a recovery different; each once.
        Called after every step."""
        self._count_up()
        if self._cut_off:
            taken, self._cut_off = self._cut_off, None
            return (
                f"the script left a pass after {taken}, by a count of its own that no version "
                "holds: after a failure within a pass it counts from 0 again and stays longer in "
                "it. Let the loop end by engine.global_steps, or give the loader a sampler of as "
                "many samples"
            )
        if not self._unread or self._said_unread:
            return None
        self._said_unread = True
        return (
            "the script trains on, but no longer reads from the loader that it has read from: it "
            "keeps the batches of an earlier pass, as itertools.cycle does. After a failure it "
            "would keep those of another part of a pass, and train on others from then on. Write"
            """
    while engine.global_steps < steps:
        for batch in loader: ..."""
        )

    def advice(self) -> str | None:
        """What is not restored by itself, and the lines that change it; None if all of it is.
        Called after a step."""
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
        """Whether a loader that training reads keeps its position itself. Stages that read nothing
        count as well."""
        if isinstance(self._pass, LoaderIterator) or self._pass is None:
            reads = LOADERS.positions()
            return "resumable" in reads or (self._pass is None and "samples" in reads)
        return True

    def _advice_on_degrees(self) -> str | None:
        """Advice for a job whose number of replicas may change."""
        if isinstance(self._pass, LoaderIterator) and nodes_may_change():
            return explain_bound_data(self._pass.loader, int(self._engine.train_batch_size()))
        return None

    def _advice_for_loop(self) -> str | None:
        """Advice on what the script reads without a wrapper of reft."""
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
    own = getattr(source, "__qualname__", None)  # of a generator
    return f" ({kind.__name__} {own})" if own else f" ({class_path(source)})"


def _without_looks(passes: list[PassReader]) -> list[PassReader]:
    """The passes that were read since the last step, without those of which the script only looked
    at a batch.

    Of several passes over the loader that is trained on, the one counts whose iterator the script
    has kept. If it has kept several, the one that was trained on before; if none, the last.
    """
    last = passes[-1:]
    of_loader = [one for one in reversed(passes) if one.loader is last[0].loader]
    held = [one for one in of_loader if one.is_held] or of_loader[:1]
    found = max(held, key=lambda one: (one.counts, one.taken), default=None)
    others = [one for one in passes if found is not None and one.loader is not found.loader]
    return others + [one for one in passes if one is found]


def _is_behind(one: PassReader, expected: Position) -> bool:
    """Whether the batch just taken is the one that follows ``expected``."""
    begins = expected.complete or expected.evaluates
    return one.taken == expected.taken + 1 or (begins and one.taken == 1)


def _is_repeating(source: Any) -> bool:
    from deepspeed.runtime.dataloader import RepeatingLoader

    return isinstance(source, RepeatingLoader) and not is_shard(source.loader)


def _watch_begun(source: Any) -> None:
    """Observe a pass of a RepeatingLoader that was begun earlier, if nothing was taken of it."""
    if not _is_repeating(source):
        return
    loader, begun = source.loader, source.data_iter
    if isinstance(loader, DataLoader) and (one := _adopted(loader, begun)) is not None:
        source.data_iter = one
    inner = getattr(loader, "dataloader", None)
    frame = getattr(getattr(loader, "data", None), "gi_frame", None)
    # DeepSpeedDataLoader: ``data`` is a generator over its DataLoader's iterator.
    raw = frame.f_locals.get(".0") if frame is not None else None
    if (
        begun is loader
        and isinstance(inner, DataLoader)
        and (one := _adopted(inner, raw)) is not None
    ):
        loader.data = one


def _adopted(loader: Any, begun: Any) -> LoaderIterator | None:
    """A pass that was begun unobserved, if nothing was taken of it and its order is known: workers
    are given samples at once."""
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
