"""``reft check``: finds nodes that are slow or hang before a job is started on them.

Each node measures its own speed. Then the nodes all-reduce in pairs, in two rounds, as in DLRover's
node check. A pair is bad if its reduction fails or takes long. In the second round, slow nodes are
paired with fast ones; a node whose pair is bad in both rounds is itself bad.

Nodes communicate through the rendezvous store. In each round, a node waits ``timeout_secs`` at most
for the others. The pairs are those that the first ready node writes into the store. Every node
computes the same verdict from the reports that arrived in time.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from reft.cli.memory import EXIT_NOT_WELL, AsJson
from reft.control.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import listen
from reft.device import find_local_vendor, find_vendor
from reft.env import ENV_NODE_ID
from reft.errors import ConfigError, ReftError
from reft.memory.job_secret import user_secret
from reft.storage.persist import reason_unwritable

logger = logging.getLogger(__name__)

MEASURES = {
    "matmul_flops": "multiplies matrices",
    "memory_bytes": "copies memory",
    "link_bytes": "copies to its device",
}
"""Maps the name of each of a node's measurements (all amounts per second) to the words that
messages use for it."""
_POLL_SECS = 0.1
_CPU_SIZE, _DEVICE_SIZE = 512, 8192
_COPY_BYTES = 64 * 2**20
_REDUCED_BYTES = 16 * 2**20
_WARM_UP, _REDUCTIONS = 2, 10

Pair = tuple[int, ...]  # Indices of two nodes; with an odd number of nodes, the last has three
Round = tuple[Sequence[Pair], Mapping[int, float | None]]
"""One round of all-reduces: the pairs, and the seconds that each node measured. The seconds are
None if the reduction failed; they are missing if the node did not report."""


def check_command(
    *,
    nnodes: Annotated[
        int, typer.Option(min=1, help="nodes to check; each of them runs this command")
    ] = 1,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="where `reft rendezvous` runs; not needed for one node"
        ),
    ] = "",
    rdzv_id: Annotated[
        str, typer.Option(help="id of this check; use a new one for every check")
    ] = "check",
    node_id: Annotated[
        str, typer.Option(envvar=ENV_NODE_ID, help="name of this node (default: the host's)")
    ] = "",
    factor: Annotated[
        float,
        typer.Option(
            min=1.05, help="report a node as bad if it is this many times slower than the others"
        ),
    ] = 1.5,
    secs: Annotated[float, typer.Option(min=0.1, help="seconds that each measurement takes")] = 1.0,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="seconds to wait for a node in each round")
    ] = 60.0,
    persist_dir: Annotated[
        Path | None,
        typer.Option(help="the block's persist.dir: report nodes that cannot write there"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find slow or hanging nodes before training: each node multiplies matrices, copies memory and,
    where it has devices, copies to them; then the nodes all-reduce in pairs, twice, with different
    partners.

    Run it on every node, with `reft rendezvous` on some host:

        reft check --nnodes 4 --rdzv-endpoint HOST:29400 --rdzv-id ID

    Exit code 0: all nodes are well; 1: a node is bad, or a node of a bad pair; 2: wrong usage.
    """
    if nnodes > 1 and not rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {nnodes} without --rdzv-endpoint: start `reft rendezvous --port 29400` on a "
            "host that all reach, and write --rdzv-endpoint HOST:29400"
        )
    logging.getLogger("torch").setLevel(logging.ERROR)
    secret = user_secret()
    with ExitStack() as stack:
        if not rdzv_endpoint:
            server = stack.enter_context(closing(KeyValueServer(listen("127.0.0.1", 0), secret)))
            rdzv_endpoint = f"127.0.0.1:{server.port}"
        store = stack.enter_context(
            closing(KeyValueStore(rdzv_endpoint, secret, prefix=f"reft-check/{rdzv_id}/"))
        )
        try:
            report = check_nodes(
                store,
                nnodes,
                node_id or socket.gethostname(),
                factor=factor,
                secs=secs,
                timeout_secs=timeout,
                persist_dir=persist_dir,
            )
        except StoreError as error:
            raise ReftError(
                f"{error}; start `reft rendezvous` there, or correct --rdzv-endpoint "
                f"{rdzv_endpoint}"
            ) from error
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report, Console())
    if not report["well"]:
        raise typer.Exit(EXIT_NOT_WELL)


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(
        "node", "matmul TFLOP/s", "memory GB/s", "to device GB/s", "all-reduce 1", "2, in ms"
    )
    for node in report["nodes"]:
        speeds = node["alone"] or {}
        scaled = zip(MEASURES, (1e12, 1e9, 1e9), strict=True)
        cells = [f"{speeds[of] / unit:.3g}" if of in speeds else "" for of, unit in scaled]
        rounds = ["" if secs is None else f"{secs * 1e3:.3g}" for secs in node["all_reduce_secs"]]
        table.add_row(escape(node["node"]), *cells, *rounds)
    console.print(table)
    for bad in report["bad"]:
        console.print(
            f"[bold red]bad:[/] {escape(bad['node'])}: {escape('; '.join(bad['reasons']))}"
        )
    for text in report["unclear"]:
        console.print(f"[bold yellow]not clear which:[/] {escape(text)}")
    if report["well"]:
        console.print("[green]all nodes are well[/]")


def check_nodes(
    store: KeyValueStore,
    nodes: int,
    name: str,
    *,
    factor: float,
    secs: float,
    timeout_secs: float,
    persist_dir: Path | None = None,
) -> dict[str, Any]:
    """Run one node's part of a check.

    Args:
        store: store with a prefix for this check only.
        nodes: number of nodes that take part.
        name: name of this node.
        factor: a node or a pair is bad if it is this many times slower than the median of the
            others.
        secs: duration of every measurement.
        timeout_secs: longest wait for the other nodes in each round.
        persist_dir: directory for checkpoints; nodes that cannot write there are bad.

    Returns:
        The report, an object for JSON.

    Raises:
        StoreError: the rendezvous store does not answer.
    """
    index = store.add("joined", 1) - 1
    if index >= nodes:
        raise ConfigError(
            f"{name} is node {index + 1} of a check of {nodes}: an earlier check was made under "
            "this id, or --nnodes is too small; give every check another --rdzv-id"
        )

    def publish(key: str, value: Any) -> None:
        store.set(f"{key}/{index}", json.dumps(value))

    def gather(key: str, indices: Sequence[int]) -> dict[int, Any]:
        """Collect the values that the given nodes publish in time, by index."""
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_secs
        while len(values) < len(indices) and time.monotonic() < deadline:
            for node in set(indices) - values.keys():
                if (data := store.peek(f"{key}/{node}")) is not None:
                    values[node] = json.loads(data)
            time.sleep(_POLL_SECS if len(values) < len(indices) else 0)
        return dict(sorted(values.items()))

    def reduce(number: str, proposed: Sequence[Pair]) -> Round:
        """All-reduce in pairs. Nodes propose sets of pairs; the one that is first in the store is
        used."""
        _, agreed = store.compare_set(f"pairs{number}", None, json.dumps(proposed).encode())
        pairs = [tuple(pair) for pair in json.loads(agreed or b"[]")]
        for pair_index, pair in enumerate(pairs):
            if index in pair:
                reduce_secs = _reduce(
                    store,
                    f"meet/{number}.{pair_index}",
                    pair.index(index),
                    len(pair),
                    timeout_secs,
                )
                publish(f"reduced{number}", reduce_secs)
        return pairs, gather(f"reduced{number}", [node for pair in pairs for node in pair])

    publish("storage", "" if persist_dir is None else reason_unwritable(persist_dir))
    publish("name", name)
    published_names = gather("name", range(nodes))
    # Let all nodes measure at the same time, because nodes on the same host share its speed.
    publish("alone", measure_alone(secs))
    alone = gather("alone", list(published_names))
    names = [str(published_names.get(n, f"node {n} of {nodes}")) for n in range(nodes)]
    first = reduce("1", first_pairs(list(alone)))
    rounds = (first, reduce("2", second_pairs(list(alone), first[1])))
    bad, unclear = judge(names, alone, rounds, factor)
    for node, reason in gather("storage", list(alone)).items():
        if reason:
            bad.append((names[node], [f"it cannot write to {persist_dir}: {reason}"]))
    return {
        "nodes": [
            {
                "node": names[n],
                "alone": alone.get(n),
                "all_reduce_secs": [secs_of_node.get(n) for _, secs_of_node in rounds],
            }
            for n in range(nodes)
        ],
        "well": not bad and not unclear,
        "bad": [{"node": node, "reasons": reasons} for node, reasons in bad],
        "unclear": unclear,
    }


# -- measurements ----------------------------------------------------------------------------------


def measure_alone(secs: float) -> dict[str, float]:
    """Measure the speed of this node. With several devices, each result is the slowest one's.

    Args:
        secs: duration of every measurement.

    Returns:
        Speeds per second, with the keys of MEASURES.
    """
    vendor = find_local_vendor()
    cpu = vendor is None
    devices = [torch.device("cpu")]
    if vendor is not None:
        devices = [
            torch.device(vendor.type, index) for index in range(vendor.module.device_count())
        ]
    size = _CPU_SIZE if cpu else _DEVICE_SIZE
    speeds: dict[str, float] = {}
    for device in devices:
        one = torch.ones(size, size, device=device, dtype=torch.float32 if cpu else torch.bfloat16)
        out, source = (
            torch.empty_like(one),
            torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device),
        )
        target, host = torch.zeros_like(source), torch.zeros(_COPY_BYTES, dtype=torch.uint8)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "matmul_flops": (2 * size**3, partial(torch.mm, one, one, out=out)),
            "memory_bytes": (_COPY_BYTES, partial(target.copy_, source)),
        }
        if not cpu:
            calls["link_bytes"] = (
                _COPY_BYTES,
                partial(target.copy_, host.pin_memory(), non_blocking=True),
            )
        for name, (amount, call) in calls.items():
            speed = amount * _calls_per_sec(call, device, secs)
            speeds[name] = min(speeds.get(name, inf), speed)
    return speeds


def _calls_per_sec(call: Callable[[], object], device: torch.device, secs: float) -> float:
    """Measure calls per second in a loop, without time in which this thread waited for a core."""
    vendor = find_vendor(device)

    def finish() -> None:
        if vendor is not None:
            vendor.module.synchronize(device)

    for _ in range(_WARM_UP):
        call()
    finish()
    calls, delayed, began = 0, _delayed_secs(), time.perf_counter()
    while time.perf_counter() - began < secs:
        call()
        calls += 1
        if calls % 8 == 0:
            finish()
    finish()
    took = time.perf_counter() - began - (_delayed_secs() - delayed)
    return calls / max(took, 1e-9)


def _delayed_secs() -> float:
    """Return the seconds that this thread has waited for a core since it started; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _reduce(
    store: KeyValueStore, meeting: str, rank: int, size: int, timeout_secs: float
) -> float | None:
    """All-reduce over gloo; return the median seconds, or None if it failed.

    Args:
        store: store through which the nodes of a pair find each other.
        meeting: key in the store for this pair and round.
        rank: index of this node in its pair.
        size: number of nodes in the pair.
        timeout_secs: longest duration of each step.
    """
    timeout = timedelta(seconds=timeout_secs)
    try:
        if rank == 0:
            host = store.local_address()
            served = TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
            store.set(meeting, f"{host} {served.port}")
        else:
            store.wait([meeting], timeout)
            host, port = store.get(meeting).decode().split()
            served = TCPStore(host, int(port), size, False, timeout, wait_for_workers=False)
        group = ProcessGroupGloo(served, rank, size, timeout)
        data, took = torch.ones(_REDUCED_BYTES // 4), []
        for _ in range(_WARM_UP + _REDUCTIONS):
            began = time.perf_counter()
            group.allreduce([data]).wait()  # type: ignore[attr-defined]
            took.append(time.perf_counter() - began)
        return sorted(took[_WARM_UP:])[_REDUCTIONS // 2]
    except (RuntimeError, TimeoutError, OSError, ValueError) as error:
        logger.info("the reduction %s failed: %s", meeting, str(error).splitlines()[0])
        return None


# -- the verdict: pure -----------------------------------------------------------------------------


def first_pairs(nodes: Sequence[int]) -> list[Pair]:
    """Return pairs of nodes with neighbouring indices; with an odd number, the last has three."""
    order = sorted(nodes)
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order) - 1, 2)]
    if pairs and len(order) % 2:
        pairs[-1] = (*pairs[-1], order[-1])
    return pairs


def second_pairs(nodes: Sequence[int], first: Mapping[int, float | None]) -> list[Pair]:
    """Pair fast nodes of the first round with slow ones: the fastest with the slowest, and so on.

    Args:
        nodes: indices of the nodes.
        first: seconds of each node in the first round; a node whose reduction failed counts as
            slowest.
    """
    order = sorted(nodes, key=lambda n: (first.get(n) is None, first.get(n) or 0.0, n))
    # The fastest, the slowest, the second fastest, the second slowest, ...
    crossed = []
    for i in range(len(order)):
        crossed.append(order[i // 2] if i % 2 == 0 else order[-1 - i // 2])
    places = first_pairs(range(len(order)))
    return [tuple(crossed[place] for place in pair) for pair in places]


def judge(
    names: Sequence[str],
    alone: Mapping[int, Mapping[str, float]],
    rounds: Sequence[Round],
    factor: float,
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Find the bad nodes.

    A node is bad if it did not answer; if one of its own measurements is slower by ``factor`` than
    the median of the others; or if its pair was slower by ``factor`` in every round.

    Args:
        names: names of all nodes.
        alone: measurements of the nodes that answered, by index.
        rounds: the rounds of all-reduces.
        factor: factor of slowness at which a node is bad.

    Returns:
        The names of bad nodes with the reasons; and texts about pairs in which one node is bad but
        it is not clear which.
    """
    reasons: dict[int, list[str]] = {node: [] for node in range(len(names))}
    for node, reasons_of_node in reasons.items():
        if node not in alone:
            reasons_of_node.append("it does not answer")
    for measure, words in MEASURES.items():
        speeds = {node: speed[measure] for node, speed in alone.items() if measure in speed}
        for node, speed in speeds.items():
            others = [value for other, value in speeds.items() if other != node]
            if others and median(others) > factor * speed:
                times = median(others) / max(speed, 1e-9)
                reasons[node].append(f"it {words} {times:.1f} times slower than the others")
    bad = [_find_bad_pairs(pairs, secs, factor) for pairs, secs in rounds]
    always_bad = set.intersection(*map(set, bad)) if bad else set()
    unclear = []
    for pair in rounds[-1][0] if rounds else ():
        # If both nodes of this pair were in bad pairs in every round, either may be the cause.
        suspects = [node for node in pair if node in always_bad]
        if not suspects:
            continue
        reason = f"all-reduce with others {bad[-1][suspects[0]]}"
        if len(suspects) == 1:
            reasons[suspects[0]].append(reason)
        elif not any(reasons[node] for node in suspects):
            unclear.append(f"one of {', '.join(names[node] for node in suspects)}: {reason}")
    bad_nodes = [(names[node], why) for node, why in reasons.items() if why]
    return bad_nodes, unclear


def _find_bad_pairs(
    pairs: Sequence[Pair], secs: Mapping[int, float | None], factor: float
) -> dict[int, str]:
    """Return the nodes of bad pairs, each with a text on what is wrong with its pair."""
    pair_secs: dict[Pair, float] = {}
    for pair in pairs:
        node_secs = [value for node in pair if (value := secs.get(node)) is not None]
        if len(node_secs) == len(pair):
            pair_secs[pair] = max(node_secs)
    bad: dict[int, str] = {}
    for pair in pairs:
        others = [value for other, value in pair_secs.items() if other != pair]
        if pair not in pair_secs:
            bad |= dict.fromkeys(pair, "fails, or takes too long")
        elif others and pair_secs[pair] > factor * median(others):
            times = pair_secs[pair] / median(others)
            bad |= dict.fromkeys(pair, f"takes {times:.1f} times as long as in other pairs")
    return bad
