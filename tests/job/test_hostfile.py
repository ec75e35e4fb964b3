"""DeepSpeed's hostfile on `reft launch`'s command line."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import psutil
import pytest

from reft.errors import ConfigError
from reft.job.hosts import is_this_host, show_devices
from reft.job.options import LaunchOptions, parse_options

from .cluster import cluster


def parse(path: Path, *options: str) -> LaunchOptions:
    return parse_options(["--hostfile", str(path), *options, "train.py"])


def write(directory: Path, text: str) -> Path:
    path = directory / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Hostfile is empty"),
        ("worker-1\n", "bad entry: worker-1, .*write lines HOST slots=N"),
        ("a slots=2\na slots=2\n", "multiple entries for a"),
        ("elsewhere.invalid slots=2\n", f"this host is {socket.gethostname()}"),
    ],
)
def test_what_is_no_hostfile_is_said(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"--hostfile .*absent cannot be read"):
        parse(tmp_path / "absent")


def test_place_and_counts_are_the_hostfiles(tmp_path: Path) -> None:
    path = write(tmp_path, "# two\nworker-1 slots=4\n\n  localhost   slots=3 # fat\n")
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


@pytest.mark.parametrize(
    ("given", "nodes", "devices"),
    [
        (("--include", "localhost"), 1, None),
        (("--include", "worker-1@localhost:2,0"), 2, (0, 2)),
        (("-i", "localhost:1"), 1, (1,)),
        (("--exclude", "worker-1@worker-2"), 1, None),
        (("-e", "localhost:0@worker-2"), 2, (1, 2)),
    ],
)
def test_hosts_and_slots_are_filtered_as_deepspeed_filters_them(
    tmp_path: Path, given: tuple[str, ...], nodes: int, devices: tuple[int, ...] | None
) -> None:
    path = write(tmp_path, "worker-1 slots=4\nlocalhost slots=3\nworker-2 slots=1\n")
    options = parse(path, *given)
    assert (options.config.max_nodes, options.devices) == (nodes, devices)
    assert options.config.nproc_per_node == (3 if devices is None else len(devices))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--include", "worker-1"), f"names worker-1, and this host is {socket.gethostname()}"),
        (("--exclude", "localhost"), f"names worker-1, and this host is {socket.gethostname()}"),
        (("--include", "nobody"), "--include 'nobody': Hostname 'nobody' not found in hostfile"),
        (("--include", "localhost:7"), "No slot '7' specified on host 'localhost'"),
        (("--include", "localhost:x"), "HOST or HOST:SLOT,SLOT"),
        (("--include", "localhost", "--exclude", "worker-1"), "mutually exclusive"),
        (("--include", "localhost", "--num-gpus", "1"), "--num-gpus cannot be used with --include"),
    ],
)
def test_a_filter_that_fits_nothing_is_said(tmp_path: Path, given: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(write(tmp_path, "worker-1 slots=4\nlocalhost slots=3\n"), *given)
    assert says in str(caught.value)


@pytest.mark.process
def test_without_a_hostfile_the_devices_of_this_host_are_filtered() -> None:
    from deepspeed.accelerator import get_accelerator

    options = parse_options(["--include", "localhost:0", "train.py"])
    assert (options.config.max_nodes, options.config.nproc_per_node) == (1, 1)
    assert options.devices == ((0,) if get_accelerator().device_count() > 1 else None)


def test_a_name_is_this_hosts_by_any_of_its_addresses() -> None:
    own = [socket.gethostname(), "localhost", "127.0.0.1", "127.1.2.3", "::1"]
    found = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    own += [a.address for a in found if a.family == socket.AF_INET]
    assert [name for name in own if not is_this_host(name)] == []
    others = ("elsewhere.invalid", "192.0.2.7", "2001:db8::1", "", "a" * 300)
    assert [name for name in others if is_this_host(name)] == []


def test_hip_sees_the_devices_that_are_left_where_its_own_variable_says_others() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "0,1,2,3"}
    show_devices((0, 2), environ)
    assert environ["HIP_VISIBLE_DEVICES"] == "0,2"
    environ.clear()
    show_devices((0, 2), environ)
    assert "HIP_VISIBLE_DEVICES" not in environ


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ((), ["0,2"] * 2),
        pytest.param(("--virtual-local-rank",), ["0", "2"], marks=pytest.mark.integration),
    ],
)
def test_trainers_see_the_devices_that_are_left(
    tmp_path: Path, more: tuple[str, ...], seen: list[str]
) -> None:
    path = str(write(tmp_path, "localhost slots=3\n"))
    options = ("--hostfile", path, "--include", "localhost:0,2", *more)
    with cluster(tmp_path, "light.py", "end", nodes=1, options=options, external_rendezvous=False) as job:
        assert job.wait(240) == {0: 0}
        assert sorted(event["devices"] for event in job.events("start")) == seen


def test_some_nodes_of_a_hostfile_are_spares(tmp_path: Path) -> None:
    path = write(tmp_path, "worker-1 slots=4\nworker-2 slots=4\nlocalhost slots=4\n")
    config = parse(path, "--spares", "1").config
    assert (config.min_nodes, config.max_nodes, config.rdzv_endpoint) == (2, 2, "worker-1:29400")
    assert parse(path, "--spares", "2").config.rdzv_endpoint == "worker-1:29400", "the spares need it"
    with pytest.raises(ConfigError, match=r"--spares is 3, but --hostfile .* has 3 nodes.*write 0 to 2"):
        parse(path, "--spares", "3")
