"""What a start refuses and says of what the job will survive, before anything is copied (P4, P12).

``reft launch --dry-run`` is these checks, what every node would reserve, and then the end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reft.aor.host_adam import AdamRecipe
from reft.checks.preflight import Finding, ScriptLook, Severity
from reft.config import ReftConfig, Variant
from reft.data.order import shares_store
from reft.data.position import Orders, difference, dynamic_refused
from reft.env import ENV_DRY_RUN, ENV_LAUNCHER_PID, ENV_NODE_ID
from reft.errors import ConfigError
from reft.policy.choice import choice_inputs, device_paragraph
from reft.policy.choose import node_bytes, rank_loads
from reft.policy.loads import PartitionSurvival
from reft.state.adam import AdamKind

if TYPE_CHECKING:
    from reft.engine.session import Session

logger = logging.getLogger(__name__)

_NODES_SHOWN = 8


def check_start(session: Session) -> None:
    """Called on all ranks when everything is known that the ranks agree on at the start, before any
    state is restored or copied. An error, on all ranks alike, ends the start and leaves the job's
    memory as it was. Raises SystemExit: this start is a dry run."""
    session.events.write(
        "attached",
        incarnation=session.memory.incarnation,
        coordinate=str(session.coordinate),
        node=session.node,
        tolerance=session.tolerance,
        adapter=type(session.state.adapter).__name__,
    )
    findings = list(_start_findings(session))
    for finding in findings:
        if finding.severity is Severity.REFUSED:
            raise ConfigError(str(finding))
    if session.is_rank_zero and session.copying.takes_versions:
        logger.warning("%s", describe_protection(session))
    for finding in findings:
        # A job that restarts by itself, perhaps on fewer nodes, goes on.
        warn(session, str(finding), strict=not session.memory.identity.restarted)
    if session.is_rank_zero:
        for text in _notes(session):
            logger.warning("%s", text)
    if os.environ.get(ENV_DRY_RUN) == "1":
        _end_dry_run(session)


def _start_findings(session: Session) -> Iterator[Finding]:
    """Collective; on all ranks alike."""
    config, record = session.config, session.protection.record
    several = len(set(session.topology.failure_domains)) > 1
    meant = config.allow_unprotected or config.variant is Variant.NONE or record.ordered
    meant = meant or (record.scheme == "none" and "tolerance" not in config.model_fields_set)
    shortfall = _shortfall(session)
    # Before the first step nothing is lost by a stop; a job that restarts by itself goes on.
    if (
        session.tolerance < config.tolerance
        and several
        and not (meant or session.memory.identity.restarted)
    ):
        yield Finding(
            Severity.REFUSED,
            f'{shortfall}. The job was not started: change that, or write "tolerance": '
            f"{session.tolerance} "
            'into the reft block if that is enough, or "allow_unprotected": true to start it as '
            "it is",
        )
    seen = _persist_dir_lacks(config.persist.dir) if session.is_rank_zero else ""
    lacks = session.control.gather_bytes(seen.encode())[0].decode()
    missing = describe_missing(persists=config.persist.dir is not None)
    allowed = None if config.allow_unprotected else shortfall
    gradients, seen_exact = (
        session.state.gradients,
        all(d.adam_is_exact for d in session.device_findings),
    )
    inexact = (
        None if gradients is None else explain_inexact(gradients.recipe, seen_exact=seen_exact)
    )
    for text in filter(None, (lacks, inexact, missing, allowed)):
        yield Finding(Severity.WARNING, text)


def _notes(session: Session) -> Iterator[str]:
    """What is no error even where the block is strict."""
    if session.device_findings:
        yield device_paragraph(session.device_findings, session.topology.nodes)
    if short := timeout_is_short(session.config, group_timeout_secs()):
        yield short
    if claimed := session.declared_on_one_host:
        yield (
            f"nodes {', '.join(claimed)} are declared (--node-id or {ENV_NODE_ID}) and share a "
            "host: "
            "losses are counted as if each node failed independently, but the loss of the host "
            "loses all "
            "of them"
        )
    if session.config.allow_unprotected and (shortfall := _shortfall(session)):
        yield shortfall


def explain_inexact(recipe: AdamRecipe, *, seen_exact: bool = True) -> str | None:
    """What to say at the start where hosts cannot repeat the owner's step to the bit; None where
    they can. ``seen_exact``: reft.ExactAdam was tried on every device, and was."""
    if recipe.exact and (seen_exact or not recipe.on_device):
        return None
    change = (
        'Leave "+aor" out of "protection"'
        if recipe.kind is AdamKind.EXACT
        else "For partitions that are recomputed to the bit, pass "
        "optimizer=reft.ExactAdam(model.parameters(), lr=...) to deepspeed.initialize instead of "
        '"optimizer", and write "zero_allow_untested_optimizer": true'
    )
    return (
        f'"+aor" saves no traffic here, since every partition is sent after all: the optimizer, '
        f"{recipe.kind}, steps on a device, whose kernels round differently from the host's. "
        f"{change}"
    )


def describe_missing(persists: bool) -> str | None:
    """What a job goes without that `reft launch` did not start (P12); None under ``reft
    launch``."""
    if ENV_LAUNCHER_PID in os.environ:
        return None
    missing = [
        "no node daemon runs",
        "and the loss of a node is survived only if this launcher replaces it",
    ]
    if persists:
        missing.insert(1, 'the checkpoints of "persist" are not written')
    said = (
        "`reft launch` did not start this job. Snapshots and recovery from memory work: killed "
        "trainers "
        f"resume when the launcher restarts them. But {', '.join(missing)}. Start the script with "
        "`reft "
        "launch` instead; it accepts torchrun's options"
    )
    if shares_store():
        said += (
            '. If it stays with torchrun: a restart may hang or end with "Gloo connectFullMesh '
            'failed", also '
            "without reft, because torchrun keeps the addresses of killed trainers in its store; "
            "set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to prevent it"
        )
    return said


def check_orders(session: Session, orders: Orders, why_equal: str | None) -> None:
    """Called on all ranks before the first step, when the script has made its loaders: a
    ConfigError on all ranks alike where they read one thing in different orders, or in one that the
    engine cannot train on."""
    ranks = [
        json.loads(told)
        for told in session.control.gather_bytes(json.dumps(orders, default=str).encode())
    ]
    if found := difference(ranks) or dynamic_refused(ranks, why_equal):
        raise ConfigError(found)


def timeout_is_short(config: ReftConfig, timeout_secs: float | None) -> str | None:
    """What to say where collectives time out before hang detection would name the rank that they
    wait for."""
    limit_secs = config.hang_timeout_secs
    if not config.hang_factor or timeout_secs is None or timeout_secs >= limit_secs:
        return None
    return (
        f"collectives time out after {timeout_secs:.0f} s, but a first step, an evaluation or a "
        "save may "
        f"take {limit_secs:.0f} s (hang_timeout_secs) before reft reports a hang: the ranks that "
        "wait would "
        f"fail first, and no log would name the rank that they waited for. Write "
        f"deepspeed.init_distributed(timeout=timedelta(seconds={2 * limit_secs:.0f})), or "
        f'"hang_timeout_secs": {timeout_secs / 2:.3g} into the reft block'
    )


def group_timeout_secs() -> float | None:
    """After how long the collectives of training fail; None where that is not known."""
    with suppress(AttributeError, RuntimeError, ValueError, TypeError, StopIteration):
        group: Any = torch.distributed.group.WORLD
        device = next(iter(group._device_types))
        return float(group._get_backend(device).options._timeout.total_seconds())
    return None


def _persist_dir_lacks(wanted: Path | None) -> str:
    """On one rank: it is a directory that every node sees. Its own are made, those above it are
    not: where a file system is missing, nothing is written beneath its mount point."""
    there = wanted if wanted is None or wanted.exists() else wanted.parent
    if there is None or (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return ""
    found = "cannot be written to" if there.is_dir() else "is no directory"
    return (
        f"checkpoints cannot be written to persist.dir, {wanted}: {there} {found}. Make it, or "
        "write "
        'another "dir" into "persist"; until then the job can resume from memory only'
    )


def warn(session: Session, text: str, *, strict: bool = True) -> None:
    """Say what would make a recovery impossible or different (P12), by a ConfigError where
    ``strict`` and the block is. On all ranks alike."""
    if strict and session.config.strict:
        raise ConfigError(f'{text}. It is an error because the reft block says "strict": true')
    if session.is_rank_zero:
        logger.warning("%s", text)


def require_first_version(session: Session) -> None:
    """A strict job goes on only if the first version of its state could be taken: no later one
    would be. The ranks have agreed on that."""
    request = session.first_request
    if not session.config.strict or request is None:
        return
    request.done.wait(session.config.commit_timeout_secs)
    if not request.committed:
        why = session.stats.last_error or "it did not finish within commit_timeout_secs"
        warn(
            session,
            f"the version of step {request.label.step} could not be taken: {why}. The job could "
            "not resume "
            "after a failure. Remove the cause, which is in the log",
        )


def conditional_loads() -> list[str]:
    """Loads of the running script that a condition leaves out."""
    return [
        f"line {f.line}: {f.found}" for look in _inspect_script() for f in look.conditional_loads()
    ]


def describe_fresh_state() -> list[str]:
    """What the running script would begin again with in every life: loops that count from 0, places
    that it reads from a client state which nobody keeps, and state of its own; by line, each with
    what to write."""
    return [str(finding) for look in _inspect_script() for finding in look.begins_anew()]


def report_findings(session: Session, findings: list[str]) -> None:
    """What was found after the first step, as one list."""
    if len(findings) > 1:
        lines = "".join(f"\n- {finding}" for finding in findings)
        warn(
            session,
            f"{len(findings)} things of this script would not be as in an undisturbed run:{lines}",
        )
    elif findings:
        warn(session, findings[0])


def rates_from_step(key: str) -> str | None:
    """Where the running script writes this number of a parameter group, in words; empty if that is
    not known, None if it is derived from engine.global_steps at every place."""
    lines = [line for look in _inspect_script() for line in look.group_writes(key)]
    if lines and all(derived for _, derived in lines):
        return None
    places = ", ".join(str(number) for number, derived in lines if not derived)
    return f"line {places}: " if places else ""


def _inspect_script() -> Iterator[ScriptLook]:
    """One, if it can be read."""
    with suppress(OSError, ConfigError):
        if path := getattr(sys.modules.get("__main__"), "__file__", None):
            yield ScriptLook(Path(path).read_bytes(), path)


def describe_protection(session: Session) -> str:
    """The layout, what is survived, and where versions are kept, in a line."""
    config, topology, storage = session.config, session.topology, session.config.persist
    nodes = len(set(topology.failure_domains))
    losses = f"the loss of {session.tolerance} node(s) per sharding group"
    kept = f"on storage in {storage.dir} {_interval(storage.adapts, storage.fixed_steps)}"
    return (
        f"the job is protected: {topology.degrees} on {nodes} node(s), incarnation "
        f"{session.memory.incarnation}; protection {session.protection.record.in_force} survives "
        f"{losses if session.tolerance else 'killed trainers, but no lost node'}; versions in "
        "memory "
        f"{_interval(config.adapts, config.version_steps)}, "
        f"{kept if storage.dir else 'none on storage (persist.dir is not set)'}"
    )


def warn_untried_device(session: Session) -> None:
    """One line on rank 0 of a job on a device. It goes when ``make gpu`` has passed on that
    platform."""
    if session.copying.engine.asynchronous and session.is_rank_zero:
        logger.warning(
            "reft has never run on a %s device, only on simulated ones. It verifies restored "
            "state all the "
            "same; run 'make gpu' in reft's sources first, and compare losses with a run without "
            "reft",
            "ROCm" if getattr(torch.version, "hip", None) else "CUDA",
        )


def _interval(adapts: bool, steps: int) -> str:
    if adapts:
        return "at an interval that reft chooses"
    return {0: "when the job is asked to stop", 1: "every step"}.get(steps, f"every {steps} steps")


def _shortfall(session: Session) -> str | None:
    """What to say where fewer lost nodes are survived than the block wants, or none at all."""
    config, losses = session.config, session.tolerance
    if losses >= max(config.tolerance, 1):
        return None
    scheme, wanted = session.protection.record.scheme, f'"tolerance": {config.tolerance}'
    if losses:
        takes = "'reft plan' shows what would reach it"
        if not session.protection.is_chosen:
            takes = '\'reft plan\' and "protection": "auto" show what would reach it'
        return (
            f"the loss of {config.tolerance} node(s) should be survived ({wanted}), but {scheme} "
            "survives "
            f"{losses}; {takes}"
        )
    return (
        f"TOLERANCE IS 0: {session.protection.why_unprotected()}. The loss of one node loses its "
        "memory for "
        "good; then the job can resume only from disk (persist.dir is "
        f"{config.persist.dir or 'not set'})"
    )


# -- reft launch --dry-run ------------------------------------------------------------------------


def _end_dry_run(session: Session) -> None:
    """Say on rank 0 what the job would keep and copy, and exit; a ConfigError where a node has less
    memory to spare than the job would reserve (P9). Collective."""
    config, topology = session.config, session.topology
    situation = choice_inputs(session)
    owned_by = PartitionSurvival.AOR if config.recompute else PartitionSurvival.PEER
    loads = rank_loads(situation, session.protection.record.parsed, owned_by)
    nodes = []
    assert situation.memory_bytes is not None
    for node, needs in node_bytes(topology, loads).items():
        has = situation.memory_bytes[node]
        said = (
            f"memory of {node}: {_mib(needs)} for {config.arena_count} versions, {_mib(has)} "
            "may be used"
        )
        nodes.append((has - needs, said))
    nodes.sort()
    more = len(nodes) - _NODES_SHOWN
    copied, sent = (
        max(x.to_host_bytes for x in loads.values()),
        max(x.sent_bytes for x in loads.values()),
    )
    lines = [
        f"dry run: {topology.degrees} on {len(set(topology.failure_domains))} node(s), "
        f"{session.engine.name}",
        f"protection: {session.protection.record.scheme}, survives {session.tolerance} lost "
        "node(s) per "
        f"sharding group",
        *(text for _, text in nodes[:_NODES_SHOWN]),
        *([f"{more} more nodes have more to spare"] if more > 0 else ()),
        f"a version: every rank copies at most {_mib(copied)} to the host and sends at most "
        f"{_mib(sent)} to "
        f"other nodes",
        "no step was trained, and the job's own memory was not touched",
    ]
    if session.is_rank_zero:
        print("\n".join(lines), flush=True)
    if lacking := [text for spare, text in nodes if spare < 0]:
        raise ConfigError(
            f"{len(lacking)} of {len(nodes)} node(s) have too little memory for reft: "
            f"{lacking[0]}. The job "
            "would train without snapshots. Free memory there, enlarge the memory directory, "
            "raise "
            "memory_limit_bytes, keep fewer versions (arenas) or less redundancy (protection), "
            "or use more "
            f"nodes"
        )
    raise SystemExit(0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
