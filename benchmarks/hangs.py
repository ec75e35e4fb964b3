"""From a hang to its name and to the next step, at steps of 0.3 s and the default limits.

    .venv/bin/python benchmarks/hangs.py --json

One job of two nodes, a trainer each (DP2), is struck so many times in each way:

- ``trainer_stopped``: SIGSTOP of a trainer;
- ``trainer_loop``: a trainer loops for ever in Python, within a step;
- ``link_dead``: all connections of a trainer lead to nobody from now on, and stay open;
- ``daemon_stopped``, ``launcher_stopped``: SIGSTOP of a node's daemon or launcher; training goes
  on.

``named_secs``: until a launcher logs who hangs. ``named_right``: it is who was struck (of a dead
link: that all wait for each other). ``step_secs``: until both ranks have done a step after that;
where training goes on, after the fault. ``recovered_secs``, of a daemon or launcher: until another
serves, or it runs on. A step that is done again must have the same loss: ``differing_steps``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from common import parser, progress, scratch
from local_cluster import LocalCluster
from results import estimate, facts, run_lines

KINDS = ("trainer_stopped", "trainer_loop", "link_dead", "daemon_stopped", "launcher_stopped")
GOAL_SECS = 10.0
_WAIT_SECS = 400.0
_SETTLED_STEPS = 8
"""Between two hangs: the first two steps of a life have a longer limit."""


class Job:
    """The job that hangs again and again."""

    def __init__(self, directory: Path, memory_root: Path) -> None:
        self.out = directory
        block = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "reft": {"enabled": True},
        }
        config = directory / "ds_config.json"
        config.write_text(json.dumps(block))
        self.cluster = LocalCluster(
            command=[str(Path(__file__).with_name("hangs_job.py")), str(config), str(directory)],
            directory=directory,
            nodes=2,
            procs_per_node=1,
            options=("--max-restarts", "1000"),
            env={"TMPDIR": str(directory)},
            job_id="hangs",
            memory_root=memory_root,
        )

    def steps(self) -> list[list[tuple[float, int, str]]]:
        """Of each rank: time, step and loss, in order."""
        found = []
        for rank in (0, 1):
            path = self.out / f"steps-{rank}"
            *lines, _torn = path.read_text().split("\n") if path.exists() else [""]
            rows = [line.split() for line in lines]
            found.append([(float(at), int(step), loss) for at, step, loss in rows])
        return found

    def differing(self) -> list[int]:
        losses: dict[tuple[int, int], set[str]] = {}
        for rank, rows in enumerate(self.steps()):
            for _, step, loss in rows:
                losses.setdefault((rank, step), set()).add(loss)
        return sorted({step for (_, step), same in losses.items() if len(same) > 1})

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        self.cluster.wait_until(condition, _WAIT_SECS, what)

    def steps_after(self, moment: float, number: int) -> None:
        """Wait until every rank has done so many steps that ended after ``moment``."""
        self.wait(
            lambda: all(sum(at > moment for at, _, _ in rows) >= number for rows in self.steps()),
            f"{number} steps of both ranks",
        )

    def first_after(self, moment: float) -> float:
        """When the slower rank ended its first step after ``moment``."""
        self.steps_after(moment, 1)
        return max(next(at for at, _, _ in rows if at > moment) for rows in self.steps())


def hang_once(job: Job, kind: str, number: int) -> dict[str, Any]:
    """Strike one rank's node, and wait until the job has named it and goes on."""
    job.steps_after(time.time(), _SETTLED_STEPS)
    cluster, victim = job.cluster, number % 2
    trainer = cluster.trainers(victim)[0]
    rank = int(trainer.environ()["RANK"])
    daemon = int((cluster.status(victim) or {})["pid"])
    launcher = cluster.current[victim].process.pid
    ends = [cluster.current[i].log_path.stat().st_size for i in (0, 1)]
    began = time.time()
    pids = {"trainer_stopped": trainer.pid, "daemon_stopped": daemon, "launcher_stopped": launcher}
    if kind in pids:
        os.kill(pids[kind], signal.SIGSTOP)
    else:
        (job.out / "struck").unlink(missing_ok=True)
        (job.out / f"{'loop' if kind == 'trainer_loop' else 'link'}-{rank}").touch()
        job.wait((job.out / "struck").exists, "the rank that is struck")
        began = (job.out / "struck").stat().st_mtime
    said, right = {
        "trainer_stopped": ("the job hangs", f"rank {rank} hangs: stopped"),
        "trainer_loop": ("the job hangs", f"rank {rank} hangs: in no communication"),
        "link_dead": ("the job hangs", "all ranks wait for each other"),
        "daemon_stopped": ("does not answer", f"the node daemon (process {daemon})"),
        "launcher_stopped": ("it is continued", f"{launcher}"),
    }[kind]

    def told() -> str:
        texts = [
            cluster.current[i].log_path.read_bytes()[ends[i] :].decode(errors="replace")
            for i in (0, 1)
        ]
        return "\n".join(line for text in texts for line in text.splitlines() if said in line)

    job.wait(lambda: bool(told()), f"a word of {kind}")
    named = time.time()
    facts_of = {"node": victim, "rank": rank, "named_secs": round(named - began, 2)}
    # All launchers write the verdict; the first line is whoever was first.
    facts_of |= {"said": told().splitlines()[0][-300:], "named_right": right in told()}
    if kind == "daemon_stopped":
        job.wait(
            lambda: (cluster.status(victim) or {}).get("pid") not in (daemon, None),
            "the next daemon",
        )
        facts_of["recovered_secs"] = round(time.time() - began, 2)
    elif kind == "launcher_stopped":
        job.wait(lambda: psutil.Process(launcher).status() != psutil.STATUS_STOPPED, "the launcher")
        facts_of["recovered_secs"] = round(time.time() - began, 2)
    moment = began if "recovered_secs" in facts_of else named
    return facts_of | {"step_secs": round(job.first_after(moment) - began, 2)}


def measure(options: argparse.Namespace, space: Any) -> dict[str, Any]:
    (folder := space.disk / "hangs").mkdir(parents=True)
    (shm := space.shm / "hangs").mkdir(parents=True)
    job = Job(folder, shm)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    with job.cluster:
        job.cluster.start()
        for number in range(options.rounds):
            for kind in options.kinds:
                found[kind].append(hang_once(job, kind, number))
                progress(f"{kind}: {found[kind][-1]}")
        differing = job.differing()
        ends = [[at for at, _, _ in rows] for rows in job.steps()]
        took = [b - a for times in ends for a, b in pairwise(times)]
    ways = {
        kind: {
            "named_secs": estimate([r["named_secs"] for r in those]).to_json(),
            "step_secs": estimate([r["step_secs"] for r in those]).to_json(),
            "most_named_secs": max(r["named_secs"] for r in those),
            "all_named_right": all(r["named_right"] for r in those),
            "all": those,
        }
        for kind, those in found.items()
    }
    goals = {
        f"{k}_named_within_10_secs": w["most_named_secs"] <= GOAL_SECS for k, w in ways.items()
    }
    return {
        "step_secs": estimate(took).to_json(),
        "ways": ways,
        "differing_steps": differing,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "goals": goals,
    }


def table(result: dict[str, Any]) -> str:
    lines = run_lines(result)
    for kind, way in result["ways"].items():
        lines.append(
            f"{kind:16} named after {way['named_secs']['median']:5.1f} s (most "
            f"{way['most_named_secs']:.1f}), next step after {way['step_secs']['median']:5.1f} s, "
            f"named right: {way['all_named_right']}"
        )
    return "\n".join([*lines, *(f"{name}: {met}" for name, met in result["goals"].items())])


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="ways to hang")
    made.add_argument("--rounds", type=int, default=2, help="hangs of each kind (default 2)")
    options = made.parse_args()
    if options.quick:
        options.kinds, options.rounds = ["trainer_stopped"], 1
    with scratch(options) as space:
        head = facts("hangs", options)
        del head["model"]  # two small linear layers, and a sleep
        result = {**head, "rounds": options.rounds, **measure(options, space)}
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
