"""``reft check``: which of the nodes is slow or hangs, before a job is started on them."""

from __future__ import annotations

import json
import logging
import socket
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reft.cli.memory import EXIT_NOT_WELL, AsJson
from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer, KeyValueStore, StoreError
from reft.env import ENV_NODE_ID
from reft.errors import ConfigError, ReftError
from reft.memory.jobdir import user_secret
from reft.tools.check import MEASURES, check_nodes


def check_command(
    *,
    nnodes: Annotated[int, typer.Option(min=1, help="nodes to check; each of them runs this command")] = 1,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where `reft rendezvous` runs; not needed for one node")
    ] = "",
    rdzv_id: Annotated[str, typer.Option(help="id of this check; use a new one for every check")] = "check",
    node_id: Annotated[
        str, typer.Option(envvar=ENV_NODE_ID, help="name of this node (default: the host's)")
    ] = "",
    factor: Annotated[
        float,
        typer.Option(min=1.05, help="report a node as bad if it is this many times slower than the others"),
    ] = 1.5,
    secs: Annotated[float, typer.Option(min=0.1, help="seconds that each measurement takes")] = 1.0,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds to wait for a node in each round")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Find slow or hanging nodes before training: each node multiplies matrices, copies memory and, where it
    has devices, copies to them; then the nodes all-reduce in pairs, twice, with different partners.

    Run it on every node, with `reft rendezvous` on some host:

        reft check --nnodes 4 --rdzv-endpoint HOST:29400

    Exit code 0: all nodes are well; 1: a node is bad, or it is not clear which one; 2: wrong use.
    """
    if nnodes > 1 and not rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {nnodes} without --rdzv-endpoint: start `reft rendezvous --port 29400` on a host that "
            f"all reach, and write --rdzv-endpoint HOST:29400"
        )
    logging.getLogger("torch").setLevel(logging.ERROR)
    secret = user_secret()
    server = None if rdzv_endpoint else KeyValueServer(listen("127.0.0.1", 0), secret)
    endpoint = rdzv_endpoint if server is None else f"127.0.0.1:{server.port}"
    store = KeyValueStore(endpoint, secret, prefix=f"reft-check/{rdzv_id}/")
    try:
        found = check_nodes(
            store, nnodes, node_id or socket.gethostname(), factor=factor, secs=secs, timeout_secs=timeout
        )
    except StoreError as error:
        raise ReftError(f"the rendezvous at {endpoint} does not answer: {error}") from error
    finally:
        store.close()
        if server is not None:
            server.close()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found, Console())
    if not found["well"]:
        raise typer.Exit(EXIT_NOT_WELL)


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table("node", "matmul TFLOP/s", "memory GB/s", "to device GB/s", "all-reduce 1", "2, in ms")
    for node in found["nodes"]:
        alone = node["alone"] or {}
        scaled = zip(MEASURES, (1e12, 1e9, 1e9), strict=True)
        cells = [f"{alone[of] / unit:.3g}" if of in alone else "" for of, unit in scaled]
        rounds = ["" if took is None else f"{took * 1e3:.3g}" for took in node["all_reduce_secs"]]
        table.add_row(escape(node["node"]), *cells, *rounds)
    console.print(table)
    for bad in found["bad"]:
        console.print(f"[bold red]bad:[/] {escape(bad['node'])}: {escape('; '.join(bad['reasons']))}")
    for said in found["unclear"]:
        console.print(f"[bold yellow]not clear which:[/] {escape(said)}")
    if found["well"]:
        console.print("[green]all nodes are well[/]")
