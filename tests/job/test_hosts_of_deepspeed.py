"""DeepSpeed's launcher over two hosts of a hostfile, each started by itself (``--no_ssh``): a host that is lost with
its memory comes back empty, and the same commands resume the job from the other's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import free_port

from .test_unlaunched import ROOT, SCRIPT, config

HOSTS = ("127.0.0.1", "127.0.0.2")


def start(folder: Path, *arguments: str) -> tuple[list[int], str]:
    """Run the job on both hosts to its end, each with a memory of its own: exit codes and all that was said."""
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    port = str(free_port())
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("REFT_", "TORCHELASTIC", "PET_", "TEST_"))
    }
    kept |= {"TEST_OUT": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = []
    for rank in range(len(HOSTS)):
        command = (
            *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(folder / "hostfile")),
            *("--no_ssh", "--node_rank", str(rank), "--master_addr", HOSTS[0], "--master_port", port),
            *(SCRIPT, str(folder / "ds_config.json"), *arguments),
        )
        own = {"REFT_MEMORY_DIR": str(folder / f"host{rank}"), "REFT_NODE_ID": f"host{rank}"}
        with (folder / f"host{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen(command, cwd=folder, env=kept | own, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(600) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait(60)
    return codes, "".join((folder / f"host{rank}.log").read_text() for rank in range(len(HOSTS)))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_host_that_is_lost_with_its_memory_is_made_whole_by_the_other(tmp_path: Path) -> None:
    config(tmp_path)
    codes, said = start(tmp_path, "import", "kill")
    assert all(codes), said[-4000:]
    assert "`reft launch` did not start this job" in said
    shutil.rmtree(tmp_path / "host1")
    codes, said = start(tmp_path, "import", "kill")
    assert codes == [0, 0], said[-4000:]
    assert len(re.findall(r"rank \d loaded memory:", said)) == 2, said[-4000:]
    assert len(re.findall(r"rank \d ended at step 6", said)) == 2
