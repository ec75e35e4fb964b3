"""What each protection costs a real job, over snapshots without any, and what recomputing
partitions takes.

One DeepSpeed job trains throughout, one single-threaded process per rank, each rank a node of its
own. The schemes take turns every few steps in the same processes, switched by order as ``reft
protect`` does. Every unit of steps stands between two of what it is compared with, and each
comparison is of such a trio (pairs, 95 % bootstrap intervals of the median):

- ``none``, snapshots and nothing redundant, is compared with ``plain``, no snapshots at all;
- ``X+aor``, where ring peers recompute ZeRO-1 partitions, with ``X``, where they are sent to them;
- ``X/rotate`` and ``X/full``, where peers compare their replicas (``verify.peers``), with ``X``,
  where not;
- every other scheme with ``none``.

A unit first switches and settles, then has one step that is not timed, at whose end a version is
submitted, and then the timed ones: each holds a whole version, the rest of the one before included.
With fewer cores than ranks no rank waits idle, so that every byte that is copied, sent or computed
is paid for.

Whether a job recomputes is fixed at its start: a run with a ``+aor`` scheme keeps room for the
gradients under all schemes, and pauses it where it is not used. A run without shows what the others
keep by themselves.

Of AOR also: host seconds per version and per million parameters, as part of a step, and how fast
the optimizer alone runs on one core while the others rest, against what the memory brings: a step
of Adam reads 16 bytes an element and writes 12; the bound copies as many bytes, in turn with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common import (
    MIB,
    enter_worker,
    launch,
    leave_worker,
    parser,
    progress,
    quicken,
    scratch,
    write_result,
)
from results import estimate, facts, head_lines
from training import build_engine, inner_optimizer
from units import KEEP_FREED_MEMORY, Units, run_unit

PLAIN, NONE, AOR = "plain", "none", "+aor"
SCHEMES = (NONE, "arc", "aec", "arc+aec", "rs:2", "aec+aor")
SETTLE_STEPS = 3
"""Every version of these is waited for: one brings the order, one is whole, one is recomputed."""
ADAM_BYTES = 28
"""Read and written for an element: gradient, master and two moments; master and two moments."""
MOST_ADAM_ELEMENTS = 2**22
BLOCK_BYTES = 4 * 2**20  # that are compared at a time


def compared_with(scheme: str) -> str:
    """The other side of a scheme's pairs."""
    if scheme == NONE:
        return PLAIN
    kept, slash, _ = scheme.partition("/")
    if slash:
        return kept
    return scheme.removesuffix(AOR) if scheme.endswith(AOR) else NONE


def order_of(schemes: Sequence[str], rounds: int) -> list[str]:
    """Units one after the other: every scheme between two of its base, a base shared by
    neighbours."""
    order: list[str] = []
    for _ in range(rounds):
        for scheme in sorted(
            schemes, key=lambda s: (compared_with(s) != PLAIN, compared_with(s) != NONE)
        ):
            base = compared_with(scheme)
            if order[-1:] != [base]:
                order.append(base)
            order += [scheme, base]
    return order


# --- a rank ---------------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    space = enter_worker(options.worker)
    import torch
    import torch.distributed as dist

    import reft
    from reft.verify.peers import PeerCheck

    torch.set_num_threads(1)
    if not options.verbose:
        logging.getLogger("reft").setLevel(logging.ERROR)  # every switch is told otherwise
    engine, data = build_engine(options)
    for _ in range(2):
        engine.train_batch(data)
    recomputed = any(s.endswith(AOR) for s in options.schemes)
    # Whether it recomputes is decided at the start; what of it is used, in every unit.
    first = next(s for s in options.schemes if s != NONE or not recomputed)
    first = first.partition("/")[0].removesuffix(AOR)
    session = reft.attach(
        engine,
        config={
            "enabled": True,
            "allow_unprotected": True,
            "protection": first + AOR * recomputed,
            "has": {"compute_share": 0.0},  # the ranks share this machine: no core is left over
        },
    )
    stats, kept_members = session.stats, session.protection.kept_members

    def settle(scheme: str) -> None:
        if scheme == PLAIN:
            session.use(NONE)
            return
        session.use("has")
        scheme, _, peers = scheme.partition("/")
        worker = session.worker
        others = [f for f in worker.features if not isinstance(f, PeerCheck)]
        if peers:
            check = PeerCheck(by_turns=peers == "rotate", block_bytes=BLOCK_BYTES)
            others.append(check.connect(worker.control, session.context.topology))
        worker.features = worker.copier.features = tuple(others)
        kept = scheme.removesuffix(AOR)
        session.protection.kept_members = kept_members if kept != scheme else tuple
        if os.environ["RANK"] == "0" and session.protection.record.parsed != parse(kept):
            session.protect(kept)
        dist.barrier()
        for _ in range(SETTLE_STEPS):
            engine.train_batch(data)
            session.flush(600.0)
        record = session.protection.record
        if record.parsed != parse(kept) or record.degraded is not None:
            raise SystemExit(
                f"found {record.in_force} in force instead of {kept}: {record.refused or record}"
            )

    def unit(scheme: str) -> dict[str, Any]:
        dist.barrier()
        settle(scheme)
        before = counters(stats)
        found = run_unit(scheme, engine, data, session, options.span)
        after = counters(stats)
        return found | {
            "bytes": 0 if scheme == PLAIN else stats.bytes_per_snapshot,
            "counted": {key: after[key] - before[key] for key in after},
        }

    units, adam, order = [], [], order_of(options.schemes, options.rounds)
    per_round = len(order) // options.rounds
    for number, scheme in enumerate(order):
        units.append(unit(scheme))
        if number % per_round == 0 and recomputed:
            adam += host_adam(engine, options.quick)
        if os.environ["RANK"] == "0" and number % per_round == 0:
            progress(f"round {number // per_round + 1} of {options.rounds}")
    write_result(
        space,
        {
            "units": units,
            "optimizer": type(engine.optimizer).__name__,
            "partition_elements": partition_elements(engine),
            "adam": adam,
            "skipped": dict(stats.skipped),
            "resynced": dict(stats.recompute.resynced),
        },
    )
    session.close()
    dist.barrier()
    leave_worker()


def parse(scheme: str) -> Any:
    from reft.protect.codes import Scheme

    return Scheme.parse(scheme.partition("/")[0])


def counters(stats: Any) -> dict[str, float]:
    """Of one rank, growing."""
    return {
        "committed": stats.committed,
        "received_bytes": stats.peer_bytes,
        "partitions": stats.recompute.versions,
        "resynced": sum(stats.recompute.resynced.values()),
        "recompute_secs": stats.recompute.secs,
        "recompute_cpu_secs": stats.recompute.cpu_secs,
    }


def partition_elements(engine: Any) -> int:
    """Elements of a rank's partition, if there are partitions."""
    return sum(p.numel() for group in inner_optimizer(engine).param_groups for p in group["params"])


def host_adam(engine: Any, quick: bool) -> list[dict[str, float]]:
    """Elements per second of the optimizer alone and of a copy of as many bytes, in turn, on rank 0
    while the others wait; several trials."""
    import torch
    import torch.distributed as dist

    from reft.aor.host_adam import AdamReplica, OwnerStep, ReplicaTensors, read_recipe, read_step

    found = []
    dist.barrier()
    if os.environ["RANK"] == "0":
        optimizer = inner_optimizer(engine)
        count = 2**12 if quick else min(partition_elements(engine), MOST_ADAM_ELEMENTS)
        generator = torch.Generator().manual_seed(1)
        master = torch.randn(count, generator=generator)
        tensors = ReplicaTensors(master, torch.zeros_like(master), torch.zeros_like(master))
        gradient = torch.randn(count, generator=generator)
        groups = read_step(optimizer, 0).groups[:1]
        replica = AdamReplica(read_recipe(optimizer), groups, [tensors])
        source = torch.ones(count * ADAM_BYTES // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        for trial in range(4):
            begin = time.perf_counter()
            replica.apply(OwnerStep(replica.number + 1, groups), [gradient])
            adam = time.perf_counter()
            target.copy_(source)
            copied = time.perf_counter()
            if trial:  # memory is touched first
                found.append({"adam": count / (adam - begin), "bound": count / (copied - adam)})
    dist.barrier()
    return found


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(ranks: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Every scheme against its neighbours."""
    units = Units.of(ranks, options.span)
    names, secs = units.kinds, units.step_secs
    per_round = len(names) // options.rounds
    rounds = [range(start, start + per_round) for start in range(0, len(names), per_round)]
    plain = {
        i: statistics.median(secs[j] for j in numbers if names[j] == PLAIN)
        for numbers in rounds
        for i in numbers
    }
    schemes = {}
    for scheme in options.schemes:
        base = compared_with(scheme)
        mine = units.between(base, scheme)
        counted = {
            key: [[u["counted"][key] for u in units.ranks[i]] for i in mine]
            for key in ranks[0]["units"][0]["counted"]
        }
        compared = units.compare(base, scheme)
        schemes[scheme] = {
            "compared_with": base,
            **{key: found.to_json() for key, found in compared.items()},
            "over_plain": estimate([secs[i] / plain[i] - 1 for i in mine]).to_json(),
            "step_secs": estimate([secs[i] for i in mine]).to_json(),
            "bytes_per_rank": max(u["bytes"] for i in mine for u in units.ranks[i]),
            "received_bytes_per_version": statistics.median(
                max(each) / (options.span + 1) for each in counted["received_bytes"]
            ),
            "committed_part": statistics.mean(min(each) for each in counted["committed"])
            / (options.span + 1),
            "recomputed_partitions": sum(map(sum, counted["partitions"])),
            "partitions_sent_anew": sum(map(sum, counted["resynced"])),
            "recompute": recomputing(ranks, counted, [secs[i] for i in mine], options)
            if scheme.endswith(AOR)
            else None,
        }
    plain_secs = [s for s, name in zip(secs, names, strict=True) if name == PLAIN]
    return {"plain_step_secs": estimate(plain_secs).to_json(), "schemes": schemes}


def recomputing(
    ranks: Sequence[Mapping[str, Any]],
    counted: Mapping[str, Sequence[Sequence[float]]],
    step_secs: Sequence[float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Host time of it, of the rank that took longest in each unit."""
    elements = ranks[0]["partition_elements"]
    out: dict[str, Any] = {"partition_elements": elements}
    for clock in ("secs", "cpu_secs"):
        spent = [max(each) for each in counted[f"recompute_{clock}"]]
        made = [max(each) for each in counted["partitions"]]
        versions = [max(1, *each) for each in counted["committed"]]
        out[clock] = {
            "per_version": estimate(
                [s / v for s, v in zip(spent, versions, strict=True)]
            ).to_json(),
            "per_million_parameters": estimate(
                [s / max(1, m) / (elements / 1e6) for s, m in zip(spent, made, strict=True)]
            ).to_json(),
            "of_step": estimate(
                [s / v / step for s, v, step in zip(spent, versions, step_secs, strict=True)]
            ).to_json(),
        }
    return out


def adam_rates(trials: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Of rank 0."""
    if not trials:
        return None
    return {
        "elements_per_sec": estimate([t["adam"] for t in trials]).to_json(),
        "bound_elements_per_sec": estimate([t["bound"] for t in trials]).to_json(),
        "of_bound": estimate([t["adam"] / t["bound"] for t in trials]).to_json(),
        "bytes_per_element": ADAM_BYTES,
    }


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        *head_lines(result),
        f"step {result['plain_step_secs']['median'] * 1e3:.1f} ms without snapshots, "
        f"{result['rounds']} rounds, {result['steps_per_unit']} timed steps a unit",
        "",
        f"{'scheme':<12}{'against':<9}{'overhead, 95 % interval':<28}"
        f"{'over plain':>10}{'cpu ms':>8}"
        f"{'stall ms':>10}{'MiB kept':>10}{'received':>10}{'committed':>11}",
    ]
    for name, s in result["schemes"].items():
        overhead = s["overhead"]
        low, high = overhead["ci95"]
        interval = f"{overhead['median']:7.2%}  [{low:.2%}, {high:.2%}]"
        lines.append(
            f"{name:<12}{s['compared_with']:<9}{interval:<28}"
            f"{s['over_plain']['median']:>10.2%}"
            f"{s['extra_cpu_secs_per_rank']['median'] * 1e3:>8.1f}"
            f"{s['stall_secs']['median'] * 1e3:>10.2f}{s['bytes_per_rank'] / MIB:>10.1f}"
            f"{s['received_bytes_per_version'] / MIB:>10.1f}{s['committed_part']:>11.0%}"
        )
    for name, s in result["schemes"].items():
        if s["recompute"] is not None:
            r = s["recompute"]
            parts = [
                f"{r[clock]['per_version']['median'] * 1e3:.2f} {what} ms a version "
                f"({r[clock]['of_step']['median']:.2%} of a step, "
                f"{r[clock]['per_million_parameters']['median'] * 1e3:.2f} ms per million "
                "parameters)"
                for clock, what in (("secs", "clock"), ("cpu_secs", "processor"))
            ]
            lines.append(f"{name}: recomputing takes {'; '.join(parts)}")
    adam = result["host_adam"]
    if adam is not None:
        lines.append(
            f"Adam alone: {adam['elements_per_sec']['median'] / 1e6:.0f} M elements/s, memory "
            f"would bring {adam['bound_elements_per_sec']['median'] / 1e6:.0f} M: "
            f"{adam['of_bound']['median']:.0%}"
        )
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__ or "")
    made.set_defaults(dp=3, zero=1, dtype="bf16", params=10e6, micro_batches=4)
    made.add_argument(
        "--schemes", nargs="+", default=list(SCHEMES), help=f"(default {' '.join(SCHEMES)})"
    )
    made.add_argument("--rounds", type=int, default=20, help="units of every scheme (default 20)")
    made.add_argument("--span", type=int, default=2, help="timed steps of a unit (default 2)")
    options = made.parse_args()
    if NONE not in options.schemes:
        options.schemes.insert(0, NONE)
    if options.quick:
        quicken(options)
        options.rounds = 1
    if options.worker:
        run_rank(options)
    for scheme in options.schemes:
        if parse(scheme.removesuffix(AOR)).least_members > options.dp:
            made.error(f"{scheme} needs more than --dp {options.dp} members")
        if scheme.endswith(AOR) and not options.zero:
            made.error(f"{scheme} needs --zero 1: without it there are no partitions")
    os.environ.update(KEEP_FREED_MEMORY)
    with scratch(options) as space:
        ranks, _ = launch(options, space)
    result = facts("schemes", options) | {
        "optimizer": ranks[0]["optimizer"],
        "rounds": options.rounds,
        "steps_per_unit": options.span,
        **evaluate(ranks, options),
        "host_adam": adam_rates(ranks[0]["adam"]),
        "skipped": ranks[0]["skipped"],
        "resynced": ranks[0]["resynced"],
    }
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
