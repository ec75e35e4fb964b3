"""``python -m reft.pretrain``: the training script for Llama-2; see :mod:`reft.tools.pretrain`."""

from __future__ import annotations

import sys

from reft.tools.pretrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
