"""Settings of the whole suite."""

from __future__ import annotations

import signal

from hypothesis import settings

# Two busy cores: how long an example takes says nothing, and no test asserts a time.
settings.register_profile("reft", deadline=None)
settings.load_profile("reft")

# Started in the background by a shell, this process ignores SIGINT, and so would all its children;
# tests that press Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
