"""Starts of one script on one node, each to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.attack.jobs import DEADLINE_SECS, launched
from tests.job.cluster import deepspeed_json

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 8  # of each script


class Run:
    """Starts of a script that share a memory. ``config``: keys for DeepSpeed's JSON."""

    def __init__(self, root: Path, script: str, **config: Any) -> None:
        self._root, self._script, self._config = root, script, config
        self.memory, self.saved, self.out = root / "memory", root / "saved", root / "out"
        self.persisted = root / "persisted"

    def start(self, block: dict[str, Any], *options: str, **env: str) -> tuple[int, str]:
        config = deepspeed_json(self._root, reft={"enabled": True, **block}, **self._config)
        options = ("--memory-dir", str(self.memory), "--job-id", "contact", *options)
        arguments = (config, str(self.saved / "contact"))
        script = SCRIPTS / self._script
        with launched(
            script, *arguments, cwd=self._root, out=self.out, options=options, env=env
        ) as started:
            started.log.write_bytes(b"")
            code = started.processes[0].wait(DEADLINE_SECS)
        return code, started.log.read_text(errors="replace")

    def losses(self) -> list[str]:
        return (self.out / "losses").read_text().splitlines()


def losses_without_reft(root: Path, **config: Any) -> list[str]:
    run = Run(root, "never_loads.py", **config)
    code, log = run.start({"enabled": False})
    assert code == 0, log
    assert len(run.losses()) == STEPS
    return run.losses()
