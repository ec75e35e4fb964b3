"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Two busy cores: how long an example takes says nothing, and no test asserts a time.
settings.register_profile("reft", deadline=None)
settings.load_profile("reft")
