"""What a rendezvous needs of its store: the same over reft's own and over etcd."""

from __future__ import annotations

import base64
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from reft.control.keyvalue import KeyValueServer, KeyValueStore, RendezvousStore, relay_store
from reft.control.wire import listen
from reft.errors import AuthenticationError, ConfigError
from reft.job.rendezvous.handler import IncarnationRecord
from reft_etcd.etcd import EtcdClient, EtcdSettings, EtcdStore
from tests.etcd import EtcdCluster
from tests.job.daemons import wait_for

SECRET, ANOTHER = b"s" * 32, b"t" * 32
WAIT_SECS = 120.0


@dataclass
class Backend:
    make: Callable[[bytes, str], RendezvousStore]
    made: list[RendezvousStore] = field(default_factory=list)
    holds: Callable[[str], bool] = lambda _: True
    """Whether reft's own server has heard of a name: its client does not wait for that."""

    def store(self, secret: bytes = SECRET, run_id: str = "run") -> RendezvousStore:
        self.made.append(self.make(secret, run_id))
        return self.made[-1]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def etcd_store(cluster: EtcdCluster, secret: bytes = SECRET, run_id: str = "run") -> EtcdStore:
    return EtcdStore(EtcdClient(EtcdSettings.parse(cluster.endpoint, {}, {})), secret, run_id)


@pytest.fixture(params=["reft", "etcd", "relay"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    servers: list[Any] = []
    if request.param == "reft":
        servers.append(KeyValueServer(listen("127.0.0.1", 0), SECRET))
        made = Backend(
            lambda secret, _: KeyValueStore(f"127.0.0.1:{servers[0].port}", secret),
            holds=lambda name: name in servers[0].holders(),
        )
    else:
        cluster: EtcdCluster = request.getfixturevalue("etcd")
        cluster.ctl("del", "--prefix", "reft/")
        made = Backend(lambda secret, run_id: etcd_store(cluster, secret, run_id))
        if request.param == "relay":
            servers.append(
                relay_store(listen("127.0.0.1", 0), SECRET, etcd_store(cluster).lasting())
            )
            made = Backend(lambda secret, _: KeyValueStore(f"127.0.0.1:{servers[0].port}", secret))
    yield made
    for store in made.made:
        store.close()
    for server in servers:
        server.close()


@pytest.mark.process
def test_values_are_written_and_read(backend: Backend) -> None:
    store, other = backend.store(), backend.store()
    assert store.peek("a") is None
    store.set("a", "text")
    store.with_prefix("deep").set("a", b"\x00\xff")
    assert (other.get("a"), other.get("deep/a")) == (b"text", b"\x00\xff")
    assert other.with_prefix("deep").get("a") == b"\x00\xff"
    assert other.check([])
    assert other.check(["a", "deep/a"])
    assert not other.check(["a", "b"])
    assert [store.delete("a"), store.delete("a")] == [True, False]
    assert other.peek("a") is None


@pytest.mark.integration
def test_of_those_that_write_at_once_one_wins(backend: Backend) -> None:
    stores = [backend.store() for _ in range(4)]
    assert stores[0].compare_set("k", b"old", b"new") == (False, None)
    assert stores[0].compare_set("k", None, b"0") == (True, b"0")
    assert stores[1].compare_set("k", None, b"1") == (False, b"0")

    def count(store: RendezvousStore, times: int) -> None:
        for _ in range(times):
            done, held = False, store.peek("k")
            while not done:
                done, held = store.compare_set("k", held, str(int(held or 0) + 1).encode())

    threads = [threading.Thread(target=count, args=(store, 25)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
    assert stores[0].get("k") == b"100"


@pytest.mark.process
def test_the_store_knows_the_newest_start_whoever_writes_last(backend: Backend) -> None:
    record = IncarnationRecord(backend.store(), "job")
    assert record.read() == 0
    assert [record.raise_to(number) for number in (3, 2, 5, 0)] == [3, 3, 5, 5]


@pytest.mark.process
def test_p6_a_key_is_waited_for_until_it_comes_or_the_time_is_over(backend: Backend) -> None:
    store, other = backend.store(), backend.store()
    with pytest.raises(TimeoutError, match="late"):
        store.wait(["late"], timedelta(seconds=0.2))
    writer = threading.Thread(target=other.set, args=("late", "now"))
    writer.start()
    store.wait(["late"], timedelta(seconds=WAIT_SECS))
    writer.join(WAIT_SECS)
    assert store.get("late") == b"now"


@pytest.mark.process
def test_who_holds_a_name_and_does_so_no_more_is_known(
    backend: Backend, request: pytest.FixtureRequest
) -> None:
    if "relay" in request.node.name:
        pytest.skip("names are held by launchers")
    leaves, looks = backend.store(), backend.store()
    leaves.with_prefix("here").hold("leaves", 600)  # nobody waits for its lease to end
    wait_for(lambda: backend.holds("here/leaves"), "its name")
    assert looks.alive("here/") in ({"here/leaves"}, set())  # reft's own keeps no list
    assert looks.left("here/") == {}
    leaves.close()

    def known() -> bool:
        looks.alive("here/")
        return looks.left("here/").keys() == {"here/leaves"}

    wait_for(known, "its end")
    assert looks.left("elsewhere/") == {}


@pytest.mark.process
def test_p11_who_has_another_secret_reads_nothing(backend: Backend) -> None:
    backend.store().set("a", "b")
    stranger = backend.store(ANOTHER)
    with pytest.raises(AuthenticationError, match="secret"):
        stranger.peek("a")


# -- etcd alone ----------------------------------------------------------------------------------------


@pytest.mark.process
def test_p11_what_lies_in_etcd_is_checked_and_holds_no_secret(etcd: EtcdCluster) -> None:
    etcd.ctl("del", "--prefix", "reft/")
    store = etcd_store(etcd)
    store.set("a", "first")
    store.set("b", "second")
    store.hold("me", 5)
    assert store.alive("m") == {"me"}
    held = {key: base64.b64decode(kv["value"]) for key, kv in etcd.contents().items()}
    assert len(held) == 3
    assert not [
        key for key, value in held.items() if SECRET in value or SECRET.hex().encode() in value
    ]

    client = EtcdClient(EtcdSettings.parse(etcd.endpoint, {}, {}))

    def forge(value: bytes) -> None:
        client.request(
            "KV",
            "Put",
            client.messages.PutRequest(key=b"reft/a", value=value),
            time.monotonic() + 30,
        )

    for forged in (b"", b"junk", b"\x80\x04N.", held["reft/a"][:-1] + b"!", held["reft/b"]):
        forge(forged)
        with pytest.raises(AuthenticationError, match="reft/a"):
            store.peek("a")
        with pytest.raises(AuthenticationError, match="reft/a"):
            store.compare_set("a", b"second", b"x")
    forge(held["reft/a"])
    assert store.peek("a") == b"first"
    store.close()


@pytest.mark.process
def test_what_a_run_wrote_goes_with_its_last_launcher_and_what_lasts_stays(
    etcd: EtcdCluster,
) -> None:
    etcd.ctl("del", "--prefix", "reft/")
    first, second = etcd_store(etcd), etcd_store(etcd)
    first.set("of the run", "1")
    second.hold("second", 5)
    first.lasting().set("of the job", "2")
    leases = {key: kv.get("lease", 0) for key, kv in etcd.contents().items()}
    assert leases["reft/of the job"] == 0
    assert leases["reft/of the run"] > 0
    # One lease of the run, whoever wrote.
    second.set("of the run", "3")
    assert etcd.contents()["reft/of the run"]["lease"] == leases["reft/of the run"]
    etcd.revoke_all_leases()
    assert list(etcd.contents()) == ["reft/of the job"]
    # And both take new ones.
    for _ in range(2):
        for store, name in ((first, "first"), (second, "second")):
            store.hold(name, 5)
            alive = store.alive("")
    assert {"first", "second"} <= alive
    second.set("of the run", "4")
    assert first.peek("of the run") == b"4"
    first.close()
    second.close()


@pytest.mark.integration
def test_the_client_is_said_to_be_missing(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "etcd3.etcdrpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'reft-ckpt\[etcd\]'"):
        etcd_store(etcd)
