"""Breaks promises P2, P3, P5 and P7 on purpose, one line at a time, and looks which tests notice.

    python -m tests.mutations [NAME...]

Each mutation is applied in a temporary copy of the tree. Prints a table, then the same as JSON. Exit code 1 if a
mutation survives, 2 if one cannot be applied or its tests cannot be run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECS = 300.0
_TESTS_FAILED = 1


class Mutation(NamedTuple):
    """What is changed in a file of ``reft/``, and the tests that should fail then, those without processes first."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


WORKER, VERSION = "snapshot/worker.py", "snapshot/version.py"
MODEL = ("tests/snapshot/test_version.py", "tests/snapshot/test_version_model.py")
KEPT = "frozenset({*unknown, *dict(self.frozen), *(() if newest is None else (newest,))})"
DEVICE = "snapshot/device_engine.py"
VERSION_ON_DEVICE = (
    "tests/snapshot/test_copy_engines.py::test_a_version_is_the_state_between_begin_and_fence",
)
UNTIL_COPIED = (
    "tests/snapshot/test_copy_engines.py::test_sources_and_targets_stay_until_all_is_copied",
)
HOST_PART = (
    "tests/snapshot/test_copy_engines.py::"
    "test_p2_a_version_of_which_a_part_is_in_host_memory_is_the_state_of_one_step",
)
HOST_PART_OF_A_JOB = (
    "tests/device/test_worker.py::"
    "test_p2_the_optimizer_on_the_host_waits_until_its_masters_are_copied",
)
OFFLOADED = ("tests/device/test_offload.py",)
LOCAL = ("tests/recover/test_local.py",)
BOUNDARY = ("tests/engine/test_boundary.py",)
UNCHANGED = ("tests/snapshot/test_unchanged.py",)

MUTATIONS = {
    "p2-peers-seal-what-its-owner-gives-up": Mutation(
        WORKER,
        "if refused and failure is None:",
        "if False:",
        ("tests/snapshot/test_worker.py",),
    ),
    "p2-a-block-that-changed-is-not-copied-again": Mutation(
        "snapshot/copier.py",
        "elif writer.checksums.get(first.placed, held) != held:",
        "elif False:",
        UNCHANGED,
    ),
    "p2-a-peer-keeps-a-block-that-changed": Mutation(
        "snapshot/arenas.py",
        "if self.held.get(placed) == expected:",
        "if placed in self.held:",
        UNCHANGED,
    ),
    "p2-a-block-that-was-overwritten-counts-as-unchanged": Mutation(
        "snapshot/arenas.py",
        "            writer.held.pop(placed, None)\n",
        "            pass\n",
        UNCHANGED,
    ),
    "p2-no-fence-before-the-optimizer": Mutation(
        WORKER,
        "if approached or self._state.holds_training:",
        "if False:",
        ("tests/snapshot/test_worker.py",),
    ),
    "p2-host-state-is-captured-at-the-forward-pass": Mutation(
        "engine/boundary.py",
        "of_read = [c for c in candidates if c.read is read] or candidates",
        "of_read = []",
        BOUNDARY,
    ),
    "p2-an-evaluation-is-taken-for-the-step": Mutation(
        "engine/boundary.py",
        "self._candidates = [c for c in self._candidates if c.read is not read]",
        "pass",
        BOUNDARY,
    ),
    "p2-write-counts-are-not-compared": Mutation(
        WORKER, "names = waiting[0].written()", "names = []", ("tests/follow/test_written.py",)
    ),
    "p3-peers-that-differ-are-committed": Mutation(
        "verify/peers.py",
        "return None if torch.equal(mine, theirs) else SkipCause(PEERS_DIFFER)",
        "return None",
        ("tests/snapshot/test_worker.py",),
    ),
    "p3-a-nan-is-committed": Mutation(
        "verify/finite.py",
        "if not names:",
        "if True:",
        ("tests/snapshot/test_worker.py",),
    ),
    "p2-late-copy-keeps-its-version": Mutation(
        VERSION,
        "late = _mark_failed(state, lambda version: version.holds_training, OVERRUN)",
        "late = state",
        MODEL,
    ),
    "p2-layout-changes-after-the-copy": Mutation(
        VERSION, "if head.stage is Stage.RELEASED:", "if False:", MODEL
    ),
    "p3-last-commit-is-overwritten": Mutation(
        VERSION, KEPT, "frozenset({*unknown, *dict(self.frozen)})", MODEL
    ),
    "p3-version-of-unknown-fate-is-overwritten": Mutation(
        VERSION,
        KEPT,
        "frozenset({*dict(self.frozen), *(() if newest is None else (newest,))})",
        MODEL,
    ),
    "p3-what-is-recovered-is-overwritten": Mutation(
        VERSION, KEPT, "frozenset({*unknown, *(() if newest is None else (newest,))})", MODEL
    ),
    "p3-commit-although-a-rank-said-no": Mutation(
        VERSION,
        "    if not ok:\n        state, effects = _abandon(state, head.cause or PEER_NOT_SEALED)",
        "    if False:\n        state, effects = _abandon(state, head.cause or PEER_NOT_SEALED)",
        MODEL,
    ),
    "p3-a-peers-commit-is-given-up": Mutation(
        VERSION, "if label == committed:", "if False:", MODEL
    ),
    "p5-stored-block-is-not-compared": Mutation(
        "recover/inventory.py",
        "len(data) == fetch.nbytes and checksum(data) == fetch.checksum",
        "True",
        LOCAL,
    ),
    "p5-block-is-not-compared-on-arrival": Mutation(
        "recover/transfer.py",
        "if self.copy(fetch, data) != fetch.checksum:",
        "if self._copy(fetch, data) is None:",
        ("tests/recover/test_transfer.py",),
    ),
    "p5-arena-is-not-compared": Mutation(
        "memory/arena.py",
        "return checksum(self.read_block(entry)) == entry.checksum",
        "return True",
        ("tests/memory/test_arena.py",),
    ),
    "p5-parity-of-other-data": Mutation(
        "recover/rebuild.py",
        "lost.position < len(known) and digest == known[lost.position]",
        "True",
        LOCAL,
    ),
    "p5-arena-of-another-version": Mutation(
        "recover/inventory.py", "header.label == label and header.state.whole", "True", LOCAL
    ),
    "p7-other-settings-are-accepted": Mutation(
        "engine/fingerprint.py",
        "    if not names:\n        return\n",
        "    if True:\n        return\n",
        ("tests/engine/test_fingerprint.py",),
    ),
    "p7-another-jobs-arena-is-taken": Mutation(
        "recover/inventory.py",
        "if head.job_id != job_id:",
        "if False:",
        ("tests/recover/test_local.py",),
    ),
    "p7-an-older-start-notes-its-commit": Mutation(
        "engine/job_record.py",
        "_label(held).incarnation > label.incarnation",
        "False",
        ("tests/engine/test_protecting.py",),
    ),
    "p7-an-older-start-orders-the-daemon": Mutation(
        "node/daemon.py",
        "if 0 < theirs < self._min_incarnation:",
        "if False:",
        ("tests/job/test_daemon.py::test_the_daemon_refuses_orders_of_an_older_start",),
    ),
    "p5-a-corrupt-block-goes-to-storage": Mutation(
        "storage/publish.py",
        "block.check(block.data)",
        "block.data",
        ("tests/storage/test_persist.py",),
    ),
    "p7-fused-matrices-are-taken-for-one": Mutation(
        "relayout/element_map.py",
        "whole = whole or (1,)",
        "whole = (1,)",
        ("tests/relayout/test_element_map.py",),
    ),
    "p3-the-padding-of-parts-stays-as-it-was-allocated": Mutation(
        "relayout/element_map.py",
        "if filled < part.size:",
        "if False:",
        ("tests/relayout/test_replicas.py",),
    ),
    "p3-a-spare-takes-a-healthy-nodes-place": Mutation(
        "job/rendezvous/membership.py",
        "taken = (state.members | trains | state.with_role(Role.WAITS)) - leaving",
        "taken = trains - leaving",
        ("tests/job/test_membership.py", "tests/job/test_rendezvous_walk.py"),
    ),
    "p7-an-older-start-writes-to-storage": Mutation(
        "storage/fence.py",
        "if newest > incarnation:",
        "if False:",
        ("tests/storage/test_fence.py",),
    ),
    "p7-an-older-version-becomes-latest": Mutation(
        "storage/publish.py",
        " and label < named.label:",
        " and False:",
        ("tests/storage/test_fence.py",),
    ),
    "p7-lock-on-a-removed-file": Mutation(
        "memory/files.py",
        "if _lies_in(fd, directory):",
        "if True:",
        ("tests/memory/test_joblock.py",),
    ),
    "device-no-fence": Mutation(
        DEVICE,
        "if self._order.fence() and self._copied_version:",
        "if self._order.fence() and False:",
        VERSION_ON_DEVICE,
    ),
    "host-part-no-fence": Mutation(
        "snapshot/copy_engine.py",
        "            self._await(lambda: not self._active)\n            return True",
        "            return True",
        HOST_PART,
    ),
    "host-part-is-not-waited-for-on-a-device": Mutation(
        WORKER,
        "if approached or self._state.holds_training:",
        "if not self.copier.engine.asynchronous:",
        HOST_PART_OF_A_JOB,
    ),
    "p2-training-is-not-held-within-the-step": Mutation(
        "engine/fence.py",
        "        self._writes_seen = True\n        self.hold()",
        "        self._writes_seen = True",
        OFFLOADED,
    ),
    "device-no-wait-at-begin": Mutation(
        DEVICE, "ticket.follow(self._begun, self._side)", "pass", VERSION_ON_DEVICE
    ),
    "device-scratch-of-another-stream": Mutation(
        "snapshot/copier.py",
        "return torch.empty(nbytes, dtype=torch.uint8, device=self._device)",
        "side = torch.accelerator.current_stream()\n"
        "        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=side.device_type))\n"
        "        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)\n"
        "        torch.accelerator.set_stream(side)\n"
        "        return made",
        ("tests/device/test_orders.py",),
    ),
    "device-unregistered-early": Mutation(
        DEVICE,
        "            self._side.synchronize()\n            self.drain_stream.synchronize()\n            self._pinned.remove",
        "            self._pinned.remove",
        UNTIL_COPIED,
    ),
    "device-block-reused": Mutation(
        DEVICE,
        "self.keep_alive: list[Piece] = list(pieces)",
        "self.keep_alive: list[Piece] = []",
        UNTIL_COPIED,
    ),
    "device-parity-of-the-version-before": Mutation(
        DEVICE,
        "                handed_over = (\n",
        "                with self._module.stream(self.drain_stream):\n"
        "                    made = [None if e is None else list(e()) for _, e in parts]\n"
        "                parts = [(p, m and (lambda m=m: m)) for (p, _), m in zip(parts, made)]\n"
        "                self._side.wait_event(self.drain_stream.record_event())\n"
        "                handed_over = (\n",
        ("tests/device/test_orders.py",),
    ),
}


def run(name: str, tree: Path) -> dict[str, object]:
    """Apply a mutation, run its tests until one fails, and take it back."""
    mutation = MUTATIONS[name]
    path = tree / "reft" / mutation.path
    whole = path.read_text()
    if (times := whole.count(mutation.old)) != 1:
        raise ValueError(
            f"{name}: reft/{mutation.path} holds the old text {times} times; expected once"
        )
    path.write_text(whole.replace(mutation.old, mutation.new))
    began, caught = time.monotonic(), ""
    try:
        for test in mutation.tests:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-p",
                "no:cacheprovider",
                "--tb=no",
                test,
            ]
            done = subprocess.run(
                command,
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_SECS,
            )
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode == _TESTS_FAILED and failed:
                caught = failed[1]
                break
            if done.returncode:
                raise ValueError(f"{name}: {test} cannot be run:\n{done.stdout}{done.stderr}")
    except subprocess.TimeoutExpired:
        caught = f"{test}: not over after {LIMIT_SECS:.0f} s"
    finally:
        path.write_text(whole)
    return {"name": name, "caught_by": caught or None, "secs": round(time.monotonic() - began, 1)}


def main(*names: str) -> int:
    if unknown := set(names) - MUTATIONS.keys():
        print(
            f"no such mutation: {', '.join(sorted(unknown))}; there are {', '.join(MUTATIONS)}",
            file=sys.stderr,
        )
        return 2
    found = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        tree = Path(directory)
        for folder in (
            "reft",
            "reft_etcd",
            "reft_mpi",
            "megatron_patches",
            "benchmarks",
            "examples",
            "tests",
        ):
            shutil.copytree(
                ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", tree)
        for name in names or MUTATIONS:
            try:
                found.append(run(name, tree))
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
            print(
                f"{name:44} {found[-1]['secs']:6} s  {found[-1]['caught_by'] or 'SURVIVES'}",
                flush=True,
            )
    print(json.dumps(found))
    return int(any(one["caught_by"] is None for one in found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
