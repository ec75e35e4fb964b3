"""What an earlier start has measured of what versions cost, so that the next one need not.

One small file per rank in the memory directory, beside the jobs: the same model in the same layout on the
same machine finds it, whatever the job is called. It is replaced as a whole; one that cannot be used is
ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from reft.durable import write_durably
from reft.errors import ConfigError
from reft.policy.frequency import Costs

logger = logging.getLogger(__name__)

Tier = Literal["memory", "storage"]


def machine_facts() -> dict[str, Any]:
    """What copies and steps are fast or slow by, of the host."""
    models = {
        line.partition(":")[2].strip()
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith(("model name", "CPU part"))
    }
    return {
        "machine": platform.machine(),
        "processors": sorted(models),
        "cores": len(os.sched_getaffinity(0)),
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class RateCache:
    """The measures of one rank.

    Args:
        directory: where the file lies.
        facts: JSON values by which model, layout and machine are known; with other ones, nothing is found.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        self._facts = json.loads(json.dumps(facts, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self.path = directory / f".rate-{digest[:24]}.json"
        self._lock = threading.Lock()
        self._told = False
        self._known = self._read()

    def known(self, tier: Tier) -> tuple[Costs, int] | None:
        """Costs and interval in steps, as measured last; None where they are to be measured."""
        return self._known.get(tier)

    def note(self, tier: Tier, costs: Costs, interval_steps: int) -> None:
        """Keep what was measured. A directory that cannot be written is said once: training goes on (P6)."""
        with self._lock:
            self._known[tier] = costs, interval_steps
            content = {
                "facts": self._facts,
                **{name: {"costs": vars(c), "interval_steps": k} for name, (c, k) in self._known.items()},
            }
            try:
                write_durably(self.path, json.dumps(content, indent=1).encode())
            except OSError as error:
                if not self._told:
                    logger.warning("%s: the next start will measure anew: %s", self.path, error)
                self._told = True

    def _read(self) -> dict[str, tuple[Costs, int]]:
        try:
            content = json.loads(self.path.read_bytes())
            if content["facts"] != self._facts:
                raise ValueError("it is of something else")
            return {
                tier: (_COSTS.validate_python(content[tier]["costs"]), _steps(content[tier]))
                for tier in ("memory", "storage")
                if tier in content
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, ValidationError, ConfigError) as error:
            cause = str(error).partition("\n")[0]
            logger.warning("%s is ignored, the first steps are measured anew: %s", self.path, cause)
            return {}


_COSTS = TypeAdapter(Costs)


def _steps(value: Any) -> int:
    steps = value["interval_steps"]
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"found an interval of {steps!r} steps; expected at least 1")
    return steps
