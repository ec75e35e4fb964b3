"""``python -m reft.cli``: the ``reft`` command."""

from __future__ import annotations

import sys

from reft.cli import main

if __name__ == "__main__":
    sys.exit(main())
