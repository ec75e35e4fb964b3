"""What differed first, and where, from records alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from reft.rehearse.compare import (
    CAUSES,
    CLIENT,
    DATA,
    GENERATORS,
    HOST,
    LOSS,
    RATES,
    STATE,
    STEPS,
    TRAINED,
    WEIGHTS,
    ComparedStep,
    Difference,
    advise,
    advise_unsteady,
    compare,
    repeated_steps,
    split_unsteady,
)

OF_TRAINING = {DATA: {"batch.0": "#b"}, LOSS: {"loss.0": "0.5"}}
OF_STATE = {
    DATA: {"data.pass.taken": "3"},
    GENERATORS: {"rng.torch": "#t", "rng.numpy.1": "#n"},
    RATES: {"group0": "0.1"},
    CLIENT: {"client.counter": "3"},
    HOST: {"engine.micro_steps": "3"},
    WEIGHTS: {"replicated.weight": "#w"},
}


def run(steps: int = 4, ranks: int = 2, life: int = 1, first: int = 1) -> list[ComparedStep]:
    return [
        ComparedStep(kind, rank, life, step, values)
        for step in range(first, steps + 1)
        for rank in range(ranks)
        for kind, values in ((TRAINED, OF_TRAINING), (STATE, OF_STATE))
    ]


def changed(
    records: list[ComparedStep], at: Mapping[str, object], cause: str, key: str, value: str
) -> list[ComparedStep]:
    """With another value in the records that have these attributes."""

    def change(record: ComparedStep) -> ComparedStep:
        if cause not in record.values or any(
            getattr(record, name) != wanted for name, wanted in at.items()
        ):
            return record
        return replace(
            record, values={**record.values, cause: {**record.values[cause], key: value}}
        )

    return [change(record) for record in records]


def test_equal_runs_have_no_differences() -> None:
    assert compare(run(), run()) == []


def test_a_killed_run_repeats_steps_and_restores_states() -> None:
    restored = [r for r in run(life=2, first=2, steps=2) if r.kind == STATE]
    killed = run(steps=2) + restored + run(life=2, first=2)
    assert compare(run(), killed) == []
    assert repeated_steps(killed) == [2]


@pytest.mark.parametrize("life", [1, 2])
def test_a_step_that_was_made_twice_has_to_be_equal_both_times(life: int) -> None:
    killed = changed(
        run(steps=2) + run(life=2, first=2), {"step": 2, "life": life}, LOSS, "loss.0", "0.75"
    )
    assert compare(run(), killed)[0] == Difference(2, 0, LOSS, "loss.0", "0.5", "0.75")


def test_a_restored_state_is_compared_with_the_state_of_its_step() -> None:
    restored = changed(
        run(life=2, first=3, steps=3), {"rank": 1, "kind": STATE}, RATES, "group0", "0.2"
    )
    (difference,) = compare(run(), run() + [r for r in restored if r.kind == STATE])
    assert str(difference) == "step 3, rank 1: learning rate: group0: 0.2 instead of 0.1"


def test_the_first_difference_is_of_the_first_step_and_there_in_the_order_of_causes() -> None:
    found = run()
    for cause, key in (
        (WEIGHTS, "replicated.weight"),
        (CLIENT, "client.counter"),
        (RATES, "group0"),
    ):
        found = changed(found, {"step": 3}, cause, key, "other")
    found = changed(found, {"step": 4, "kind": STATE}, DATA, "data.pass.taken", "other")
    differences = compare(run(), found)
    assert [(one.step, one.cause) for one in differences[::2]] == [
        *((3, RATES), (3, CLIENT), (3, WEIGHTS)),
        (4, DATA),
    ]


def test_batches_come_before_generators_and_the_loss_before_weights() -> None:
    order = [DATA, GENERATORS, RATES, CLIENT, HOST, LOSS, WEIGHTS]
    assert [cause for cause in CAUSES if cause in order] == order


def test_values_that_only_one_run_has_differ() -> None:
    found = changed(run(), {"step": 2, "rank": 0}, HOST, "adapter.new", "7")
    assert [str(one) for one in compare(run(), found)] == [
        "step 2, rank 0: host state: adapter.new: 7 instead of nothing"
    ]
    assert [str(one) for one in compare(found, run())] == [
        "step 2, rank 0: host state: adapter.new: nothing instead of 7"
    ]


def test_missing_and_further_steps_differ() -> None:
    missing = compare(run(steps=4), run(steps=3))
    assert {(one.step, one.cause, one.key) for one in missing} == {
        (4, STEPS, "not state"),
        (4, STEPS, "not trained"),
    }
    further = compare(run(steps=3), run(steps=4))
    assert {(one.step, one.cause) for one in further} == {(4, STEPS)}


def test_a_rank_that_has_moved_to_another_node_is_no_difference() -> None:
    here = [r for r in run() if r.rank == 0]
    moved = [r for r in run() if r.rank == (1 if r.step > 2 else 0)]
    assert {one.cause for one in compare(here, moved)} == {STEPS}
    assert compare(here, moved, partial=True) == []
    other = changed(moved, {"step": 2}, RATES, "group0", "0.2")
    assert {one.cause for one in compare(here, other, partial=True)} == {RATES}


def test_a_generator_that_nobody_seeds_makes_a_job_not_unsteady_while_nothing_else_differs() -> (
    None
):
    second = changed(run(), {}, GENERATORS, "rng.numpy.1", "#other")
    unsteady, unseeded = split_unsteady(compare(run(), second))
    assert (unsteady, unseeded) == ([], {(GENERATORS, "rng.numpy.1")})
    assert compare(run(), second, unseeded) == []
    killed = changed(second, {"step": 3}, GENERATORS, "rng.torch", "#other")
    assert {one.key for one in compare(run(), killed, unseeded)} == {"rng.torch"}


def test_what_differs_beside_a_generator_is_what_is_unsteady() -> None:
    second = changed(run(), {"step": 3}, DATA, "batch.0", "#other")
    second = changed(second, {}, GENERATORS, "rng.numpy.1", "#other")
    unsteady, _ = split_unsteady(compare(run(), second))
    assert {(one.step, one.cause) for one in unsteady} == {(3, DATA)}


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_advice(cause: str) -> None:
    difference = Difference(3, 0, cause, "key", "1", "2")
    assert advise_unsteady(difference)
    assert advise(difference) or cause == STEPS
