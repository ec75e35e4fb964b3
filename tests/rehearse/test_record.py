"""What is written of a step: short values as they are, digests of longer ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reft.rehearse.compare import CLIENT, DATA, GENERATORS, HOST, LOSS, RATES, WEIGHTS
from reft.rehearse.record import digest_image, digest_items, digest_tensors, find_cause, scalars
from reft.state.catalogue import SectionImage


def test_short_values_are_written_as_they_are_and_differ_in_the_last_bit() -> None:
    state = {
        "counter": 7,
        "ema": 0.1,
        "name": "linear",
        "none": None,
        "lrs": [0.1, float(np.nextafter(0.1, 1))],
    }
    assert dict(digest_items("client", state)) == {
        "client.counter": "7",
        "client.ema": "0.1",
        "client.name": "'linear'",
        "client.none": "None",
        "client.lrs.0": "0.1",
        "client.lrs.1": "0.10000000000000002",
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.tensor([0.0, 0.0, -0.0])),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (np.arange(9), np.arange(9)[::-1].copy()),
        ("a" * 100, "a" * 99 + "b"),
        (list(range(100)), list(range(1, 101))),
    ],
)
def test_longer_values_are_digests_of_their_bits(one: object, other: object) -> None:
    digests = [dict(digest_items("x", value))["x"] for value in (one, one, other)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("#")


def test_every_tensor_of_a_section_has_a_digest_of_its_own_bytes() -> None:
    weight, bias, empty = torch.randn(3, 5), torch.randn(7), torch.empty(0)
    image = SectionImage([("weight", weight), ("bias", bias), ("empty", empty)])
    before = dict(digest_image("replicated", image))
    assert list(before) == ["replicated.weight", "replicated.bias"]
    with torch.no_grad():
        bias[6] += 1
    after = dict(digest_image("replicated", image))
    assert [key for key in before if before[key] != after[key]] == ["replicated.bias"]


def test_a_batch_is_all_tensors_in_nested_containers() -> None:
    ids, mask = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
    batch = ((ids,), {"mask": [mask], "length": 3})
    same = digest_tensors(((ids.clone(),), {"mask": [mask.clone()]}))
    assert digest_tensors(batch) == same
    assert same not in (digest_tensors((ids, mask * 2)), digest_tensors((ids.flatten(), mask)))


def test_a_loss_is_written_exactly() -> None:
    assert scalars(torch.tensor(0.1)) == [repr(torch.tensor(0.1).item())]
    assert scalars((torch.tensor(1.0), torch.ones(3), 4)) == ["1.0"]


@pytest.mark.parametrize(
    ("key", "cause"),
    [
        ("data.pass.taken", DATA),
        ("data.resumable.train.start.numpy.1", GENERATORS),
        ("rng.torch", GENERATORS),
        ("lr_scheduler.last_batch_iteration", RATES),
        ("followed.schedulers.0.last_epoch", RATES),
        ("followed.param_groups.0.betas.0", RATES),
        ("client.counter", CLIENT),
        ("followed.ema.decay", CLIENT),
        ("followed.flags.frozen", HOST),
        ("engine.global_steps", HOST),
        ("engine._global_grad_norm", LOSS),
        ("buffers.norm.running_mean", WEIGHTS),
    ],
)
def test_what_is_captured_belongs_to_a_cause(key: str, cause: str) -> None:
    assert find_cause(key) == cause
