"""P9, P12: `reft launch --dry-run` of a pipeline on two nodes says what every node would reserve, and is not well
where a node has too little."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.job.cluster import cluster

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def dry_run(directory: Path, block: dict[str, Any]) -> tuple[set[int], str]:
    config = json.loads((EXAMPLES / "pipeline.json").read_text()) | {"reft": {"enabled": True, **block}}
    path = directory / "pipeline.json"
    path.write_text(json.dumps(config))
    script = (str(EXAMPLES / "pipeline.py"), "--deepspeed_config", str(path))
    options = ("--rank-order", "across-nodes", "--dry-run")
    with cluster(directory, *script, procs_per_node=2, options=options) as job:
        codes = job.wait(300)
        assert not list((directory / "memory").rglob("*.arena")), "nothing was copied"
    logs = sorted(directory.glob("node*.log"))
    return set(codes.values()), "".join(log.read_text(errors="replace") for log in logs)


def test_p9_every_node_is_told_what_it_would_reserve_and_what_it_has(tmp_path: Path) -> None:
    codes, log = dry_run(tmp_path, {})
    assert codes == {0}, log[-4000:]
    assert "dry run: PP2xDP2xTP1 on 2 node(s), PipelineEngine" in log
    assert "survives 1 lost node(s)" in log
    needed = re.findall(r"memory of (\S+): ([\d.]+) MiB for 2 versions, ([\d.]+) MiB may be used", log)
    assert len({node for node, _, _ in needed}) == 2
    assert all(0 < float(mib) <= float(usable) for _, mib, usable in needed)
    assert not re.search(r"step \d+ loss", log)


def test_p9_too_little_memory_is_not_well(tmp_path: Path) -> None:
    codes, log = dry_run(tmp_path, {"memory_margin_bytes": 2**50})
    assert codes == {2}, log[-4000:]
    assert "2 of 2 node(s) have too little memory for reft" in log
    assert "raise memory_limit_bytes" in log
    assert "Traceback" not in log
