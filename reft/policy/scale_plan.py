"""DLRover's ScalePlan: what is advised, in the words of its operator. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reft.policy.advice import Action, Advice

API_VERSION = "elastic.iml.github.io/v1alpha1"
ROLE = "worker"


def scale_plan(
    job: str, number: int, advice: Sequence[Advice], *, workers: int, cpu: int, memory_bytes: int
) -> dict[str, Any]:
    """A ScalePlan of the schema in REFERENCE, section 3."""
    numbers = [a.workers for a in advice if a.action in (Action.ADD, Action.REMOVE)]
    dropped = sum(a.action is Action.DROP for a in advice)
    replaced = [n for a in advice if a.action in (Action.REPLACE, Action.DROP) for n in a.nodes]
    wanted = [(n, a.memory_bytes) for a in advice if a.memory_bytes is not None for n in a.nodes]
    return {
        "apiVersion": API_VERSION,
        "kind": "ScalePlan",
        "metadata": {"name": f"{job}-scaleplan-{number}", "labels": {"scale-type": "auto"}},
        "spec": {
            "ownerJob": job,
            "replicaResourceSpecs": {
                ROLE: {
                    "replicas": numbers[-1] if numbers else workers - dropped,
                    "resource": _resource(cpu, memory_bytes),
                }
            },
            "createPods": [],
            "removePods": [{"name": node, "type": ROLE} for node in replaced],
            "migratePods": [{"name": node, "resource": _resource(cpu, nbytes)} for node, nbytes in wanted],
            "psHosts": [],
        },
    }


def _resource(cpu: int, memory_bytes: int) -> dict[str, str]:
    return {"cpu": str(cpu), "memory": f"{memory_bytes // 2**20}Mi"}


def to_yaml(value: Mapping[str, Any]) -> str:
    """YAML of mappings, lists, text and whole numbers. Every text is quoted as in JSON, which YAML reads: no
    name of a job or a node becomes anything else."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{indent}{json.dumps(key)}:", inner, indent + "  ")
    else:
        for inner in value:
            yield from _entry(f"{indent}-", inner, indent + "  ")


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        yield head
        yield from _lines(value, indent)
    else:
        yield f"{head} {json.dumps(value)}"
