"""Pretrains a Llama-2: run it under ``reft launch`` or ``torchrun``, or alone for one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.llama.model_config import check_model, degrees_for
from examples.llama.options import parse
from reft.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit status (2: wrong use)."""
    try:
        options = parse(argv)
        if options.print_params:
            Console(soft_wrap=True, highlight=False).print(
                options.model_config().describe(), markup=False
            )
            return 0
        # What is plainly wrong is said before torch and DeepSpeed take their seconds to load.
        degrees = degrees_for(
            int(os.environ.get("WORLD_SIZE", "1")), options.pp, options.tp, options.dp
        )
        check_model(options.model_config(), degrees)
        from examples.llama.train import train

        train(options)
    except ConfigError as error:
        # Every process of a node finds the same; one of them says it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"error: {error}", markup=False
            )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
