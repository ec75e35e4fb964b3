"""Every protection in a real job that loses as many nodes of one sharding group as it promises to survive.

    python -m tests.demo.protections [--only TEXT ...] [--json FILE]

``reft demo`` once per scheme and layout; each compares every loss with an undisturbed run's, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILL_AFTER_STEP = 5


@dataclass(frozen=True)
class Demo:
    """One run: a node per rank, and a stage's first nodes are lost at once.

    Attributes:
        protection: the scheme.
        pp, dp: degrees.
        lost: nodes that fail together.
        zero: ZeRO stage.
        dtype: of the weights.
    """

    protection: str
    pp: int
    dp: int
    lost: int
    zero: int = 0
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.protection} pp{self.pp} dp{self.dp} zero{self.zero} {self.dtype}, {self.lost} node(s) lost"

    def arguments(self) -> list[str]:
        # Ranks are numbered stage by stage: the last ones of the first stage are one sharding group.
        kills = ",".join(f"{KILL_AFTER_STEP}:{self.dp - 1 - n}" for n in range(self.lost))
        return [
            *("--pp", str(self.pp), "--dp", str(self.dp), "--nodes", str(self.pp * self.dp)),
            *("--zero", str(self.zero), "--dtype", self.dtype, "--protection", self.protection),
            *("--kill", kills, "--steps", str(2 * KILL_AFTER_STEP)),
        ]


DEMOS = (
    Demo("aec", 2, 3, 1),
    Demo("rs:2", 2, 3, 2),
    Demo("arc+aec", 2, 3, 2, zero=1, dtype="bf16"),
    Demo("arc+aor", 2, 3, 1, zero=1, dtype="fp16"),
    Demo("aec+aor", 2, 3, 1, zero=1, dtype="bf16"),
    Demo("aec", 1, 4, 1, zero=1, dtype="bf16"),
    Demo("rs:2", 1, 4, 2, zero=1, dtype="fp16"),
    Demo("arc+aec", 1, 4, 2),
    Demo("aec", 1, 5, 1),
    Demo("rs:2", 1, 5, 2),
    Demo("rs:2+aor", 1, 5, 2, zero=1, dtype="bf16"),
    Demo("arc:2+aor", 1, 4, 2, zero=1, dtype="bf16"),
)


def run(demo: Demo, folder: Path) -> dict[str, Any]:
    """What ``reft demo`` found, in short."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "reft.cli", "demo", *demo.arguments(), "--json", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if not path.exists():
        return {"name": demo.name, "good": False, "problem": done.stdout[-2000:]}
    report = json.loads(path.read_text())
    return {
        "name": demo.name,
        "command": " ".join(["reft", "demo", *demo.arguments()]),
        "good": report["good"] and done.returncode == 0,
        "problem": report["problem"],
        "tolerance": report["tolerance"],
        "max_abs_loss_difference": report["max_abs_loss_difference"],
        "recoveries": [
            {key: r[key] for key in ("source", "version", "lost_steps", "load_secs")}
            for r in report["recoveries"]
        ],
        "sent_bytes": report["snapshots"]["sent_bytes"],
        "bytes_per_rank": report["snapshots"]["bytes_per_rank"],
        "secs": round(time.monotonic() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo.protections", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="runs whose name holds one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    chosen = [d for d in DEMOS if not options.only or any(text in d.name for text in options.only)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, demo in enumerate(chosen, 1):
            result = run(demo, Path(folder))
            results.append(result)
            said = "equal to the last bit" if result["good"] else f"BAD: {result['problem']}"
            print(f"[{number}/{len(chosen)}] {demo.name}: {said}", flush=True)
            if options.json is not None:
                good = all(r["good"] for r in results)
                options.json.write_text(json.dumps({"good": good, "runs": results}, indent=2))
    return 0 if all(result["good"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
