"""One rank of a control plane without a model: votes again and again until it hears that a rank is gone."""

from __future__ import annotations

import sys

from reft.comm.overlay import connect
from reft.errors import TransferError
from reft.store.keyvalue import KeyValueStore


def main(endpoint: str, rank: int, world_size: int, per_node: int) -> None:
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
    overlay.tree.reduce_min([rank])
    print("connected", flush=True)
    try:
        while True:
            overlay.tree.reduce_min([rank])
    except TransferError:
        print("heard", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
