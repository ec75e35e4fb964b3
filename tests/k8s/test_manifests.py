"""The manifests of k8s/ are valid, and agree with each other and with reft."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from reft.config import parse_block
from reft.control.wire import DEFAULT_PORT, parse_endpoint
from reft.job.options import parse_options
from reft.job.script import EX_FENCED, EX_PEER_FAILED, STOP_SIGNALS
from reft.refusal import EX_REFUSED
from tests.k8s.manifests import environment, needs_kubectl, objects, options, pod_spec
from tests.k8s.pods import policy_action, to_bytes

pytestmark = [pytest.mark.process, needs_kubectl]

OVERLAYS = ["example", "kubeflow"]
VERSIONS = ["1.31", "1.34"]
"""The oldest version in which all fields of the Job are stable or on by default, and a later one."""
_MOST_SECS_AFTER_GRACE = 10  # For the launcher to notify the others, and to end after its trainers


def trainers(overlay: str) -> dict[str, Any]:
    kind = "PyTorchJob" if overlay == "kubeflow" else "Job"
    found: dict[str, Any] = objects(overlay)[f"{kind}/reft-train"]
    return found


def rendezvous(overlay: str) -> dict[str, Any]:
    found: dict[str, Any] = objects(overlay)["Deployment/reft-rendezvous"]
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod_spec(workload)["containers"]
    return only  # type: ignore[no-any-return]


def checkable(overlay: str) -> Iterator[dict[str, Any]]:
    """The objects of an overlay; of one that the API does not know itself, its pods."""
    for each in objects(overlay).values():
        if each["kind"] == "PyTorchJob":
            template = each["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
            yield {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        else:
            yield each


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_they_are_valid(overlay: str, version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in checkable(overlay):
        checker.validate(each, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_trainers_meet_at_the_service_of_the_rendezvous_with_its_secret(overlay: str) -> None:
    served, trained = container(rendezvous(overlay)), container(trainers(overlay))
    service = objects(overlay)["Service/reft-rendezvous"]
    variables = environment(trained)
    endpoint = options(trained).get("rdzv-endpoint") or variables["PET_RDZV_ENDPOINT"]
    (port,) = service["spec"]["ports"]
    assert parse_endpoint(endpoint) == (service["metadata"]["name"], port["port"])
    labels = rendezvous(overlay)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert served["ports"] == [{"name": port["targetPort"], "containerPort": DEFAULT_PORT}]
    assert options(served) == {"host": "$(POD_IP)", "port": str(DEFAULT_PORT)}
    assert environment(served)["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert environment(served)["REFT_SECRET"] == variables["REFT_SECRET"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_numbers_of_nodes_agree(overlay: str) -> None:
    workload, given = trainers(overlay), options(container(trainers(overlay)))
    nodes, pods = int(given["nnodes"]), int(given["nnodes"]) + int(given["spares"])
    assert objects(overlay)["PodDisruptionBudget/reft-train"]["spec"]["minAvailable"] == nodes
    if overlay == "kubeflow":
        assert workload["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == pods
    else:
        assert (workload["spec"]["completions"], workload["spec"]["parallelism"]) == (pods, pods)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_last_version_has_time_and_all_versions_have_room(overlay: str) -> None:
    spec, memory = pod_spec(trainers(overlay)), parse_block({}).memory_dir
    block = parse_block({})
    assert spec["terminationGracePeriodSeconds"] >= block.grace_secs + _MOST_SECS_AFTER_GRACE
    mounted = {
        each["name"]: each["mountPath"] for each in container(trainers(overlay))["volumeMounts"]
    }
    (volume,) = spec["volumes"]
    assert memory.is_relative_to(mounted[volume["name"]])
    assert volume["emptyDir"]["medium"] == "Memory"
    limit = container(trainers(overlay))["resources"]["limits"]["memory"]
    assert to_bytes(volume["emptyDir"]["sizeLimit"]) < to_bytes(limit), "the limit counts both"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_ask_for_hosts_of_their_own(overlay: str) -> None:
    workload = trainers(overlay)
    budget = objects(overlay)["PodDisruptionBudget/reft-train"]["spec"]["selector"]["matchLabels"]
    affinity = pod_spec(workload)["affinity"]["podAntiAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    template = (
        workload["spec"].get("template")
        or workload["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    )
    assert term["labelSelector"]["matchLabels"] == budget == template["metadata"]["labels"]
    assert term["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_orphans_of_trainers_that_were_killed_are_reaped(overlay: str) -> None:
    """By the process 1 of a shared namespace, since `reft launch` waits for its own children only."""
    assert pod_spec(trainers(overlay))["shareProcessNamespace"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_reft_launch_takes_the_command_line(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = container(trainers(overlay))
    for name, value in environment(trained).items():
        monkeypatch.setenv(name, value if isinstance(value, str) else f"from-{name.lower()}")
    if overlay == "kubeflow":  # As its operator sets them
        monkeypatch.setenv("PET_NNODES", "3")
        monkeypatch.setenv("PET_NODE_RANK", "2")
        monkeypatch.setenv("PET_MASTER_ADDR", "reft-train-worker-0")
        monkeypatch.setenv("PET_MASTER_PORT", "23456")
    assert trained["command"][:2] == ["reft", "launch"]
    parsed = parse_options([*trained["command"][2:], *trained["args"]])
    given = options(trained)
    assert (parsed.config.min_nodes, parsed.config.max_nodes) == (int(given["nnodes"]),) * 2
    assert parsed.config.rdzv_backend == "c10d"
    assert parsed.config.rdzv_endpoint == f"reft-rendezvous:{DEFAULT_PORT}"
    assert parsed.config.run_id == given.get("rdzv-id", "from-pet_rdzv_id")
    assert (
        parsed.job_id == environment(trained).get("REFT_JOB_ID")
        or parsed.job_id == "from-reft_job_id"
    )
    assert parsed.awaits_replacement
    assert not parsed.node_declared, "P4: pods on one host are one failure domain"


def test_kubernetes_replaces_what_was_stopped_and_ends_what_reft_has_given_up() -> None:
    job = trainers("example")
    stopped = [128 + number for number in STOP_SIGNALS]
    assert {policy_action(job, code) for code in (*stopped, 137, EX_FENCED)} == {"Ignore"}
    assert {policy_action(job, code) for code in (1, EX_REFUSED, EX_PEER_FAILED)} == {"FailJob"}
    assert policy_action(job, 128) == "Count", "the container could not be started on one host"
    conditions = [
        rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onPodConditions" in rule
    ]
    assert conditions == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
