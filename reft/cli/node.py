"""What the node's own files tell, beside what the whole job knows: storage, traffic, protection."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from reft.cli.history import summary
from reft.cli.protect import describe
from reft.memory.jobdir import DAEMON_FILE, JobDir, is_running, read_json
from reft.node.history import read_history, restarts_among
from reft.node.protection import read_record


def node_status(path: Path) -> dict[str, Any]:
    """The daemon's last word, and whether it still runs."""
    directory = JobDir.open(path)
    daemon = read_json(path / DAEMON_FILE)
    rounds = read_history(path)
    return {
        "job_id": directory.job_id,
        "node": directory.node,
        "memory": str(path),
        "daemon_runs": daemon is not None and is_running(daemon),
        "status": directory.read_status(),
        "restarts": summary(rounds),
        "last_recovery": restarts[-1].to_json() if (restarts := restarts_among(rounds)) else None,
        "protection": None if (record := read_record(path)) is None else record.to_json(),
    }


def node_is_well(node: dict[str, Any]) -> bool:
    """Whether the node is as it should be."""
    status = node["status"] or {}
    persist = status.get("persist") or {}
    stale = status.get("stale_since_step") is not None or persist.get("stale_since_step") is not None
    return bool(node["daemon_runs"]) and status.get("last_committed") is not None and not stale


def node_table(node: dict[str, Any]) -> Table:
    """For people."""
    status = node["status"] or {}
    persist = status.get("persist") or {}
    table = Table(title=f"job {node['job_id']}, node {node['node']}", show_header=False)
    table.add_row("restarts", node["restarts"])
    table.add_row("daemon", "runs" if node["daemon_runs"] else "does not run")
    table.add_row("newest commit", _label(status.get("last_committed")))
    for name, said in zip(("protection", ""), describe(node["protection"] or {}), strict=False):
        table.add_row(name, said)
    table.add_row("snapshots", _staleness(status.get("stale_since_step"), status.get("stale_cause")))
    table.add_row(
        "skipped", ", ".join(f"{n}x {c}" for c, n in (status.get("skipped") or {}).items()) or "none"
    )
    for said in status.get("quiet") or ():
        table.add_row("QUIET", said)
    table.add_row("on disk", _label(persist.get("last")) if persist.get("dir") else "not configured")
    if persist.get("dir"):
        table.add_row("persist", _persisting(persist))
    for name, said in _rates(status.get("trainers") or {}).items():
        table.add_row(name, said)
    for name, said in _traffic(status.get("trainers") or {}).items():
        table.add_row(name, said)
    if recomputed := _recomputed(status.get("trainers") or {}):
        table.add_row("recomputed", recomputed)
    if updated := status.get("updated_unix_secs"):
        table.add_row("as of", f"{max(0.0, time.time() - updated):.0f} s ago")
    return table


def _persisting(persist: dict[str, Any]) -> str:
    said = _staleness(persist.get("stale_since_step"), persist.get("error"))
    lag, writing = persist.get("lag_steps") or 0, persist.get("writing")
    return f"{said}; writes {_label(writing)}, {lag} steps behind memory" if writing else said


def _rates(trainers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """How often versions are taken, and go to storage, and why, where the job finds that itself; by the rank
    that asks for the longest interval."""
    rows = {}
    for name, key, when in (
        ("snapshot rate", "memory_rate", "after a failure that memory survives"),
        ("persist rate", "persist_rate", "when memory fails"),
    ):
        rates = [r for t in trainers.values() if (r := (t.get("stats") or {}).get(key))]
        if not rates:
            continue
        rate = max(rates, key=lambda r: r["interval_steps"])
        seen = "not measured yet" if rate["overhead"] is None else f"{rate['overhead']:.1%} observed"
        most = max(rate["most_lost_steps"], 2 * rate["agreed_steps"])
        looks = "; looks at steps without a snapshot now" if rate.get("observing") else ""
        rows[name] = (
            f"every {rate['agreed_steps']} steps ({rate['why']}{looks}); "
            f"{seen} of {rate['max_overhead']:.1%} allowed; at most {most} steps are lost {when}"
        )
    return rows


def _traffic(trainers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Bytes of the newest version of all ranks of the node, by what they are; nothing before there is one."""
    counted = [t["stats"]["traffic"] for t in trainers.values() if "traffic" in (t.get("stats") or {})]
    rows = {}
    for name, direction in (("a version copies", "to_host"), ("and sends to other nodes", "sent")):
        total: Counter[str] = sum((Counter(c[direction]) for c in counted), Counter())
        parts = ", ".join(f"{kind.replace('_', ' ')} {_size(n)}" for kind, n in total.items())
        if counted:
            rows[name] = f"{_size(total.total())} ({parts})" if total else "nothing"
    return rows


def _recomputed(trainers: dict[str, dict[str, Any]]) -> str | None:
    """How often ring peers' partitions were recomputed on this node, and how often and why copied; None where
    that was not asked for."""
    stats = [t["stats"] for t in trainers.values() if t.get("stats")]
    made = sum(s.get("recomputed", 0) for s in stats)
    copied: Counter[str] = sum((Counter(s.get("resynced") or {}) for s in stats), Counter())
    if not made and not copied:
        return None
    causes = ", ".join(f"{n}x {cause}" for cause, n in copied.items())
    return f"{made} partitions; copied from their owners: {causes or 'none'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _label(value: dict[str, int] | None) -> str:
    return "none" if value is None else f"step {value['step']} (incarnation {value['incarnation']})"


def _staleness(since: int | None, cause: str | None) -> str:
    return "up to date" if since is None else f"STALE since step {since}: {cause}"
