"""Jobs that meet in a real etcd cluster of three members, which loses its leader, its majority, every lease."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from reft.errors import ConfigError
from reft_etcd.etcd import EtcdClient, EtcdSettings, EtcdStore
from tests.etcd import EtcdCluster
from tests.job.conftest import SECRET
from tests.prefork import Popen

from .cluster import WatchedCluster, cluster

CONF = "keep_alive_interval=2,keep_alive_max_attempt=4,join_timeout=300"
QUICK = ("--max-restarts", "0", "--rdzv-conf", CONF)
WAIT_SECS = 300.0
Fault = Callable[[EtcdCluster], AbstractContextManager[None]]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as made:
        yield made


def trains(job: WatchedCluster, attempt: int) -> None:
    made = len(job.events("step", attempt=attempt))
    job.wait_for("step", made + 20, WAIT_SECS, attempt=attempt)


@contextmanager
def leader_killed(etcd: EtcdCluster) -> Iterator[None]:
    leader = etcd.wait_for_leader()
    etcd.kill(leader)
    yield
    etcd.wait_for_leader(but=leader)
    etcd.start(leader)


@contextmanager
def leader_stopped(etcd: EtcdCluster) -> Iterator[None]:
    leader = etcd.wait_for_leader()
    etcd.stop(leader)
    yield
    etcd.wait_for_leader(but=leader)
    etcd.resume(leader)


@contextmanager
def majority_lost(etcd: EtcdCluster) -> Iterator[None]:
    for index in (0, 1):
        etcd.kill(index)
    yield
    for index in (0, 1):
        etcd.start(index)
    etcd.wait_for_leader()


@contextmanager
def every_lease_lost(etcd: EtcdCluster) -> Iterator[None]:
    assert etcd.revoke_all_leases() >= 2
    yield


FAULTS = (leader_killed, leader_stopped, majority_lost, every_lease_lost)


@pytest.mark.integration
@pytest.mark.parametrize(
    "faults", [FAULTS[:1], pytest.param(FAULTS[1:], marks=pytest.mark.nightly)]
)
def test_p6_training_does_not_notice_what_etcd_suffers_and_a_node_is_replaced_meanwhile(
    tmp_path: Path, etcd: EtcdCluster, faults: Sequence[Fault]
) -> None:
    start = {"nodes": 2, "etcd": etcd.endpoint, "options": QUICK}
    with cluster(tmp_path / "job", "allreduce.py", "100000", **start) as job:
        trains(job, attempt=0)
        for fault in faults:
            with fault(etcd):
                trains(job, attempt=0)
            trains(job, attempt=0)
        with leader_killed(etcd):
            job.kill_node(1)
            job.start_node(1)
            trains(job, attempt=1)
        job.finish()
        assert job.wait(WAIT_SECS) == {0: 0, 1: 0}
        job.wait_until(lambda: not job.survivors(), WAIT_SECS, "the end of all processes")


USER = {"REFT_ETCD_USER": "reft", "REFT_ETCD_PASSWORD": "right"}


def launch(
    tmp_path: Path, endpoint: str, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint('trained', [k for k, v in os.environ.items() if v == 'right'])\n"
    )
    command = [
        *(sys.executable, "-m", "reft.job.launch", "--nnodes", "1", "--rdzv-backend", "etcd-v3"),
        *(
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            "job",
            "--memory-dir",
            str(tmp_path / "memory"),
        ),
        *options,
        str(script),
    ]
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        process = Popen(command, stdout=out, stderr=err, env={**os.environ, **(env or {})})
        code = process.wait(240)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def assert_refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), done.stderr


# -- what is said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "conf", "env", "said"),
    [
        ("", {}, {}, "HOST1:2379,HOST2:2379,HOST3:2379"),
        (" , ", {}, {}, "--rdzv-endpoint"),
        ("h:port", {}, {}, "host:port"),
        ("http://a:1,https://b:1", {}, {}, "for all members"),
        ("h", {"password": "x"}, {}, "REFT_ETCD_PASSWORD_FILE"),
        ("h", {"user": "u"}, {}, "without a password"),
        ("h", {}, {"REFT_ETCD_PASSWORD": "x"}, "no user"),
        ("h", {"user": "u"}, {"REFT_ETCD_PASSWORD_FILE": "/nowhere"}, "cannot be read"),
        ("h", {"cacert": "/nowhere"}, {}, "cacert is /nowhere"),
        ("h", {}, {"REFT_ETCD_CERT": __file__}, "cert is given without key"),
        ("h", {"key": __file__}, {}, "key is given without cert"),
    ],
)
def test_wrong_settings_are_refused(
    endpoint: str, conf: dict[str, str], env: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        EtcdSettings.parse(endpoint, conf, env)


# -- what is there ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), size=1) as cluster:
        for command in (
            "user add root:top",
            "user grant-role root root",
            "role add reft",
            "role grant-permission reft --prefix=true readwrite reft/",
            "user add reft:right",
            "user grant-role reft reft",
            "user add other:right",
            "auth enable",
        ):
            cluster.ctl(*command.split())
        cluster.flags = ["--user=root:top"]
        yield cluster


@pytest.mark.integration
def test_p11_a_user_of_etcd_trains_and_the_trainer_does_not_see_the_password(
    tmp_path: Path, etcd_of_users: EtcdCluster
) -> None:
    done = launch(tmp_path, etcd_of_users.endpoint, env=USER)
    assert done.returncode == 0, done.stderr
    assert "trained []" in done.stdout
    assert "in the clear" in done.stderr


@pytest.mark.integration
def test_users_are_asked_for_and_checked(tmp_path: Path, etcd_of_users: EtcdCluster) -> None:
    assert_refused(launch(tmp_path, etcd_of_users.endpoint), "asks for a user", "REFT_ETCD_USER")
    wrong = launch(tmp_path, etcd_of_users.endpoint, env={**USER, "REFT_ETCD_PASSWORD": "guessed"})
    assert_refused(wrong, "does not let user 'reft' in", "REFT_ETCD_PASSWORD")
    assert "guessed" not in wrong.stderr
    other = launch(tmp_path, etcd_of_users.endpoint, env={**USER, "REFT_ETCD_USER": "other"})
    assert_refused(other, "may not read and write", "grant-permission")


@pytest.mark.process
def test_a_token_that_etcd_has_forgotten_is_asked_for_again(etcd_of_users: EtcdCluster) -> None:
    store = EtcdStore(
        EtcdClient(EtcdSettings.parse(etcd_of_users.endpoint, {}, USER)), SECRET, "run"
    )
    store.set("a", "1")
    etcd_of_users.ctl("auth", "disable")
    etcd_of_users.ctl("auth", "enable")
    assert store.peek("a") == b"1"
    store.close()


@pytest.mark.process
def test_a_user_where_etcd_knows_none_is_refused(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path / "etcd", size=1) as cluster:
        assert_refused(launch(tmp_path, cluster.endpoint, env=USER), "auth enable")


# -- TLS -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server and client, and a CA that signed none of them."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    at = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=at, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes")
    for ca in ("ca", "stranger"):
        out = ("-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        openssl("req", "-x509", *key, *out, "-subj", f"/CN={ca}", "-days", "2")
    (at / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "2", *by)
    return at


@pytest.mark.nightly
def test_p11_tls_with_certificates_of_both_sides(tmp_path: Path, certificates: Path) -> None:
    at = certificates
    files = ("--cert-file", f"{at}/server.pem", "--key-file", f"{at}/server.key")
    options = (*files, "--trusted-ca-file", f"{at}/ca.pem", "--client-cert-auth")
    cluster = EtcdCluster(tmp_path / "etcd", size=1, options=options, scheme="https")
    cluster.flags = [f"--cacert={at}/ca.pem", f"--cert={at}/client.pem", f"--key={at}/client.key"]
    with cluster:
        own = f"cert={at}/client.pem,key={at}/client.key"
        env = {"REFT_ETCD_CACERT": f"{at}/ca.pem"}
        done = launch(tmp_path, cluster.endpoint, "--rdzv-conf", own, env=env)
        assert done.returncode == 0, done.stderr
        assert "trained" in done.stdout

        soon = "connect_timeout=1"
        done = launch(tmp_path, cluster.endpoint, "--rdzv-conf", soon)
        assert_refused(done, "without TLS", "cacert=FILE", code=1)
        for wrong in (soon, f"cacert={at}/stranger.pem,{own},{soon}"):
            done = launch(tmp_path, cluster.endpoint, "--rdzv-conf", wrong, env=env)
            assert_refused(done, "with TLS", "certificates", code=1)
