"""``python -m reft.pretrain``: run under ``reft launch`` or ``torchrun``, or alone for one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from reft.errors import ConfigError
from reft.tools.pretrain.layout import check_model, degrees_for
from reft.tools.pretrain.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit status (2: wrong use)."""
    try:
        options = parse(argv)
        if options.print_params:
            Console(soft_wrap=True, highlight=False).print(options.model_config().describe(), markup=False)
            return 0
        # What is plainly wrong is said before torch and DeepSpeed take their seconds to load.
        degrees = degrees_for(int(os.environ.get("WORLD_SIZE", "1")), options.pp, options.tp, options.dp)
        check_model(options.model_config(), degrees)
        from reft.tools.pretrain.train import train

        train(options)
    except ConfigError as error:
        # Every process of a node finds the same; one of them says it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
