"""`reft plan` as a command of the tests, and the jobs that it plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.commands import Answer, command

ROOT = Path(__file__).parents[2]
FP16, BF16_ZERO1 = (str(ROOT / "configs" / name) for name in ("fp16.json", "bf16-zero1.json"))


def run(*arguments: str) -> Answer:
    answer = command("plan", *arguments)
    return answer._replace(err=" ".join(answer.err.split()))


def write(path: Path, values: Any) -> str:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


SMALL = ("--model", "llama2-1.3b", "--cluster", "v100", "--pp", "4", "--tp", "4", "--dp", "8")
EIGHT = (*SMALL, "--cluster", "a100")  # On nodes of eight GPUs; those of the V100 testbed have four
LARGE = ("--model", "llama2-34b", "--cluster", "h100", "--tp", "8", "--pp", "4", "--dp", "16")
QUICK = ("--micro-batches", "4", "--json")


def gb(alternatives: dict[str, Any], name: str, *parts: str) -> float:
    return sum(alternatives[name]["bytes"][part] for part in parts) / 1e9
