"""reft and what people use today, in turns on this machine: ``make peers``.

    python benchmarks/peers build/peers [--quick] [--json FILE]

What a version of every step costs (``memory_copy.py``: DP2, 60M parameters, 687 MiB a rank), and
the time from a killed trainer and a killed node with a spare to the next step (``mttr.py``: DP2,
98M parameters). The first argument is the folder of the packages. All on CPUs over gloo: DLRover's
and NVIDIA's asynchronous copies, which ask for a device, are not in it, nor is torchft, which
restarts nothing. Half an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SURVIVES = {
    "copy": "nothing: the floor of what a copy costs",
    "reft": "a trainer and a node",
    "dlrover": "a trainer",
    "nvidia": "a trainer and a node",
    "dcp": "all, with the storage",
}
AFTER = {
    "reft": "reft, a version every step",
    "nvidia": "NVIDIA's local checkpoints every step, torchrun",
    "torchrun": "DeepSpeed's checkpoint every 10 steps, torchrun",
}


def run(script: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), "--json", *options]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return found


def figure(found: dict[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{found['median']:.2f} s [{low:.2f}, {high:.2f}]"


def table(cost: dict[str, Any], after: dict[str, Any]) -> str:
    lines = [
        "| a version every step | costs, per step | of a core | survives |",
        "|---|---|---|---|",
    ]
    for name, survives in SURVIVES.items():
        saver = cost["savers"][name]
        extra, core = (
            figure(saver["extra_secs_per_step_with_drain"]),
            figure(saver["core_secs_per_version"]),
        )
        lines.append(f"| {name} | {extra} | {core} | {survives} |")
    kinds = list(after["ways"])
    lines += [
        "",
        "| to the next step after a kill | " + " | ".join(kinds) + " | steps lost | other losses |",
    ]
    lines.append("|---" * (len(kinds) + 3) + "|")
    for system, what in AFTER.items():
        ways = [after["ways"][kind][system] for kind in kinds]
        secs = " | ".join(figure(way["failure_to_step_secs"]) for way in ways)
        lost = ", ".join(f"{way['lost_steps']:.0f}" for way in ways)
        lines.append(f"| {what} | {secs} | {lost} | {after['differing_steps'][system]} |")
    lines += [
        "",
        "NVIDIA's files are found by rank: if torchrun gives the surviving node another, all "
        "steps are lost.",
    ]
    return "\n".join(lines)


def main(packages: str, *options: str) -> None:
    quick = ["--quick"] if "--quick" in options else []
    peers = ["--peers", str(Path(packages).absolute())]
    cost = run("memory_copy.py", "--seq", "32", *peers, *quick)
    kills = quick or ["--kinds", "trainer", "node_spare", "--kills", "4", "--kills-per-turn", "2"]
    after = run("mttr.py", "--pp", "1", "--dp", "2", *peers, *kills)
    print(f"plain step {figure(cost['plain_step_secs'])}\n\n{table(cost, after)}")
    if "--json" in options:
        target = Path(options[options.index("--json") + 1])
        target.write_text(json.dumps({"cost": cost, "after": after}, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
