"""``reft check``: which of the nodes is slow or hangs, before a job is started on them."""

from __future__ import annotations

import json
import logging
import socket
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reft.cli.memory import EXIT_NOT_WELL, AsJson
from reft.control.authenticated import listen
from reft.control.keyvalue import KeyValueServer, KeyValueStore
from reft.control.rendezvous_store import StoreError
from reft.env import ENV_NODE_ID
from reft.errors import ConfigError, ReftError
from reft.memory.jobdir import user_secret
from reft.tools.check import MEASURES, Checked, Settings, check_nodes


def check_command(
    *,
    nnodes: Annotated[int, typer.Option(min=1, help="nodes to check, each of which runs this")] = 1,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where `reft rendezvous` runs; with one node not needed")
    ] = "",
    rdzv_id: Annotated[str, typer.Option(help="of this check; another one for every check")] = "check",
    node_id: Annotated[
        str, typer.Option(envvar=ENV_NODE_ID, help="name of this node (default: the host's)")
    ] = "",
    factor: Annotated[
        float, typer.Option(min=1.05, help="a node that is so many times slower than the others is bad")
    ] = 1.5,
    secs: Annotated[float, typer.Option(min=0.1, help="that each measure of a node takes")] = 1.0,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds to wait for a node, in each turn")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Find the slow or hanging node of many before training: each multiplies matrices, copies memory and,
    where it has devices, copies to them; then all reduce in pairs, twice, with other partners.

    On every node, with `reft rendezvous` somewhere:

        reft check --nnodes 4 --rdzv-endpoint HOST:29400

    Exit code 0: all are well; 1: one is bad, or it is not clear which; 2: wrong use.
    """
    if nnodes > 1 and not rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {nnodes} without --rdzv-endpoint: start `reft rendezvous --port 29400` on a host that "
            f"all reach, and write --rdzv-endpoint HOST:29400"
        )
    logging.getLogger("torch").setLevel(logging.ERROR)
    settings = Settings(nnodes, node_id or socket.gethostname(), factor, secs, timeout)
    secret = user_secret()
    server = None if rdzv_endpoint else KeyValueServer(listen("127.0.0.1", 0), secret)
    endpoint = rdzv_endpoint if server is None else f"127.0.0.1:{server.port}"
    store = KeyValueStore(endpoint, secret, prefix=f"reft-check/{rdzv_id}/")
    try:
        checked = check_nodes(store, settings)
    except StoreError as error:
        raise ReftError(f"the rendezvous at {endpoint} does not answer: {error}") from error
    finally:
        store.close()
        if server is not None:
            server.close()
    _show(checked, as_json=as_json)
    if not checked.verdict.well:
        raise typer.Exit(EXIT_NOT_WELL)


def _show(checked: Checked, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(checked.to_json(), indent=2))
        return
    table = Table("node", "matmul TFLOP/s", "memory GB/s", "to device GB/s", "all-reduce 1", "2, in ms")
    for index, name in enumerate(checked.names):
        alone = checked.alone.get(index)
        cells = ["no answer"] * 3
        if alone is not None:
            scaled = zip(MEASURES, (1e12, 1e9, 1e9), strict=True)
            cells = [f"{alone[of] / unit:.3g}" if of in alone else "" for of, unit in scaled]
        took = [secs.get(index, "") for _, secs in checked.rounds]
        rounds = ["failed" if t is None else f"{t * 1e3:.3g}" if isinstance(t, float) else "" for t in took]
        table.add_row(escape(name), *cells, *rounds)
    console = Console()
    console.print(table)
    for name, why in checked.verdict.bad.items():
        console.print(f"[bold red]bad:[/] {escape(name)}: {escape('; '.join(why))}")
    for said in checked.verdict.unclear:
        console.print(f"[bold yellow]not clear which:[/] {escape(said)}")
    if checked.verdict.well:
        console.print("[green]all nodes are well[/]")
