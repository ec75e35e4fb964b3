"""What the control plane costs, by the number of ranks: a vote, agreeing on a version, connections,
memory.

    .venv/bin/python benchmarks/control_plane.py --json

Measured: light processes (no model, no torch) of reft's control plane (:mod:`reft.control`) as
ranks of nodes of ``--per-node``; and beside it gloo's groups, which connect every rank with every
other, as far as they go. All share the cores of one machine, so the seconds of a vote are mostly
the sum of all ranks' work. What a rank does for a vote (``cpu_secs``) does not depend on that. To
agree on a version the ranks gather what they gather in a recovery, made by the code that makes it
there: every rank's summary of two arenas, then a verdict of every sharding group. What a rank then
makes of it is part of planning. Computed: hops and connections of larger jobs, from the shape of
the tree (``computed``), and what planning a recovery costs a rank (``planning.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

import msgpack
import psutil

from reft.control.control import connect
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.control.transport import FANOUT, Buffers, find_children, find_parent
from reft.control.wire import listen
from reft.grid import Coordinate, Degrees, VersionId
from reft.memory.header import ArenaState
from reft.recover.decide import GroupStatus, encode_verdicts
from reft.recover.inventory import Head, Summary

SECRET = b"b" * 32
WAIT_SECS = 240.0
BALLOT_INTS = 9
VERSIONS = (VersionId(3, 1234), VersionId(3, 1235))
"""What every rank holds, where the ranks agree on a version."""
WARM_UP = 3


def said(ranks: int, per_node: int) -> list[tuple[bytes, bytes]]:
    """Per rank of a healthy job what it tells all others: its summary, and its group's verdict,
    which the first rank of each group tells."""
    tp = math.gcd(ranks, per_node)
    degrees = Degrees(1, ranks // tp, tp)
    found = []
    for rank in range(ranks):
        at, node = Coordinate(0, rank // tp, rank % tp), f"node{rank // per_node:05}"
        heads = tuple(
            Head(
                label,
                ArenaState.COMMITTED,
                at,
                node,
                f"rank{rank % per_node}-{slot}.arena",
                degrees,
                "job",
            )
            for slot, label in enumerate(VERSIONS)
        )
        summary = Summary(node, heads, ()).encode()
        verdict = (
            encode_verdicts({label: GroupStatus(0, (), False) for label in VERSIONS})
            if at.dp == 0
            else b""
        )
        # In the envelope that also carries errors.
        found.append((msgpack.packb([None, summary]), msgpack.packb([None, verdict])))
    return found


def usage() -> dict[str, float]:
    """Of this process, now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    process = psutil.Process()
    return {
        "cpu_secs": used.ru_utime + used.ru_stime,
        "private_bytes": process.memory_full_info().uss,
        "connections": sum(
            c.status in ("ESTABLISHED", "NONE") for c in process.net_connections("all")
        ),
        "threads": process.num_threads(),
    }


def timed(act: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Seconds of each call, and processor seconds of this rank for all of them."""
    for _ in range(WARM_UP):
        act()
    before, secs = usage()["cpu_secs"], []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        secs.append(time.perf_counter() - began)
    return {"secs": secs, "cpu_secs": (usage()["cpu_secs"] - before) / rounds}


def tree_rank(rank: int, ranks: int, per_node: int, rounds: int, endpoint: str) -> dict[str, Any]:
    store = KeyValueStore(endpoint, SECRET, timeout_secs=WAIT_SECS)
    before, began = usage(), time.perf_counter()
    overlay = connect(
        store,
        "bench",
        rank=rank,
        world_size=ranks,
        node=f"node{rank // per_node}",
        secret=SECRET,
        timeout_secs=WAIT_SECS,
    )
    found: dict[str, Any] = {"connect_secs": time.perf_counter() - began}
    store.close()
    ring = [(rank + 1) % ranks, (rank - 1) % ranks]
    # As ring peers that keep one copy: one connection to each neighbour.
    overlay.stream(
        {ring[0]: [memoryview(bytes(8))]}, {ring[1]: Buffers([memoryview(bytearray(8))])}
    )
    found["vote"] = timed(lambda: overlay.reduce_min(range(BALLOT_INTS)), rounds)
    summary, verdict = said(ranks, per_node)[rank]

    def agree() -> None:
        overlay.gather(summary)
        overlay.gather(verdict)

    found["agree"] = timed(agree, rounds)
    found["agree_bytes"] = len(summary) + len(verdict)
    after = usage()
    found["connections"] = len(overlay.links) + len(overlay.links)
    found["private_bytes"] = after["private_bytes"] - before["private_bytes"]
    found["threads"] = after["threads"] - before["threads"]
    overlay.gather(b"")  # nobody leaves before all have counted
    overlay.close()
    return found


def gloo_rank(rank: int, ranks: int, per_node: int, rounds: int, endpoint: str) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    host, port = endpoint.rsplit(":", 1)
    wait = timedelta(seconds=WAIT_SECS)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=wait)
    before, began = usage(), time.perf_counter()
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("bench", store), rank, ranks, wait)
    found: dict[str, Any] = {"connect_secs": time.perf_counter() - began}
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    ballot = torch.arange(BALLOT_INTS)
    bodies = said(ranks, per_node)
    # gloo gathers pieces of one size.
    pieces = [
        torch.frombuffer(
            bytearray(bodies[rank][i].ljust(max(len(b[i]) for b in bodies))), dtype=torch.uint8
        )
        for i in range(2)
    ]
    theirs = [[torch.empty_like(mine) for _ in range(ranks)] for mine in pieces]

    def agree() -> None:
        for mine, others in zip(pieces, theirs, strict=True):
            group.allgather([others], [mine]).wait()

    found["vote"] = timed(lambda: group.allreduce([ballot], options).wait(), rounds)
    found["agree"] = timed(agree, rounds)
    found["agree_bytes"] = sum(mine.numel() for mine in pieces)
    after = usage()
    found["connections"] = after["connections"] - before["connections"]
    found["private_bytes"] = after["private_bytes"] - before["private_bytes"]
    found["threads"] = after["threads"] - before["threads"]
    group.allreduce([ballot], options).wait()
    return found


def serve_table(tell: int) -> None:
    server = KeyValueServer(listen("127.0.0.1", 0), SECRET)
    os.write(tell, f"127.0.0.1:{server.port}".encode())
    signal.pause()


def serve_torch_store(tell: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, f"127.0.0.1:{store.port}".encode())
    signal.pause()


RANK = {"tree": tree_rank, "gloo": gloo_rank}
STORE = {"tree": serve_table, "gloo": serve_torch_store}


def forked(act: Callable[[int], None]) -> tuple[int, int]:
    """Run ``act`` in a forked process with the writing end of a pipe; its pid and the reading
    end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        os.close(read)
        act(write)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


def measure(kind: str, ranks: int, per_node: int, rounds: int) -> dict[str, Any]:
    """One size: a process per rank."""
    if kind == "gloo":
        import torch.distributed  # noqa: F401  (once, before the ranks are forked)
    store, tell = forked(STORE[kind])
    pids, pipes = [store], []
    try:
        endpoint = os.read(tell, 100).decode()

        def one(rank: int) -> Callable[[int], None]:
            def act(write: int) -> None:
                found = RANK[kind](rank, ranks, per_node, rounds, endpoint)
                with os.fdopen(write, "w") as stream:
                    json.dump(found, stream)

            return act

        for rank in range(ranks):
            pid, pipe = forked(one(rank))
            pids.append(pid)
            pipes.append(pipe)
        told = [read_all(pipe) for pipe in pipes]
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(tell)
    if not all(told):
        return {"ranks": ranks, "failed": f"{sum(not t for t in told)} ranks ended early"}
    return summary(ranks, [json.loads(t) for t in told])


def summary(ranks: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": ranks, "connect_secs": max(f["connect_secs"] for f in found)}
    for name in ("vote", "agree"):
        # A collective takes as long as it takes the rank that waits longest.
        slowest = [max(times) for times in zip(*(f[name]["secs"] for f in found), strict=True)]
        result[f"{name}_secs"] = statistics.median(slowest)
        result[f"{name}_cpu_secs_per_rank"] = statistics.mean(f[name]["cpu_secs"] for f in found)
        result[f"{name}_cpu_secs_busiest_rank"] = max(f[name]["cpu_secs"] for f in found)
    result["agree_bytes_per_rank"] = statistics.mean(f["agree_bytes"] for f in found)
    result["most_connections"] = max(f["connections"] for f in found)
    result["private_bytes_per_rank"] = statistics.median(f["private_bytes"] for f in found)
    result["threads_per_rank"] = statistics.median(f["threads"] for f in found)
    return result


def fit(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Least squares of ``secs = fixed + per_rank * ranks``."""
    slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
    return {"fixed_secs": fixed, "secs_per_rank": slope}


def computed(ranks: int, per_node: int) -> dict[str, int]:
    """Hops of a vote and most connections of a rank, from the shape of the tree."""
    nodes = -(-ranks // per_node)

    def depth(place: int) -> int:
        return 1 + depth(find_parent(place)) if place else 0

    most = max(len(find_children(place, nodes)) + (place > 0) for place in (0, 1, nodes - 1))
    return {
        "ranks": ranks,
        "nodes": nodes,
        "hops": 2 * (depth(nodes - 1) + depth(per_node - 1)),
        "most_connections_of_the_tree": most + len(find_children(0, per_node)),
        # The training thread's and the worker's; ring peers come to it.
        "most_connections_of_both_trees": 2 * (most + len(find_children(0, per_node))),
        "connections_in_a_full_mesh": ranks - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--gloo-ranks", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node (default 8)")
    parser.add_argument(
        "--rounds", type=int, default=30, help="votes and agreements per size (default 30)"
    )
    parser.add_argument(
        "--plans", type=int, default=3, help="trials of planning, 0 for none (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    result: dict[str, Any] = {
        "benchmark": "control_plane",
        "command": " ".join(["benchmarks/control_plane.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "per_node": args.per_node,
        "fanout": FANOUT,
    }
    for kind, sizes in (("tree", args.ranks), ("gloo", args.gloo_ranks)):
        rows = []
        for ranks in sizes:
            print(f"{kind}: {ranks} ranks", file=sys.stderr, flush=True)
            rows.append(measure(kind, ranks, args.per_node, args.rounds))
        result[kind] = rows
        done = [row for row in rows if "failed" not in row]
        if len(done) > 1:
            result[f"{kind}_fits"] = {
                name: fit([(row["ranks"], row[name]) for row in done])
                for name in ("vote_secs", "agree_secs", "connect_secs")
            }
    result["computed"] = [computed(ranks, args.per_node) for ranks in (512, 4096, 16384)]
    # Not before: these import torch, and the light processes are forked from this one.
    from planning import measure_all
    from results import machine

    result["machine"] = {**machine(), "load_average_at_start": load}
    if args.plans:
        result["planning"] = measure_all(args.plans)
    print(json.dumps(result, indent=1) if args.json else table(result))


def table(result: dict[str, Any]) -> str:
    lines = ["         ranks  connect s   vote ms  agree ms  connections  private KiB  threads"]
    for kind in ("tree", "gloo"):
        for row in result[kind]:
            if "failed" in row:
                lines.append(f"{kind:8} {row['ranks']:5}  {row['failed']}")
                continue
            lines.append(
                f"{kind:8} {row['ranks']:5} {row['connect_secs']:10.2f} "
                f"{1e3 * row['vote_secs']:9.2f} "
                f"{1e3 * row['agree_secs']:9.2f} {row['most_connections']:12} "
                f"{row['private_bytes_per_rank'] / 1024:12.0f} {row['threads_per_rank']:8.0f}"
            )
    lines += [f"computed: {row}" for row in result["computed"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
