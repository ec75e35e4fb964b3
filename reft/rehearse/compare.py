"""Finds the differences between the records of two runs of a job, and advice on them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

DATA, GENERATORS, RATES, CLIENT, HOST = (
    "data",
    "generators",
    "learning rate",
    "client state",
    "host state",
)
LOSS, WEIGHTS, STEPS = "loss", "weights", "steps"
CAUSES = (STEPS, DATA, GENERATORS, RATES, CLIENT, HOST, LOSS, WEIGHTS)
"""Kinds of differences, in order: of two differences in one step, the kind that comes earlier here
is more likely the cause of the other."""
TRAINED, STATE = "trained", "state"

# Recorded values by cause (one of CAUSES) and key: the value if it is short, otherwise its digest
Values = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class ComparedStep:
    """What one rank recorded at one step: its inputs (TRAINED), or the state after it (STATE).

    A state that was restored rather than computed is recorded, too.
    """

    kind: str  # TRAINED or STATE
    rank: int
    life: int  # Number of the job's start: 1 until the first failure
    step: int
    values: Values


@dataclass(frozen=True)
class Difference:
    step: int
    rank: int
    cause: str  # Kind of difference, one of CAUSES
    key: str  # Name of the value that differs
    expected: str | None  # Value in the undisturbed run; None if it has no such value
    found: str | None  # Value in the other run; None if it has no such value

    def __str__(self) -> str:
        if self.cause == STEPS:
            return f"step {self.step}, rank {self.rank}: {self.key}"
        found, expected = (
            "nothing" if value is None else value for value in (self.found, self.expected)
        )
        return (
            f"step {self.step}, rank {self.rank}: {self.cause}: {self.key}: {found} instead of "
            f"{expected}"
        )


def compare(
    expected: Iterable[ComparedStep],
    found: Iterable[ComparedStep],
    but: Collection[tuple[str, str]] = (),
    *,
    partial: bool = False,
) -> list[Difference]:
    """Return all differences between two runs, ordered by step and then by cause.

    If the other run has several records of a step (trained twice, or trained and restored), each
    has to be equal to the undisturbed run's.

    Args:
        expected: records of the undisturbed run.
        found: records of the other run.
        but: pairs of cause and key that are not compared.
        partial: whether these are the records of one node of several. A rank may then have moved to
            another node between the runs, so a record that only one run has is no difference.
    """
    reference = {(r.kind, r.rank, r.step): r for r in expected}
    missing = set(reference)
    differences: list[Difference] = []
    for record in found:
        at = record.kind, record.rank, record.step
        missing.discard(at)
        if at in reference:
            differences += _read_record(reference[at], record)
        else:
            what = f"{record.kind}, but not in the undisturbed run"
            differences.append(Difference(record.step, record.rank, STEPS, what, None, ""))
    for kind, rank, step in missing:
        differences.append(Difference(step, rank, STEPS, f"not {kind}", "", None))
    # Remove duplicates: a step that was repeated may differ in the same way each time.
    unique = dict.fromkeys(
        one
        for one in differences
        if (one.cause, one.key) not in but and not (partial and one.cause == STEPS)
    )
    return sorted(unique, key=_order)


def _read_record(expected: ComparedStep, found: ComparedStep) -> Iterator[Difference]:
    for cause in dict.fromkeys([*expected.values, *found.values]):
        before, after = expected.values.get(cause, {}), found.values.get(cause, {})
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                yield Difference(
                    found.step, found.rank, cause, key, before.get(key), after.get(key)
                )


def _order(difference: Difference) -> tuple[int, int, int, str]:
    return difference.step, CAUSES.index(difference.cause), difference.rank, difference.key


def split_unsteady(
    differences: Sequence[Difference],
) -> tuple[list[Difference], set[tuple[str, str]]]:
    """Separate differences in random generators from others, for two undisturbed runs.

    Generators that the script neither seeds nor draws from, such as NumPy's, differ in every
    process and have no effect. So if nothing else differs, their states need not be compared.

    Returns:
        The differences in anything else; and cause and key of the generator states that differ.
    """
    others = [one for one in differences if one.cause != GENERATORS]
    return others, {(one.cause, one.key) for one in differences if one.cause == GENERATORS}


_ADVICE = {
    DATA: (
        "after the failure other samples were trained on. Let reft keep the position: loader = "
        "reft.resumable(loader) after deepspeed.initialize, and before the first step "
        "engine.load_checkpoint(save_dir) or reft.resume(engine). A data set with its own state, "
        "or a generator that draws samples, belongs into reft.attach(engine, state={...}) "
        "(docs/data.md)"
    ),
    GENERATORS: (
        "a generator was not restored to its state. reft restores those of Python, NumPy, torch "
        "and the device; pass other ones with "
        'reft.attach(engine, state={"rng": generator}), and draw nothing between '
        "load_checkpoint and the first step that the undisturbed run does not draw there"
    ),
    RATES: (
        "a learning rate was not restored. Give the scheduler to DeepSpeed (lr_scheduler=... of "
        'deepspeed.initialize), or write reft.attach(engine, state={"scheduler": scheduler})'
    ),
    CLIENT: (
        "the state that client_state or state={...} of reft.attach returned was not restored: use "
        "what load_checkpoint returns as client state, before the first step"
    ),
    HOST: (
        "engine state that reft restores was changed by the script, or built differently at the "
        "restart. Build it in the same way at every start, or pass its owner with "
        "reft.attach(engine, state={...})"
    ),
    LOSS: (
        "batch, generators and rates are equal, but the step computed something else: it depends "
        "on state that reft does not know, such as a global variable, an attribute of the model, a "
        "file, or a library with its own generator. Pass its owner with "
        'reft.attach(engine, state={"name": owner}), or let client_state return it and set it '
        "from what load_checkpoint returns"
    ),
    STEPS: "",
}
_ADVICE[WEIGHTS] = _ADVICE[LOSS]


def advise(first: Difference) -> str:
    """Return advice on the first difference after a failure; empty if there is no advice."""
    return _ADVICE[first.cause]


_UNSTEADY = {
    DATA: "seed the choice of samples",
    GENERATORS: "seed every generator that the script draws from, in the same way at every start",
    RATES: "the learning rate depends on the time or on something else that is not seeded",
    CLIENT: "client_state returns values that differ in every run, such as the time: omit them",
    HOST: "it depends on something that differs in every run",
    LOSS: (
        "the step uses unseeded randomness (os.urandom, the time), or computes in an order that "
        "changes: try torch.use_deterministic_algorithms(True)"
    ),
    STEPS: "the runs end after different steps",
}
_UNSTEADY[WEIGHTS] = _UNSTEADY[LOSS]


def advise_unsteady(first: Difference) -> str:
    """Return advice on the first difference between two undisturbed runs."""
    return _UNSTEADY[first.cause]


def repeated_steps(found: Sequence[ComparedStep]) -> list[int]:
    """Return the steps that any rank trained more than once."""
    made = Counter((record.rank, record.step) for record in found if record.kind == TRAINED)
    return sorted({step for (_, step), times in made.items() if times > 1})
