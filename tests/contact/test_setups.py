"""P12: a wrong or insufficient set-up is told before its second step, with what to write; in words, not by a
traceback, and with an exit code that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("setups_job.py")
START, STEP_1 = 0, 1

REFUSED = {
    "zero_2": ("ZeRO stage 0 or 1",),
    "zero_3": ("zero_optimization.stage 0 or 1",),
    "experts": ("mixture-of-experts layers", "disable reft for this model"),
    "optimizer_with_secrets": ("Secretive with a state_dict of its own",),
    "scheduler_without_state": ("Forgetful has no state_dict", "add them"),
    "no_optimizer": ("give deepspeed.initialize",),
    "two_engines": ("a second engine asks for reft",),
    "attached_but_not_enabled": ('write "reft": {"enabled": true}',),
    "unknown_key": ('did you mean "protection"?',),
    "checkpoints_without_a_place": ('needs "dir"',),
    "no_room_for_parities": ("rs:2",),
    "two_names": ("name0, name1", "--job-id NAME"),
    "restarted_without_load": ("holds step 2", "reft.resume(engine)", "The memory is kept"),
    "other_learning_rate": ("config.optimizer.params.lr: was 0.01, is 0.5", '"accept_changes"'),
    "other_model": ("2 parameters of 72 numbers", "1 parameters of 64 numbers", "--job-id NAME"),
    "other_arguments": ('arguments.corpus: was "english", is "german"', "--job-id NAME"),
    "resumable_of_a_list": ("expected a torch.utils.data.DataLoader", "client_state"),
    "pipeline_over_two_nodes": ("data-parallel degree of 1", '"allow_unprotected": true'),
    "one_memory_for_two_nodes": ("ranks 0 and 1 have the same memory", "REFT_MEMORY_DIR"),
    "more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
    "auto_for_more_losses_than_nodes": ('"tolerance": 2', 'write "tolerance": 1'),
}
"""Set-ups that are not started, and what their error says."""
WARNED = {
    "no_load": (START, "reft.resume(engine)"),
    "trainer_that_is_not_resumable": (START, "Write trainer = reft.hf.resumable(trainer)"),
    "without_the_launcher": (START, "`reft launch` did not start this job"),
    "attached_with_other_settings": (START, "reft.attach was given a config"),
    "only_base_weights": (START, "loaded base weights only"),
    "always_one_tag": (START, "After every failure the job would go back to that checkpoint"),
    "loader_with_workers": (STEP_1, "RandomSampler, num_workers=1"),
    "loader_of_a_stream": (STEP_1, "__main__.Stream of None"),
    "nodes_may_change_and_the_order_is_a_replicas": (
        STEP_1,
        "the number of nodes may change (--nnodes 1:2), and with another data-parallel degree",
    ),
    "pipeline_with_a_generator": (STEP_1, "(generator batches). After a failure"),
    "pipeline_with_shards": (STEP_1, "(RepeatingLoader over __main__.Shards). After a failure"),
    "own_order": (STEP_1, "the position in the data is not known"),
    "client_state_that_cannot_be_kept": (STEP_1, "the state of step 1 cannot be captured"),
    "module_with_extra_state": (STEP_1, "register it as a buffer, or return it from client_state"),
    "too_little_memory": (STEP_1, "raise the limit"),
    "no_place_for_checkpoints": (START, "checkpoints cannot be written to persist.dir"),
    "pipeline_with_a_list": (STEP_1, "RepeatingLoader"),
    "pipeline_allowed_to_be_unprotected": (START, "TOLERANCE IS 0: with a data-parallel degree of 1"),
    "pipeline_restarted": (START, "TOLERANCE IS 0: with a data-parallel degree of 1"),
    "no_protection": (START, 'TOLERANCE IS 0: the protection is "none"'),
    "everybody_on_one_node": (START, "TOLERANCE IS 0: all ranks share a node with their copies"),
}
"""Set-ups that train, and what is said until which step."""
STRICT_GOES_ON = {
    "pipeline_allowed_to_be_unprotected": "the user has written that it may be",
    "pipeline_restarted": "a job that restarts by itself goes on",
}
"""Set-ups whose warning stays one under ``"strict": true``."""
STRICT_SAYS = {
    "client_state_that_cannot_be_kept": "the version of step 1 could not be taken: the state could not be captured",
    "module_with_extra_state": "the version of step 1 could not be taken",
    "too_little_memory": "the version of step 1 could not be taken",
}
"""What it says where that is not the warning's own text."""
STRICT_ENDING = 'says "strict": true'


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(JOB, tmp_path_factory.mktemp("setups"))


@pytest.mark.parametrize("name", REFUSED)
def test_p12_refused_on_all_ranks_before_the_first_step(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        found = rank[name]
        assert found["error"] is not None, found
        for text in REFUSED[name]:
            assert text in found["error"]
        assert (found["code"], found["steps"]) == (2, 0)


@pytest.mark.parametrize("name", WARNED)
def test_p12_warned_of_in_time(results: list[dict[str, Any]], name: str) -> None:
    found = results[0][name]
    step, text = WARNED[name]
    assert found["error"] is None
    assert [at for at, line in found["heard"] if text in line and at <= step], found["heard"]


@pytest.mark.parametrize("name", WARNED)
def test_p12_strict_makes_an_error_of_every_warning(results: list[dict[str, Any]], name: str) -> None:
    step, text = WARNED[name]
    for rank in results:
        found = rank[name]["strict"]
        error = found["error"] or ""
        if name in STRICT_GOES_ON:
            assert text not in error
            continue
        assert STRICT_SAYS.get(name, text) in error, found
        assert STRICT_ENDING in error
        assert (found["code"], found["steps"]) == (2, step)


def test_every_setup_is_judged(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == {*REFUSED, *WARNED}
