"""``reft plan``: memory, traffic, overhead, tolerance and survival of a job, before it is started."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reft.errors import ConfigError

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _count(text: str) -> float:
    """``7B`` or ``7e9``."""
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return scale * float(text if scale == 1.0 else text[:-1])
    except ValueError:
        raise ConfigError(f"--parameters is {text!r}; write a number such as 7B or 7e9") from None


def plan_command(
    *,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="the job's DeepSpeed JSON, with or without a reft block"),
    ] = None,
    cluster: Annotated[str, typer.Option(help="v100, frontier, a100, h100, or a JSON file")] = "h100",
    model: Annotated[
        str | None,
        typer.Option(
            help="llama2-1.3b, -2.7b, -6.7b, -34b, "
            "or the config.json of a Hugging Face model (Llama, Mistral, Qwen)"
        ),
    ] = None,
    pp: Annotated[int, typer.Option("--pp", min=1, help="pipeline stages")] = 1,
    dp: Annotated[
        int | None, typer.Option("--dp", min=1, help="replicas; default: from --nodes or CONFIG")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="tensor-parallel degree")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes, instead of --dp")] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="micro-batches per pipeline and step; default: gradient_accumulation_steps"),
    ] = None,
    rank_order: Annotated[
        str,
        typer.Option(
            help="order of the axes in the ranks, slowest first, or auto, which puts data-parallel peers on "
            "different nodes where possible; default: DeepSpeed's own"
        ),
    ] = "pipe-data-model",
    parameters: Annotated[
        float | None,
        typer.Option(
            parser=_count,
            metavar="N",
            help="count bytes for this many parameters (7B, 1.3e9), spread evenly, as publications do; "
            "without --model, estimate the computing time of a Llama of that size",
        ),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="tokens per sample; default: the model's, at most 4096")
    ] = None,
    tolerance: Annotated[
        int | None,
        typer.Option(min=0, help="node losses that every sharding group should survive; default: CONFIG's"),
    ] = None,
    protection: Annotated[
        str | None, typer.Option(help="protection to use instead of CONFIG's: a scheme such as aec, or auto")
    ] = None,
    host_memory_gb: Annotated[
        float | None,
        typer.Option(
            help="GB that reft may reserve per node; default: CONFIG's limit, or half of the memory"
        ),
    ] = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(min=0, help="fraction of the training time that snapshots may cost; default: CONFIG's"),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="measured windows, from 'reft profile --json FILE', instead of estimated ones"),
    ] = None,
    print_cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="print a cluster as JSON and exit, as a start for your own file"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Predict what a job's protection costs and survives, before it is started.

    Prints bytes per rank, host memory, idle windows, overhead, tolerance from the placement, the interval of
    checkpoints on storage, and alternatives. All times are estimated from published hardware figures.

    Example: reft plan configs/bf16-zero1.json --model llama2-34b --tp 8 --pp 4 --nodes 64

    Exit code 1: the plan does not fit, costs too much, or survives fewer losses than wanted.
    """
    from reft.config import read_object
    from reft.profile.result import ProfileError, ProfileResult
    from reft.tools.planning.cluster import load_cluster
    from reft.tools.planning.display import show_plan
    from reft.tools.planning.job import Layouting, plan_job
    from reft.tools.planning.plan import make_plan

    if print_cluster is not None:
        typer.echo(json.dumps(load_cluster(print_cluster).to_json(), indent=2))
        return
    if config is None:
        raise ConfigError(
            "CONFIG is missing; give the path of a DeepSpeed JSON, such as configs/bf16-zero1.json"
        )
    if host_memory_gb is not None and not 0 < host_memory_gb < math.inf:
        raise ConfigError(f"--host-memory-gb is {host_memory_gb:g}; write a positive number")
    measured = None
    if profile is not None:
        try:
            measured = ProfileResult.load(profile)
        except ProfileError as error:
            raise ConfigError(f"--profile: {error}") from error
    layouting = Layouting(pp=pp, tp=tp, dp=dp, nodes=nodes, micro_batches=micro_batches, order=rank_order)
    values = read_object(config, "the DeepSpeed configuration", "an object")
    job = plan_job(values, load_cluster(cluster), model, layouting, parameters, seq_length=seq_length)
    plan = make_plan(
        job,
        tolerance=tolerance,
        protection=protection,
        memory_bytes=None if host_memory_gb is None else int(host_memory_gb * 1e9),
        max_overhead=max_overhead,
        profile=measured,
    )
    if as_json:
        typer.echo(json.dumps(plan, indent=2))
    else:
        show_plan(job, plan, Console())
    if plan["problems"]:
        raise typer.Exit(1)
