"""The manifests of k8s/, as `kubectl apply -k` sends them to the cluster."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="kubectl is not here (it puts overlays together; no cluster is needed)",
)


@cache
def render(overlay: str) -> str:
    """What ``kubectl apply -k k8s/OVERLAY`` sends, as YAML."""
    command = ["kubectl", "kustomize", str(K8S / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objects(overlay: str) -> dict[str, Any]:
    """The objects of an overlay, by ``KIND/NAME``."""
    documents = yaml.safe_load_all(render(overlay))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents}


def pod_spec(workload: dict[str, Any]) -> dict[str, Any]:
    """The pods of a Deployment, a Job or a PyTorchJob."""
    spec = workload["spec"]
    if workload["kind"] == "PyTorchJob":
        spec = spec["pytorchReplicaSpecs"]["Worker"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def options(container: dict[str, Any]) -> dict[str, str]:
    """The options ``--NAME=VALUE`` of a container's command line."""
    pairs = (word.removeprefix("--").split("=", 1) for word in container.get("args", []))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def environment(container: dict[str, Any]) -> dict[str, Any]:
    """The variables of a container: a value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
