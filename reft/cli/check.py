"""``reft check``: which of the nodes is slow or hangs, before a job is started on them.

Each measures what it can do, then all reduce in pairs, twice. As DLRover's node check: a pair is
bad where the reduction fails or takes long. In the second round whoever was in a bad pair is with
somebody from a good one, so that who is in a bad pair twice is bad itself.

Nodes hear of each other through the rendezvous store. Nobody waits for a node that does not answer
for longer than ``timeout_secs`` per turn. The pairs are those that the first node that was done has
written; the verdict follows, on every node, from what it has heard in time.
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
"""What a node measures by itself, per second."""
_POLL_SECS = 0.1
_CPU_SIZE, _DEVICE_SIZE = 512, 8192
_COPY_BYTES = 64 * 2**20
_REDUCED_BYTES = 16 * 2**20
_WARM_UP, _REDUCTIONS = 2, 10

Pair = tuple[int, ...]  # Two nodes, three where their number is odd, by their indices
Round = tuple[Sequence[Pair], Mapping[int, float | None]]
"""Who reduced together, and each node's seconds; None: it failed; missing: it has not answered."""


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

        reft check --nnodes 4 --rdzv-endpoint HOST:29400

    Exit code 0: all nodes are well; 1: a node is bad, or it is not clear which one; 2: wrong use.
    """
    if nnodes > 1 and not rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {nnodes} without --rdzv-endpoint: start `reft rendezvous --port 29400` on "
            "a host that "
            f"all reach, and write --rdzv-endpoint HOST:29400"
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
            found = check_nodes(
                *(store, nnodes, node_id or socket.gethostname()),
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
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found, Console())
    if not found["well"]:
        raise typer.Exit(EXIT_NOT_WELL)


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(
        "node", "matmul TFLOP/s", "memory GB/s", "to device GB/s", "all-reduce 1", "2, in ms"
    )
    for node in found["nodes"]:
        alone = node["alone"] or {}
        scaled = zip(MEASURES, (1e12, 1e9, 1e9), strict=True)
        cells = [f"{alone[of] / unit:.3g}" if of in alone else "" for of, unit in scaled]
        rounds = ["" if took is None else f"{took * 1e3:.3g}" for took in node["all_reduce_secs"]]
        table.add_row(escape(node["node"]), *cells, *rounds)
    console.print(table)
    for bad in found["bad"]:
        console.print(
            f"[bold red]bad:[/] {escape(bad['node'])}: {escape('; '.join(bad['reasons']))}"
        )
    for said in found["unclear"]:
        console.print(f"[bold yellow]not clear which:[/] {escape(said)}")
    if found["well"]:
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
    """One node's part; what came out, as JSON. ``store``: of this check alone. ``nodes``: that take
    part.
    name: of this one. ``factor``: how many times as slow as the median of the others a node, or a
    pair, has to be. ``secs``: of every measure. timeout_secs: for which the others are waited for,
    in each turn. Raises StoreError: the rendezvous store does not answer."""
    index = store.add("joined", 1) - 1
    if index >= nodes:
        raise ConfigError(
            f"{name} is node {index + 1} of a check of {nodes}: an earlier check was made "
            f"under this id, or --nnodes is too small; give every check another --rdzv-id"
        )

    def tell(what: str, value: Any) -> None:
        store.set(f"{what}/{index}", json.dumps(value))

    def gather(what: str, of: Sequence[int]) -> dict[int, Any]:
        """What the nodes told, of those who did in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_secs
        while len(found) < len(of) and time.monotonic() < deadline:
            for node in set(of) - found.keys():
                if (data := store.peek(f"{what}/{node}")) is not None:
                    found[node] = json.loads(data)
            time.sleep(_POLL_SECS if len(found) < len(of) else 0)
        return dict(sorted(found.items()))

    def reduce(turn: str, wanted: Sequence[Pair]) -> Round:
        """All reduce in pairs, those that the first node wanted."""
        _, held = store.compare_set(f"pairs{turn}", None, json.dumps(wanted).encode())
        pairs = [tuple(pair) for pair in json.loads(held or b"[]")]
        for number, pair in enumerate(pairs):
            if index in pair:
                took = _reduce(
                    store, f"meet/{turn}.{number}", pair.index(index), len(pair), timeout_secs
                )
                tell(f"reduced{turn}", took)
        return pairs, gather(f"reduced{turn}", [n for pair in pairs for n in pair])

    tell("storage", "" if persist_dir is None else reason_unwritable(persist_dir))
    tell("name", name)
    known = gather("name", range(nodes))
    # Together: what others of the same host do shows in what each can do.
    tell("alone", measure_alone(secs))
    alone = gather("alone", list(known))
    names = [str(known.get(n, f"node {n} of {nodes}")) for n in range(nodes)]
    first = reduce("1", first_pairs(list(alone)))
    rounds = (first, reduce("2", second_pairs(list(alone), first[1])))
    bad, unclear = judge(names, alone, rounds, factor)
    told = gather("storage", list(alone))
    bad += [
        (names[n], [f"it cannot write to {persist_dir}: {why}"]) for n, why in told.items() if why
    ]
    return {
        "nodes": [
            {
                "node": names[n],
                "alone": alone.get(n),
                "all_reduce_secs": [took.get(n) for _, took in rounds],
            }
            for n in range(nodes)
        ],
        "well": not bad and not unclear,
        "bad": [{"node": node, "reasons": reasons} for node, reasons in bad],
        "unclear": unclear,
    }


# -- measures --------------------------------------------------------------------------------------


def measure_alone(secs: float) -> dict[str, float]:
    """Of several devices the slowest counts."""
    vendor = find_local_vendor()
    cpu = vendor is None
    devices = [torch.device("cpu")]
    if vendor is not None:
        devices = [
            torch.device(vendor.type, index) for index in range(vendor.module.device_count())
        ]
    size = _CPU_SIZE if cpu else _DEVICE_SIZE
    found: dict[str, float] = {}
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
            found[name] = min(found.get(name, inf), amount * _per_sec(call, device, secs))
    return found


def _per_sec(call: Callable[[], object], device: torch.device, secs: float) -> float:
    """Calls per second of a busy loop; without the time for which this thread had no core."""

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
    """For which this thread was ready to run and had no core; 0 where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _reduce(
    store: KeyValueStore, meeting: str, rank: int, size: int, timeout_secs: float
) -> float | None:
    """Seconds of one all-reduce over gloo, the median of several; None: it failed."""
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
    """Neighbours; three where their number is odd."""
    order = sorted(nodes)
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order) - 1, 2)]
    if pairs and len(order) % 2:
        pairs[-1] = (*pairs[-1], order[-1])
    return pairs


def second_pairs(nodes: Sequence[int], first: Mapping[int, float | None]) -> list[Pair]:
    """The quickest with the slowest of the first round, who failed there last."""
    order = sorted(nodes, key=lambda n: (first.get(n) is None, first.get(n) or 0.0, n))
    crossed = [order[i // 2] if i % 2 == 0 else order[-1 - i // 2] for i in range(len(order))]
    places = first_pairs(range(len(order)))
    return [tuple(crossed[place] for place in pair) for pair in places]


def judge(
    names: Sequence[str],
    alone: Mapping[int, Mapping[str, float]],
    rounds: Sequence[Round],
    factor: float,
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """The bad nodes, by name, each with its reasons, and what cannot be told: which of two it is.

    Bad is who is ``factor`` times as slow as the median of the others, alone or in a pair of every
    round, or has not answered: who is missing in ``alone``.
    """
    reasons: dict[int, list[str]] = {n: [] for n in range(len(names))}
    for node, why in reasons.items():
        if node not in alone:
            why.append("it does not answer")
    for measure, words in MEASURES.items():
        found = {n: of[measure] for n, of in alone.items() if measure in of}
        for node, value in found.items():
            others = [v for n, v in found.items() if n != node]
            if others and median(others) > factor * value:
                times = median(others) / max(value, 1e-9)
                reasons[node].append(f"it {words} {times:.1f} times slower than the others")
    bad = [_slow(pairs, secs, factor) for pairs, secs in rounds]
    always = set.intersection(*map(set, bad)) if bad else set()
    unclear = []
    for pair in rounds[-1][0] if rounds else ():
        # Those of one pair who were in a bad one in every round cannot be told apart.
        together = [node for node in pair if node in always]
        said = f"all-reduce with others {bad[-1][together[0]]}" if together else ""
        if len(together) == 1:
            reasons[together[0]].append(said)
        elif together and not any(reasons[node] for node in together):
            unclear.append(f"one of {', '.join(names[n] for n in together)}: {said}")
    return [(names[n], why) for n, why in reasons.items() if why], unclear


def _slow(pairs: Sequence[Pair], secs: Mapping[int, float | None], factor: float) -> dict[int, str]:
    times = {pair: [secs.get(n) for n in pair] for pair in pairs}
    took = {
        pair: max(t for t in ts if t is not None) for pair, ts in times.items() if None not in ts
    }
    bad: dict[int, str] = {}
    for pair in pairs:
        others = [t for other, t in took.items() if other != pair]
        if pair not in took:
            bad |= dict.fromkeys(pair, "fails, or takes too long")
        elif others and took[pair] > factor * median(others):
            bad |= dict.fromkeys(
                pair, f"takes {took[pair] / median(others):.1f} times as long as in other pairs"
            )
    return bad
