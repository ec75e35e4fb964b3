"""DeepSpeed's hostfile on `reft launch`'s command line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from reft.elastic.hostfile import read_hostfile
from reft.elastic.options import LaunchOptions, parse_options
from reft.errors import ConfigError

from .cluster import cluster


def parse(path: Path, *options: str) -> LaunchOptions:
    return parse_options(["--hostfile", str(path), *options, "train.py"])


def write(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path, "# two\nworker-1 slots=4\n\n  worker-2   slots=16 # fat\n")
    assert read_hostfile(path) == {"worker-1": 4, "worker-2": 16}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host; write a line HOST slots=N"),
        ("worker-1\n", "line 1: 'worker-1'; write HOST slots=N"),
        ("a slots=2\nb slots=0\n", "line 2: 'b slots=0'"),
        ("a slots=2\na slots=2\n", "line 2: a is there twice"),
        ("a slots=2 max=3\n", "line 1"),
        ("elsewhere.invalid slots=2\n", f"this host is {socket.gethostname()}"),
    ],
)
def test_what_is_no_hostfile_is_said_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_hostfile_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hostfile .*absent cannot be read"):
        parse(tmp_path / "absent")


def test_place_and_counts_are_the_hostfiles(tmp_path: Path) -> None:
    path = write(tmp_path, "worker-1 slots=4\nlocalhost slots=3\n")
    options = parse(path)
    assert (options.config.max_nodes, options.config.nproc_per_node) == (2, 3)
    assert options.config.rdzv_endpoint == "worker-1:29400"
    assert parse(path, "--num_gpus", "2").config.nproc_per_node == 2
    assert parse(path, "--rdzv-endpoint", "login:1").config.rdzv_endpoint == "login:1"
    with pytest.raises(ConfigError, match="--num-gpus is 4, but localhost has slots=3"):
        parse(path, "--num-gpus", "4")
    assert parse_options(["--num-gpus", "5", "train.py"]).config.nproc_per_node == 5
    with pytest.raises(ConfigError, match="--num-gpus is 0"):
        parse_options(["--num-gpus", "0", "train.py"])


def test_a_job_of_one_host_runs_by_its_hostfile(tmp_path: Path) -> None:
    options = ("--hostfile", str(write(tmp_path, "localhost slots=2\n")))
    with cluster(tmp_path, "light.py", "end", nodes=1, options=options, external_rendezvous=False) as job:
        assert job.wait(240) == {0: 0}
        assert len(job.events("start")) == 2
