"""One rank of a control plane without a model: votes again and again until it hears that a rank is gone, or, with a
file named, until that is there for all."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from reft.control.keyvalue import KeyValueStore
from reft.control.overlay import connect
from reft.errors import TransferError


def main(endpoint: str, rank: int, world_size: int, per_node: int, end: Path | None) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    secret, wait_secs = b"s" * 32, 120.0
    overlay = connect(
        KeyValueStore(endpoint, secret, timeout_secs=wait_secs),
        "job",
        rank=rank,
        world_size=world_size,
        node=f"node{rank // per_node}",
        secret=secret,
        timeout_secs=wait_secs,
    )
    overlay.tree.limits.patience_secs = 1.0
    overlay.tree.reduce_min([rank])
    print("connected", flush=True)
    try:
        while overlay.tree.reduce_min([int(end is not None and end.exists())]) == [0]:
            time.sleep(0.01)
        print("ended well", flush=True)
    except TransferError:
        print("heard", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]) if sys.argv[5:] else None)
