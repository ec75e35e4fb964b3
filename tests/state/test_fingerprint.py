"""Fingerprints, pure: what differs is said by name (P7)."""

from __future__ import annotations

import pytest

from reft.errors import FingerprintError
from reft.state.fingerprint import Fingerprint, changed, differences, facts_of_arguments, require_same

ONE = Fingerprint({"config.optimizer.params.lr": 0.01, "layout.dp": 2, "script": "/a/train.py", "seed": 7})


def with_facts(**facts: object) -> Fingerprint:
    return Fingerprint({**ONE.facts, **{name.replace("__", "."): fact for name, fact in facts.items()}})


def test_p7_encoding_gives_the_same_facts_again() -> None:
    again = Fingerprint.decode(ONE.encode())
    assert changed(ONE, again) == []
    assert again.encode() == ONE.encode()


def test_p7_every_difference_is_named_with_what_was_and_what_is() -> None:
    other = Fingerprint({k: v for k, v in with_facts(layout__dp=4).facts.items() if k != "seed"})
    assert differences(ONE, other) == ["layout.dp: was 2, is 4", "seed: was 7, is not set"]
    assert differences(ONE, ONE) == []


def test_p7_a_number_may_be_written_as_another_type_but_not_as_a_truth_value() -> None:
    assert changed(with_facts(x=1), with_facts(x=1.0)) == []
    assert changed(with_facts(x=1), with_facts(x=True)) == ["x"]
    assert changed(with_facts(x=None), ONE) == ["x"]


def test_p7_a_refusal_says_what_differs_and_what_to_do() -> None:
    with pytest.raises(FingerprintError) as refusal:
        require_same(ONE, with_facts(config__optimizer__params__lr=0.1), of="the memory of job train")
    message = str(refusal.value)
    assert "the memory of job train was written by a job that differs" in message
    assert "config.optimizer.params.lr: was 0.01, is 0.1" in message
    assert '"accept_changes": ["config.optimizer.params.lr"]' in message
    assert "--job-id" in message
    assert "reft clean" in message


def test_p7_what_is_accepted_may_differ_with_all_under_it_and_nothing_beside() -> None:
    other = with_facts(config__optimizer__params__lr=0.1, layout__dp=4)
    require_same(ONE, other, of="it", accepted=["config", "layout.dp"])
    for accepted in (["config"], ["config.opt", "layout"], []):
        with pytest.raises(FingerprintError):
            require_same(ONE, other, of="it", accepted=accepted)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"format": 2, "facts": {}}', b'{"format": 1, "facts": {"a": []}}']
)
def test_p7_what_is_not_a_fingerprint_is_refused(data: bytes) -> None:
    with pytest.raises(FingerprintError, match="cannot be read"):
        Fingerprint.decode(data)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ("--lr 0.1 --seed=3", {"lr": "0.1", "seed": "3"}),
        ("small --dropout -0.5 --flag", {"positional": "small", "dropout": "-0.5", "flag": ""}),
        ("--steps 10 --save-dir out --log_interval 5 --ckpt x --max-iters 9 --local_rank=0", {}),
        ("--data /corpus/a --model 7b", {"model": "7b"}),
        ('--deepspeed_config ds.json --overrides {"a":1}', {}),
        ("--layers 2 4 --learning-steps-per-print 1", {"layers": "2 4"}),
        ("", {}),
    ],
)
def test_arguments_that_may_change_the_numbers_are_facts(arguments: str, facts: dict[str, str]) -> None:
    assert facts_of_arguments(arguments.split()) == {f"arguments.{k}": v for k, v in facts.items()}
