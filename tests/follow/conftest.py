from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.follow.lives import one_rank


@pytest.fixture(scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("world")):
        yield


@pytest.fixture
def root(_world: None, tmp_path: Path) -> Path:
    return tmp_path
