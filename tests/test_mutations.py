"""Mutations can be applied: what they change is still there, once, and so are the tests that notice."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_can_be_applied(mutation: Mutation) -> None:
    assert (ROOT / "reft" / mutation.path).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    for test in mutation.tests:
        assert (ROOT / test.partition("::")[0]).is_file(), test
