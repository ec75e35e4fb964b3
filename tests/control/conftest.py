"""Connected ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reft.control.control import Overlay

from .ranks import connected


@pytest.fixture
def overlays(request: pytest.FixtureRequest) -> Iterator[list[Overlay]]:
    made = connected(request.param)
    yield made
    for one in made:
        one.close()
