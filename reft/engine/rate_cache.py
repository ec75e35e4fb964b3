"""What an earlier start has measured of what versions cost, so that the next one need not.

One small file per rank in the memory directory, beside the jobs: the same model in the same layout on the
same machine finds it, whatever the job is called. Where there is a directory on storage a copy is kept there,
for when all memory is lost. Files are replaced as a whole; one that cannot be used is ignored.
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
COPIES = ".rates"
"""Directory of the copies within the persist directory; no job has such a name."""


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
        persist_dir: on storage, where a copy is kept; None: nowhere.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any], persist_dir: Path | None = None) -> None:
        self._facts = json.loads(json.dumps(facts, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self.path = directory / f".rate-{digest[:24]}.json"
        self.copy = None if persist_dir is None else persist_dir / COPIES / self.path.name[1:]
        self._lock = threading.Lock()
        self._told: set[Path] = set()
        self._to_copy: bytes | None = None
        self._copies = False
        self._known = self._read(self.path)
        if not self._known and self.copy is not None:
            self._known = self._read(self.copy)

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
            text = json.dumps(content, indent=1).encode()
            self._write(self.path, text)
            self._to_copy = text
            if self.copy is None or self._copies:
                return
            self._copies = True
        # By a thread of its own: no vote waits for storage, which may hang (P6).
        threading.Thread(target=self._keep_copy, args=(self.copy,), name="reft-rates", daemon=True).start()

    def _keep_copy(self, copy: Path) -> None:
        """Write what was noted, until nothing is new."""
        while True:
            with self._lock:
                text, self._to_copy = self._to_copy, None
                if text is None:
                    self._copies = False
                    return
            self._write(copy, text)

    def _write(self, path: Path, text: bytes) -> None:
        try:
            if path == self.copy:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text)
        except OSError as error:
            if path not in self._told:
                logger.warning("%s: a start that needs it will measure anew: %s", path, error)
            self._told.add(path)

    def _read(self, path: Path) -> dict[str, tuple[Costs, int]]:
        try:
            content = json.loads(path.read_bytes())
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
            logger.warning("%s is ignored: %s", path, cause)
            return {}


_COSTS = TypeAdapter(Costs)


def _steps(value: Any) -> int:
    steps = value["interval_steps"]
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"found an interval of {steps!r} steps; expected at least 1")
    return steps
