"""The pods of k8s/example, by their own command lines, in namespaces: deleted, replaced and refused."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attack.netns import needs_namespaces
from tests.examples.test_examples import Example, Outcome
from tests.k8s.manifests import needs_kubectl, objects, pod_spec
from tests.k8s.pods import Cluster, JobController, Pod, policy_action

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    needs_kubectl,
    needs_namespaces,
]

SECS = 600.0
EPOCHS = 30
SECRET = "reft-secret/secret"
STEPS_BETWEEN = 5


@pytest.fixture
def manifests() -> dict[str, Any]:
    return copy.deepcopy(objects("example"))


@pytest.fixture
def job(manifests: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifests["Job/reft-train"]
    return found


@pytest.fixture
def deployment(manifests: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifests["Deployment/reft-rendezvous"]
    return found


class Training:
    """A Job whose pods train. ``job``: its manifest; the script trains longer, and saves into ``directory``."""

    def __init__(self, cluster: Cluster, job: dict[str, Any], directory: Path) -> None:
        (container,) = pod_spec(job)["containers"]
        container["args"] += [f"--epochs={EPOCHS}", f"--save-dir={directory}"]
        self._cluster = cluster
        self.grace_secs = pod_spec(job)["terminationGracePeriodSeconds"]
        self.controller = JobController(cluster, job)

    @property
    def outcome(self) -> Outcome:
        return Outcome.of(self.controller.logs())

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> bool:
            self.controller.reconcile()
            assert not self.controller.failed, (
                f"{self.controller.failed}\n{self.controller.logs()[-6000:]}"
            )
            return bool(condition())

        self._cluster.wait_until(met, SECS, what)

    def go_on(self) -> None:
        step = max(self.outcome.losses, default=0) + STEPS_BETWEEN
        self.wait_until(lambda: max(self.outcome.losses, default=0) >= step, f"step {step}")

    def trainers(self) -> list[Pod]:
        """Pods that train, that of rank 0 first; the others are spares."""

        def ranks(pod: Pod) -> list[int]:
            return [
                int(variables["RANK"])
                for process in pod.main.children()
                if "RANK" in (variables := process.environ())
            ]

        found = [(ranks(pod), pod) for pod in self.controller.current.values()]
        return [pod for held, pod in sorted(found, key=lambda each: each[0]) if held]

    def wait_for_spare(self) -> None:
        def waits() -> bool:
            status = self._cluster.execute(self.trainers()[0], "reft", "status", "--json")
            return any(node["spare"] for node in json.loads(status)["nodes"])

        self.wait_until(waits, "a spare")


def test_what_a_deleted_pod_had_is_restored_from_the_others_and_every_loss_is_the_same(
    job: dict[str, Any], deployment: dict[str, Any], tmp_path: Path
) -> None:
    with Cluster(tmp_path, {SECRET: secrets.token_hex(32)}) as cluster:
        store = cluster.serve(deployment)
        training = Training(cluster, job, tmp_path / "checkpoints")
        training.go_on()
        cluster.force_delete(store)
        training.go_on()
        cluster.serve(deployment)
        training.wait_for_spare()
        assert not training.outcome.resumed, "the rendezvous is not needed to train"

        # Its successor has the same host name and an empty memory, and waits as the spare.
        killed = training.trainers()[0]
        cluster.force_delete(killed)
        training.go_on()
        training.wait_for_spare()
        training.go_on()

        # The spare, which had lost its memory, replaces the pod that is deleted in order.
        deleted = training.trainers()[0]
        code = cluster.delete(deleted, training.grace_secs)
        assert code == 143
        training.go_on()
        assert killed.host_name in {pod.host_name for pod in training.trainers()}
        training.wait_until(lambda: not training.controller.current, "the end of all pods")
        assert training.controller.succeeded == {0, 1, 2}
        found = training.outcome
    assert [source for _, source in found.resumed] == ["memory", "memory"]
    assert f"stopping on request: step {found.resumed[1][0]} is committed in memory" in deleted.log
    undisturbed = Example("plain.py", "plain.json", ("--epochs", str(EPOCHS)))
    found.check_against(undisturbed.run(tmp_path / "undisturbed", {"enabled": False}))


def test_without_a_spare_the_others_wait_for_the_successor_of_a_deleted_pod(
    job: dict[str, Any], deployment: dict[str, Any], tmp_path: Path
) -> None:
    job["spec"]["parallelism"] = 2
    arguments = pod_spec(job)["containers"][0]["args"]
    arguments[arguments.index("--spares=1")] = "--spares=0"
    with Cluster(tmp_path, {SECRET: secrets.token_hex(32)}) as cluster:
        cluster.serve(deployment)
        training = Training(cluster, job, tmp_path / "checkpoints")
        training.go_on()
        deleted = training.trainers()[0]
        assert cluster.delete(deleted, training.grace_secs) == 143
        training.go_on()
        assert len(cluster.pods) == 1 + 2 + 1, "the other pod has stayed"
        ((step, source),) = training.outcome.resumed
        assert source == "memory"
        assert f"stopping on request: step {step} is committed in memory" in deleted.log

        # The whole Job is deleted: no pod waits for another.
        codes = [cluster.delete(pod, training.grace_secs) for pod in training.trainers()]
        assert codes == [143, 143]


@pytest.mark.parametrize("secret", [secrets.token_hex(32), ""], ids=["another", "empty"])
def test_p11_a_pod_without_the_secret_is_refused_and_ends_the_job(
    secret: str, job: dict[str, Any], deployment: dict[str, Any], tmp_path: Path
) -> None:
    with Cluster(tmp_path, {SECRET: secrets.token_hex(32)}) as cluster:
        cluster.serve(deployment)
        cluster.secrets[SECRET] = secret
        assert "set REFT_SECRET to the same 64 hexadecimal digits everywhere" in refused(
            cluster, job
        )


def test_p9_a_pod_without_a_memory_volume_is_told_to_mount_one(
    job: dict[str, Any], tmp_path: Path
) -> None:
    spec = pod_spec(job)
    spec["volumes"] = spec["containers"][0]["volumeMounts"] = []
    with Cluster(tmp_path, {SECRET: secrets.token_hex(32)}) as cluster:
        message = refused(cluster, job)
        assert "has 64 MiB in all" in message
        assert "emptyDir: {medium: Memory, sizeLimit: SIZE}" in message


def refused(cluster: Cluster, job: dict[str, Any]) -> str:
    """What a pod says that is refused with exit code 2, after which Kubernetes starts no other."""
    pod = cluster.start(job, "refused", "refused")
    cluster.wait_until(lambda: pod.exit_code is not None, SECS, "the refusal")
    assert pod.exit_code == 2, pod.log
    assert policy_action(job, 2) == "FailJob"
    return pod.log


def test_p4_pods_on_one_host_are_told_that_they_fail_together(
    job: dict[str, Any], deployment: dict[str, Any], tmp_path: Path
) -> None:
    """What the anti-affinity prevents."""
    with Cluster(tmp_path, {SECRET: secrets.token_hex(32)}, one_host=True) as cluster:
        cluster.serve(deployment)
        training = Training(cluster, job, tmp_path / "checkpoints")
        training.wait_until(lambda: "TOLERANCE IS 0" in training.controller.logs(), "the warning")
