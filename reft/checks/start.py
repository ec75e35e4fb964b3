"""Checks a job at its start, before anything is restored or copied (P4, P12).

The result is a list of findings, each of which is a refusal of the start, a warning or a note.
``reft launch --dry-run`` prints the list and the memory that every node would reserve, and exits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from reft.aor.host_adam import AdamRecipe
from reft.checks.preflight import ScriptLook, storage_findings
from reft.config import PersistConfig, ReftConfig, Variant
from reft.control.control import ControlGroup
from reft.data.comparison import Orders, difference, dynamic_refused
from reft.data.order import shares_store
from reft.env import ENV_DRY_RUN, ENV_LAUNCHER_PID, ENV_NODE_ID
from reft.errors import ConfigError
from reft.findings import Finding, Severity
from reft.grid import Topology
from reft.memory.protection_record import ProtectionRecord
from reft.policy.choice import JobFacts, choice_inputs, device_paragraph
from reft.policy.choose import node_bytes, rank_loads
from reft.policy.loads import PartitionSurvival
from reft.state.adam import AdamKind
from reft.state.adapters import StateAdapter

_NODES_SHOWN = 8


@dataclass(frozen=True)
class StartFacts:
    """Facts about a job after its ranks have connected.

    Attributes:
        job: inputs for the choice of the protection.
        record: the active protection.
        incarnation: number of this start of the job.
        restarted: whether this is an automatic restart, perhaps on fewer nodes. Restarts are never
            refused.
        chosen: whether reft chose the protection (``auto``), rather than the user.
        why_unprotected: why the job does not survive the loss of a node; empty if it does.
        recipe: how peers recompute optimizer partitions; None if they do not.
        declared_on_one_host: nodes to which the user gave an id, and which share a host with
            another node.
    """

    job: JobFacts
    record: ProtectionRecord
    incarnation: int
    restarted: bool
    chosen: bool
    why_unprotected: str
    recipe: AdamRecipe | None
    declared_on_one_host: Sequence[str]


def start_findings(start: StartFacts) -> Iterator[Finding]:
    """Yield the findings at the start, the same ones on all ranks; refusals first. Collective."""
    job, record = start.job, start.record
    config, topology = job.config, job.topology
    several = len(set(topology.failure_domains)) > 1
    meant = config.allow_unprotected or config.variant is Variant.NONE or record.ordered
    meant = meant or (record.scheme == "none" and "tolerance" not in config.model_fields_set)
    shortfall = _shortfall(start)
    # Refuse only a first start, because no progress is lost then. An automatic restart must
    # continue.
    if record.tolerance < config.tolerance and several and not (meant or start.restarted):
        yield Finding(
            Severity.REFUSED,
            f"{shortfall}. The job was not started: change that, or write "
            f'"tolerance": {record.tolerance} into the reft block if that is enough, or '
            f'"allow_unprotected": true to start it as it is',
        )
    if config.variant is not Variant.NONE:
        protection = describe_protection(config, topology, record, start.incarnation)
        yield Finding(Severity.NOTE, protection)
    on_storage = list(map(str, storage_findings(config))) if job.control.rank == 0 else []
    unwritable = job.control.gather_bytes("".join(on_storage).encode())[0].decode()
    missing = describe_missing(persists=config.persist.dir is not None)
    exact = all(device.adam_is_exact for device in job.devices)
    inexact = None if start.recipe is None else explain_inexact(start.recipe, seen_exact=exact)
    unexported = explain_unexported(config.persist)
    unprotected = None if config.allow_unprotected else shortfall
    for text in (unwritable, inexact, missing, unexported, unprotected):
        if text:
            yield Finding(Severity.WARNING, text)
    for text in _notes(start):
        yield Finding(Severity.NOTE, text)


def _notes(start: StartFacts) -> Iterator[str]:
    """Yield notes, which do not prevent a start even if the ``reft`` block is strict."""
    job = start.job
    if job.devices:
        yield device_paragraph(job.devices, job.topology.nodes)
    if job.copies.asynchronous:
        yield describe_untried_device()
    if frozen := describe_frozen(job):
        yield frozen
    if short := timeout_is_short(job.config, group_timeout_secs()):
        yield short
    if start.declared_on_one_host:
        yield (
            f"nodes {', '.join(start.declared_on_one_host)} are declared (--node-id or "
            f"{ENV_NODE_ID}) and share a host: losses are counted as if each node failed "
            f"independently, but the loss of the host loses all of them"
        )
    if job.config.allow_unprotected and (shortfall := _shortfall(start)):
        yield shortfall
    if job.config.persist.local:
        yield describe_local_disks(job.config.persist, start.record)


def describe_frozen(job: JobFacts) -> str | None:
    """Describe what versions cost if weights are frozen, as below adapters; None if none are."""
    frozen = job.adapter.frozen_bytes() if isinstance(job.adapter, StateAdapter) else 0
    if not frozen:
        return None
    total = sum(job.adapter.expected_bytes())
    on_device = job.copies.asynchronous
    return (
        f"{_mib(frozen)} of {_mib(total)} on rank {job.control.rank} are frozen weights: every "
        f"version has them, and from the third one on they are "
        f"{'not sent again' if on_device else 'neither copied nor sent again'} while they do not "
        f"change{' (they are still copied from the device, to be compared)' if on_device else ''}"
    )


def explain_inexact(recipe: AdamRecipe, *, seen_exact: bool = True) -> str | None:
    """Return a warning if hosts cannot repeat an optimizer step bit for bit; None if they can.

    Args:
        recipe: how peers recompute the optimizer step.
        seen_exact: whether reft.ExactAdam was tested on every device and gave the same bits.
    """
    if recipe.exact and (seen_exact or not recipe.on_device):
        return None
    change = (
        'Leave "+aor" out of "protection"'
        if recipe.kind is AdamKind.EXACT
        else "For partitions that are recomputed to the bit, write "
        '"optimizer": {"type": "ExactAdam", "params": {"lr": ...}} and '
        '"zero_allow_untested_optimizer": true into the DeepSpeed JSON, or pass '
        "optimizer=reft.ExactAdam(...) to deepspeed.initialize (Megatron-DeepSpeed: "
        "--optimizer exact_adam, with exact_adam.patch)"
    )
    return (
        f'"+aor" saves no traffic here, since every partition is sent after all: the optimizer, '
        f"{recipe.kind}, steps on a device, whose kernels round differently from the host's. "
        f"{change}"
    )


def describe_missing(persists: bool) -> str | None:
    """If ``reft launch`` did not start this job, describe what the job lacks (P12); otherwise None.

    Args:
        persists: whether checkpoints on storage are configured.
    """
    if ENV_LAUNCHER_PID in os.environ:
        return None
    missing = [
        "no node daemon runs",
        "and the loss of a node is survived only if this launcher replaces it",
    ]
    if persists:
        missing.insert(1, 'the checkpoints of "persist" are not written')
    text = (
        "`reft launch` did not start this job. Snapshots and recovery from memory work: killed "
        f"trainers resume when the launcher restarts them. But {', '.join(missing)}. Start the "
        "script with `reft launch` instead; it accepts torchrun's options"
    )
    if shares_store():
        text += (
            '. If it stays with torchrun: a restart may hang or end with "Gloo connectFullMesh '
            'failed", also without reft, because torchrun keeps the addresses of killed trainers '
            "in its store; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to prevent it"
        )
    return text


def check_orders(control: ControlGroup, orders: Orders, why_equal: str | None) -> None:
    """Compare the orders in which all ranks read samples. Collective.

    Called before the first step, when the script has made its loaders.

    Args:
        control: connections between the ranks.
        orders: the orders in which this rank reads samples.
        why_equal: why all replicas must train on the same number of micro-batches; None if they
            need not.

    Raises:
        ConfigError: ranks read the same data in different orders, or in an order that the engine
            cannot train on. All ranks raise it.
    """
    replies = control.gather_bytes(json.dumps(orders, default=str).encode())
    ranks = [json.loads(reply) for reply in replies]
    if found := difference(ranks) or dynamic_refused(ranks, why_equal):
        raise ConfigError(found)


def timeout_is_short(config: ReftConfig, timeout_secs: float | None) -> str | None:
    """Return a warning if collectives time out before hang detection could name the culprit.

    Args:
        config: the ``reft`` block.
        timeout_secs: time-out of training's collectives; None if unknown.
    """
    limit_secs = config.hang_timeout_secs
    if not config.hang_factor or timeout_secs is None or timeout_secs >= limit_secs:
        return None
    return (
        f"collectives time out after {timeout_secs:.0f} s, but a first step, an evaluation or a "
        f"save may take {limit_secs:.0f} s (hang_timeout_secs) before reft reports a hang: the "
        "ranks that wait would fail first, and no log would name the rank that they waited for. "
        f"Write deepspeed.init_distributed(timeout=timedelta(seconds={2 * limit_secs:.0f})), or "
        f'"hang_timeout_secs": {timeout_secs / 2:.3g} into the reft block'
    )


def group_timeout_secs() -> float | None:
    """Return the time-out of training's collectives in seconds; None if unknown."""
    with suppress(AttributeError, RuntimeError, ValueError, TypeError, StopIteration):
        group: Any = torch.distributed.group.WORLD
        device = next(iter(group._device_types))
        return float(group._get_backend(device).options._timeout.total_seconds())
    return None


def conditional_loads() -> list[str]:
    """Describe calls in the running script that load a checkpoint only under a condition."""
    return [
        f"line {f.line}: {f.found}" for look in _inspect_script() for f in look.conditional_loads()
    ]


def describe_fresh_state() -> list[str]:
    """Describe state that the running script would reset at every restart, by line, with advice.

    This covers loops that count from 0, values from a client state that reft does not have, and
    state that the script holds outside the engine.
    """
    return [str(finding) for look in _inspect_script() for finding in look.begins_anew()]


def merge_findings(findings: Sequence[str]) -> str | None:
    """Join the findings of the first step into one message; None if there are none."""
    if len(findings) > 1:
        lines = "".join(f"\n- {finding}" for finding in findings)
        return (
            f"{len(findings)} things of this script would not be as in an undisturbed run:{lines}"
        )
    return findings[0] if findings else None


def rates_from_step(key: str) -> str | None:
    """Describe where the running script writes a value of an optimizer's parameter group.

    Args:
        key: key of the value in the group, such as ``lr``.

    Returns:
        The line numbers of the writes that do not derive the value from engine.global_steps, as
        text; empty if no writes are known; None if every write derives it.
    """
    lines = [line for look in _inspect_script() for line in look.group_writes(key)]
    if lines and all(derived for _, derived in lines):
        return None
    places = ", ".join(str(number) for number, derived in lines if not derived)
    return f"line {places}: " if places else ""


def _inspect_script() -> Iterator[ScriptLook]:
    """Yield the analysis of the running script; nothing if the script cannot be read."""
    with suppress(OSError, ConfigError):
        if path := getattr(sys.modules.get("__main__"), "__file__", None):
            yield ScriptLook(Path(path).read_bytes(), path)


def describe_protection(
    config: ReftConfig, topology: Topology, record: ProtectionRecord, incarnation: int
) -> str:
    """Describe in one line the layout, the tolerance, and where and how often versions are kept."""
    storage = config.persist
    nodes = len(set(topology.failure_domains))
    survived = "killed trainers, but no lost node"
    if record.tolerance:
        survived = f"the loss of {record.tolerance} node(s) per sharding group"
    kept = "none on storage (persist.dir is not set)"
    if storage.dir:
        kept = f"on storage in {storage.dir} {_interval(storage.adapts, storage.fixed_steps)}"
    return (
        f"reft protects this job from its first committed version on: {topology.degrees} on "
        f"{nodes} node(s), incarnation {incarnation}; "
        f"protection {record.in_force} survives {survived}; versions in memory "
        f"{_interval(config.adapts, config.version_steps)}, {kept}"
    )


def describe_local_disks(persist: PersistConfig, record: ProtectionRecord) -> str:
    """Describe in one line what versions on disks survive that only their own node sees."""
    lost = "the loss of one disk makes all versions there unusable"
    if record.tolerance:
        lost = f"they survive the loss of {record.tolerance} node's disk(s) per sharding group"
    return (
        f"{persist.dir} is not shared by the nodes: each node keeps its own part of the versions "
        f"on storage there, with copies and parities ({record.in_force}), and {lost}"
    )


def explain_unexported(persist: PersistConfig) -> str | None:
    """Explain why nothing is exported at the end of a job on local disks; None if it is, or is not
    requested."""
    if not persist.local or persist.export_at_end is None:
        return None
    return (
        f"persist.export_at_end will export nothing: no node sees the parts of the others in "
        f"{persist.dir}. Name a directory there that all nodes share, or copy the directories of "
        "all nodes into one and run 'reft persist --from' on it"
    )


def describe_untried_device() -> str:
    """Return a note that reft has not run on this platform's devices yet.

    To be removed when ``make gpu`` has passed on the platform.
    """
    platform = "ROCm" if getattr(torch.version, "hip", None) else "CUDA"
    return (
        f"reft has never run on a {platform} device, only on simulated ones. It verifies restored "
        f"state all the same; run 'make gpu' in reft's sources first, and compare losses with a "
        f"run without reft"
    )


def _interval(adapts: bool, steps: int) -> str:
    if adapts:
        return "at an interval that reft chooses"
    return {0: "when the job is asked to stop", 1: "every step"}.get(steps, f"every {steps} steps")


def _shortfall(start: StartFacts) -> str | None:
    """Return a message if the job survives no node loss, or fewer than requested; else None."""
    config, losses = start.job.config, start.record.tolerance
    if losses >= max(config.tolerance, 1):
        return None
    scheme, wanted = start.record.scheme, f'"tolerance": {config.tolerance}'
    if losses:
        takes = "'reft plan' shows what would reach it"
        if not start.chosen:
            takes = '\'reft plan\' and "protection": "auto" show what would reach it'
        return (
            f"the loss of {config.tolerance} node(s) should be survived ({wanted}), but {scheme} "
            f"survives {losses}; {takes}"
        )
    return (
        f"TOLERANCE IS 0: {start.why_unprotected}. The loss of one node loses its memory for good; "
        f"then the job can resume only from disk (persist.dir is {config.persist.dir or 'not set'})"
    )


# -- reft launch --dry-run ------------------------------------------------------------------------


def is_dry_run() -> bool:
    return os.environ.get(ENV_DRY_RUN) == "1"


def end_dry_run(start: StartFacts, engine: str) -> NoReturn:
    """Print on rank 0 what the job would keep and copy, and exit. Collective.

    Args:
        start: facts about the job.
        engine: name of the training engine.

    Raises:
        ConfigError: a node has less free memory than the job would reserve (P9).
        SystemExit: every node has enough memory.
    """
    job, record = start.job, start.record
    config, topology = job.config, job.topology
    inputs = choice_inputs(job)
    owned_by = PartitionSurvival.AOR if config.recompute else PartitionSurvival.PEER
    loads = rank_loads(inputs, record.parsed, owned_by)
    nodes = []
    assert inputs.memory_bytes is not None
    for node, needs in node_bytes(topology, loads).items():
        has = inputs.memory_bytes[node]
        line = (
            f"memory of {node}: {_mib(needs)} for {config.arena_count} versions, {_mib(has)} may "
            f"be used"
        )
        nodes.append((has - needs, line))
    nodes.sort()
    more = len(nodes) - _NODES_SHOWN
    copied = max(load.to_host_bytes for load in loads.values())
    sent = max(load.sent_bytes for load in loads.values())
    lines = [
        f"dry run: {topology.degrees} on {len(set(topology.failure_domains))} node(s), {engine}",
        f"protection: {record.scheme}, survives {record.tolerance} lost node(s) per sharding group",
        *(line for _, line in nodes[:_NODES_SHOWN]),
        *([f"{more} more nodes have more to spare"] if more > 0 else ()),
        f"a version: every rank copies at most {_mib(copied)} to the host and sends at most "
        f"{_mib(sent)} to other nodes",
        "no step was trained, and the job's own memory was not touched",
    ]
    if job.control.rank == 0:
        print("\n".join(lines), flush=True)
    if lacking := [line for spare, line in nodes if spare < 0]:
        raise ConfigError(
            f"{len(lacking)} of {len(nodes)} node(s) have too little memory for reft: "
            f"{lacking[0]}. The job would train without snapshots. Free memory there, enlarge the "
            f"memory directory, raise memory_limit_bytes, keep fewer versions (arenas) or less "
            f"redundancy (protection), or use more nodes"
        )
    raise SystemExit(0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
