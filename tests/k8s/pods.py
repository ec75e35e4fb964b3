"""The pods of k8s/ on this machine: their command lines, variables and volumes, as the manifests say.

Each pod has a network with an address of its own behind one switch (tests/attack/netns.py), and its own processes,
host name, mounts and boot id, as if it ran on a host of its own. The file system is this machine's, in the place of
an image. What Kubernetes adds is imitated here and no more: the kubelet, which starts and ends containers; a Service's
address, behind which a relay forwards to a pod; and the Job controller, which replaces pods by the podFailurePolicy.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.attack.netns import STORE, Network
from tests.k8s.manifests import ROOT, environment, pod_spec

_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_DEFAULT_SHM = "64m"  # What a container has without a volume at /dev/shm
_KILLED = 128 + signal.SIGKILL
_POLL_SECS = 0.3
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

_RELAY = """
import asyncio, sys
host, port, backend = sys.argv[1:]
async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def forward(reader, writer):
    peer = await asyncio.open_connection(backend, int(port))
    await asyncio.gather(copy(reader, peer[1]), copy(peer[0], writer))
async def main():
    server = await asyncio.start_server(forward, host, int(port))
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""In the place of kube-proxy: connections to a Service's address go on to a pod's."""


@dataclass
class Pod:
    name: str
    host_name: str
    address: str
    log_path: Path
    shared: bool  # Its process 1 is not the container's, but waits for it and for orphans
    process: subprocess.Popen[bytes]  # Ends with the pod's first process, with its exit code
    killed: bool = False  # By SIGKILL, for which unshare has no exit code of its own

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """As Kubernetes reports it; None while the container runs."""
        code = self.process.poll()
        return _KILLED if self.killed else code

    @property
    def init(self) -> psutil.Process:
        """Process 1 of the pod."""
        (first,) = psutil.Process(self.process.pid).children()
        return first

    @property
    def main(self) -> psutil.Process:
        """The container's first process."""
        return self.init.children()[0] if self.shared else self.init


class Cluster:
    """Runs pods. Use it as a context manager: nothing of it is left when it ends.

    Args:
        directory: for logs and the files that are mounted.
        secrets: value of each Secret's key, by ``NAME/KEY``.
        one_host: all pods run on one host, instead of each on its own.
    """

    def __init__(self, directory: Path, secrets: dict[str, str], *, one_host: bool = False) -> None:
        self.directory = directory
        self.secrets = secrets
        self.pods: list[Pod] = []
        self._one_host = one_host
        self._network = Network()
        self._service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        self._network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_service()
        for pod in self.pods:
            self.force_delete(pod)
        self._network.__exit__()

    # -- the kubelet -------------------------------------------------------------------------------

    def start(self, workload: dict[str, Any], name: str, host_name: str) -> Pod:
        """Start the container of a pod.

        Args:
            workload: whose pods these are.
            name: of the pod.
            host_name: in the pod.
        """
        spec, metadata = pod_spec(workload), workload["metadata"]
        (container,) = spec["containers"]
        self._network.plug_in(name)
        address = self._network.address(name)
        labels = {
            "batch.kubernetes.io/controller-uid": metadata.get("uid", ""),
            "batch.kubernetes.io/job-name": metadata["name"],
        }
        fields = {f"metadata.labels['{key}']": value for key, value in labels.items()}
        variables = {
            key: value
            if isinstance(value, str)
            else self._resolve(value, {**fields, "status.podIP": address})
            for key, value in environment(container).items()
        }
        words = [
            re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)
            for word in [*container["command"], *container.get("args", [])]
        ]
        shared = spec.get("shareProcessNamespace", False)
        # With a shared process namespace, process 1 is one that only waits for others.
        run = f"{shlex.join(words)} & wait $!" if shared else f"exec {shlex.join(words)}"
        log_path = self.directory / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [
                    *self._network.enter(name),
                    *("unshare", *_NAMESPACES, "sh", "-euc"),
                    "\n".join([*self._mounts(name, host_name, address, spec), run]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._image_environment() | variables,
                cwd=ROOT,
                start_new_session=True,
            )
        pod = Pod(name, host_name, address, log_path, shared, process)
        self.pods.append(pod)
        return pod

    def _resolve(self, source: dict[str, Any], fields: dict[str, str]) -> str:
        if "secretKeyRef" in source:
            return self.secrets[f"{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}"]
        return fields[source["fieldRef"]["fieldPath"]]

    def _mounts(self, name: str, host_name: str, address: str, spec: dict[str, Any]) -> list[str]:
        hosts, boot_id = self.directory / f"{name}.hosts", self.directory / f"{name}.boot_id"
        full_name = f"{host_name}.{spec.get('subdomain', 'pod')}.default.svc.cluster.local"
        hosts.write_text(
            f"127.0.0.1 localhost\n{address} {full_name} {host_name}\n"
            f"{self._network.address(STORE)} reft-rendezvous\n"
        )
        boot_id.write_text(f"{uuid.uuid4()}\n")
        lines = [
            f"hostname {host_name}",
            f"mount --bind {hosts} /etc/hosts",
            f"mount -t tmpfs -o size={_DEFAULT_SHM},mode=1777 shm /dev/shm",
        ]
        if not self._one_host:
            lines.append(f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id")
        sizes = {
            volume["name"]: to_bytes(volume["emptyDir"]["sizeLimit"])
            for volume in spec.get("volumes", [])
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        (container,) = spec["containers"]
        lines += [
            f"mount -t tmpfs -o size={sizes[mount['name']]},mode=1777 tmpfs {mount['mountPath']}"
            for mount in container.get("volumeMounts", [])
            if mount["name"] in sizes
        ]
        return lines

    def _image_environment(self) -> dict[str, str]:
        """What an image sets; of this process's variables only where to find programs."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.directory),
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": os.environ["TORCH_EXTENSIONS_DIR"],
        }

    def force_delete(self, pod: Pod) -> None:
        """``kubectl delete pod --grace-period=0 --force``, or a host that is lost: no process gets a signal that it
        could handle, no connection is closed, and the memory is gone."""
        self._network.unplug(pod.name)
        with suppress(psutil.Error, ValueError):
            pod.init.kill()
            pod.killed = True
        pod.process.wait()

    def delete(self, pod: Pod, grace_secs: float) -> int:
        """``kubectl delete pod``: SIGTERM to the container, and SIGKILL after the grace period. Returns the exit code."""
        pod.main.terminate()
        with suppress(subprocess.TimeoutExpired):
            pod.process.wait(grace_secs)
        self.force_delete(pod)
        assert pod.exit_code is not None
        return pod.exit_code

    def execute(self, pod: Pod, *command: str) -> str:
        """``kubectl exec POD -- COMMAND``; what it prints."""
        enter = ["nsenter", "-t", str(pod.init.pid), "-a", f"--wd={ROOT}"]
        return subprocess.run(
            [*enter, *command], env=pod.main.environ(), capture_output=True, text=True, check=True
        ).stdout

    # -- the Service -------------------------------------------------------------------------------

    def serve(self, deployment: dict[str, Any]) -> Pod:
        """Start the pod of the rendezvous, and lead the Service to it when it is ready."""
        self._stop_service()
        number = sum(pod.host_name.startswith(deployment["metadata"]["name"]) for pod in self.pods)
        name = f"{deployment['metadata']['name']}-{number}"
        pod = self.start(deployment, name, name)
        self.wait_until(lambda: "rendezvous at" in pod.log, 60, "the rendezvous", pod)
        (container,) = pod_spec(deployment)["containers"]
        port = str(container["ports"][0]["containerPort"])
        relay = [sys.executable, "-c", _RELAY, self._network.address(STORE), port, pod.address]
        self._service = subprocess.Popen(
            [*self._network.enter(STORE), *relay], stdout=subprocess.PIPE
        )
        assert self._service.stdout is not None
        assert self._service.stdout.readline() == b"ready\n"
        return pod

    def _stop_service(self) -> None:
        if self._service is not None:
            self._service.kill()
            self._service.communicate()

    def wait_until(
        self, condition: Callable[[], object], secs: float, what: str, *pods: Pod
    ) -> None:
        """Wait for a condition; after ``secs`` fail with the logs of ``pods``, by default of all."""
        deadline = time.monotonic() + secs
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {pod.name}\n{pod.log[-3000:]}" for pod in pods or self.pods)
                raise AssertionError(f"waited {secs:.0f} s for {what}\n{logs}")
            time.sleep(_POLL_SECS)


class JobController:
    """Runs the pods of an indexed Job, and replaces those that fail, by its podFailurePolicy.

    Attributes:
        current: the pod of each index that has not succeeded.
        succeeded: indices whose pod has ended with exit code 0.
        failed: why the Job has failed; empty if it has not.
    """

    def __init__(self, cluster: Cluster, job: dict[str, Any]) -> None:
        self._cluster, self._job = cluster, job
        job["metadata"]["uid"] = str(uuid.uuid4())
        self.current: dict[int, Pod] = {}
        self.succeeded: set[int] = set()
        self.failed = ""
        for index in range(job["spec"]["parallelism"]):
            self._create(index)

    def _create(self, index: int) -> None:
        host_name = f"{self._job['metadata']['name']}-{index}"
        name = f"{host_name}-{sum(pod.host_name == host_name for pod in self._cluster.pods)}"
        self.current[index] = self._cluster.start(self._job, name, host_name)

    def reconcile(self) -> None:
        """Look at the pods that have ended."""
        for index, pod in list(self.current.items()):
            code = pod.exit_code
            if code is None or self.failed:
                continue
            if code == 0:
                self.succeeded.add(index)
                del self.current[index]
            elif (action := policy_action(self._job, code)) == "Ignore":
                self._create(index)
            else:
                self.failed = f"{pod.name}: exit code {code}: {action}"

    def logs(self) -> str:
        return "".join(pod.log for pod in self._cluster.pods)


def policy_action(job: dict[str, Any], exit_code: int) -> str:
    """What the first matching rule of the podFailurePolicy says of an exit code; ``Count`` without one."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def to_bytes(quantity: str) -> int:
    """``2Gi`` in bytes."""
    return int(quantity[:-2]) * _BINARY[quantity[-2:]]
