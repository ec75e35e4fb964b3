"""What the tests of launcher and agent share: a cluster with events, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.local_cluster import LocalCluster

SCRIPTS = Path(__file__).parent / "scripts"


class WatchedCluster(LocalCluster):
    @property
    def events_dir(self) -> Path:
        return self.directory / "events"

    def events(self, event: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        found = []
        for fields in self._written("worker-*.jsonl"):
            if event in (None, fields["event"]) and all(
                fields.get(k) == v for k, v in wanted.items()
            ):
                found.append(fields)
        return sorted(found, key=lambda e: e["time"])

    def wait_for(
        self, event: str, count: int = 1, timeout_secs: float = 240.0, **wanted: Any
    ) -> list[Any]:
        self.wait_until(
            lambda: len(self.events(event, **wanted)) >= count,
            timeout_secs,
            f"{count} x {event} {wanted}",
        )
        return self.events(event, **wanted)

    def launcher_events(self, event: str) -> list[dict[str, Any]]:
        found = [e for e in self._written("reft--1-*.jsonl") if e["event"] == event]
        return sorted(found, key=lambda e: e["time"])

    def _written(self, pattern: str) -> Iterator[dict[str, Any]]:
        """All events of these files; a line that is being written, or whose writer was killed, is left out."""
        for path in self.events_dir.glob(pattern):
            *lines, _torn = path.read_text().split("\n")
            yield from map(json.loads, lines)

    def finish(self) -> None:
        """Let the trainers of allreduce.py end well after the next step."""
        (self.events_dir / "finish").touch()

    def none_left(self) -> bool:
        return all(self.rendezvous and p.pid == self.rendezvous.pid for p in self.survivors())


def deepspeed_json(directory: Path, **keys: Any) -> str:
    """The path of DeepSpeed's JSON with the block; ``keys`` come into it, or replace what is there."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "steps_per_print": None,
        "reft": {"enabled": True},
    }
    path = directory / "ds_config.json"
    path.write_text(json.dumps(config | keys))
    return str(path)


@contextmanager
def cluster(tmp_path: Path, script: str, *args: str, **options: Any) -> Iterator[WatchedCluster]:
    """A running cluster of ``script``; after the test no process of it may be left but by its doing."""
    (tmp_path / "events").mkdir(parents=True)
    events = str(tmp_path / "events")
    env = {"TEST_EVENTS": events, "REFT_EVENTS": events, **options.pop("env", {})}
    made = WatchedCluster(
        command=[str(SCRIPTS / script), *args],
        directory=tmp_path,
        env=env,
        memory_root=options.pop("memory", tmp_path / "memory"),
        **options,
    )
    with made:
        made.start()
        yield made
    assert made.survivors() == []
