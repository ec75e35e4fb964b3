"""Ways to save a replayed stage that are reft's own: worker, pacer, gate, arenas, checksums and
commits.

One rank, alone in its job: what it votes with itself and exchanges with nobody takes microseconds.
All else is what runs in a job, begun and fenced where the engine's hook does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from replay_savers import NoSaver, Version

from reft.config import HasConfig, Variant
from reft.control.control import ControlGroup
from reft.faults import FaultPlan
from reft.grid import Degrees, Topology, VersionId
from reft.memory.arena import Arena, SlotFiles, scan
from reft.pacing.pacer import Pacer
from reft.protect.codes import Scheme
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CopyEngine
from reft.snapshot.extension import FixedScheme
from reft.snapshot.plan import LiveImages
from reft.snapshot.stats import SnapshotStats
from reft.snapshot.worker import SnapshotRequest, SnapshotWorker, WorkerCallbacks
from reft.state.catalogue import SectionImage

WAIT_SECS = 600.0
WARM_UP_STEPS = 6
"""Of HAS: windows are measured first, then planned with."""
_SECRET = b"benchmark".ljust(32, b".")
_BLOCK_BYTES = 4 * 2**20
_HOST_BYTES = 4096


class Production:
    """The snapshots of one rank, as a session has them.

    Args:
        version: what is taken.
        engine: copies it; closed by :meth:`close`.
        folder: tmpfs for the arenas.
        chunk_bytes: unit of copying.
        place: stage, stages and micro-batches.
    """

    def __init__(
        self,
        version: Version,
        engine: CopyEngine,
        folder: Path,
        chunk_bytes: int,
        place: tuple[int, int, int],
    ) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.folder, self.engine, self.stats = folder, engine, SnapshotStats()
        self.pinned = True
        register = engine.register

        def noted(memory: memoryview | torch.Tensor) -> bool:
            done = register(memory)
            self.pinned = self.pinned and done
            return done

        engine.register = noted  # type: ignore[method-assign]
        self.images = LiveImages(version.image, SectionImage([]), "benchmark")
        stage_id, stages, micro_batches = place
        self.pacer = Pacer(
            HasConfig(chunk_bytes=chunk_bytes),
            engine,
            stage_id=stage_id,
            stages=stages,
            micro_batches=micro_batches,
        )
        degrees = Degrees(1, 1, 1)
        topology = Topology(degrees, degrees.coordinates(), ("benchmark",))
        control = ControlGroup(WAIT_SECS).for_worker()
        arenas = ArenaSet(
            SlotFiles(folder, 0, 2, _SECRET),
            *("benchmark", topology, 0),
            frozen={},
            limit_bytes=None,
            engine=engine,
        )
        self.worker = SnapshotWorker(
            control=control,
            topology=topology,
            arenas=arenas,
            block_bytes=_BLOCK_BYTES,
            host_bytes=_HOST_BYTES,
            scheme=FixedScheme(Scheme()),
            callbacks=WorkerCallbacks(self.stats, FaultPlan((), topology.coordinates[0])),
            copier=Copier(engine, chunk_bytes),
            features=[self.pacer],
            gate=self.pacer.gate,
        )
        self.step = 0
        # Memory is reserved for the first one, whatever it takes.
        first = self.submit(Variant.BLOCKING, required=True)
        if not (first.done.wait(WAIT_SECS) and first.committed):
            self.close()
            raise SystemExit(f"the first version was not committed: {dict(self.stats.skipped)}")
        self.worker.fence()

    def submit(self, variant: Variant, *, required: bool = False) -> SnapshotRequest:
        """Hand the version of the state of now over."""
        self.step += 1
        request = SnapshotRequest(
            VersionId(1, self.step), self.images, b"", required=required, variant=variant
        )
        self.worker.submit(request)
        return request

    def sampled(self, version: Version, samples: int) -> dict[int, torch.Tensor]:
        """The state of now in some blocks of the newest version, by begin; the device must be
        idle."""
        found: dict[int, torch.Tensor] = {}
        for _, arena in scan(self.folder, _SECRET):
            if isinstance(arena, Arena):
                with arena:
                    header = arena.header()
                    blocks = (
                        []
                        if header is None
                        else [e for e in header.entries if e.key.section == "replicated"]
                    )
                for entry in blocks[:: max(1, len(blocks) // samples)]:
                    found[entry.start_bytes] = torch.zeros(entry.nbytes, dtype=torch.uint8)
        for start, target in found.items():
            version.image.read_into(start, target)
        return found

    def differing(self, expected: torch.Tensor | dict[int, torch.Tensor]) -> int | None:
        """How many bytes of the version of the last step differ; None if it was given up.
        ``expected``: all bytes, or those of some blocks."""
        for _, arena in scan(self.folder, _SECRET):
            if not isinstance(arena, Arena):
                continue
            with arena:
                header = arena.header()
                if header is None or not header.state.whole or header.label.step != self.step:
                    continue
                blocks = [e for e in header.entries if e.key.section == "replicated"]
                if isinstance(expected, dict):
                    blocks = [e for e in blocks if e.start_bytes in expected]
                wrong = 0
                for entry in blocks:
                    data = torch.frombuffer(bytearray(arena.read_block(entry)), dtype=torch.uint8)
                    at = slice(entry.start_bytes, entry.start_bytes + entry.nbytes)
                    same = (
                        expected[entry.start_bytes] if isinstance(expected, dict) else expected[at]
                    )
                    wrong += int((data != same).sum())
                compared = sum(e.nbytes for e in blocks)
                missing = 0 if isinstance(expected, dict) else expected.numel() - compared
                return wrong + missing
        return None

    def close(self) -> None:
        self.worker.close(WAIT_SECS)
        dist.destroy_process_group()
        for path in self.folder.glob("*.arena"):
            path.unlink()


class WorkerSaver(NoSaver):
    """One variant of the ``reft`` block.

    Args:
        production: takes the versions.
        variant: when their bytes are copied.
    """

    def __init__(self, production: Production, variant: Variant) -> None:
        self.name = variant.value
        self.given_up = 0
        self._production, self._variant = production, variant
        self._request: SnapshotRequest | None = None

    def begin(self) -> None:
        production = self._production
        production.worker.copier.records.clear()
        self._request = production.submit(self._variant)
        if self._variant is Variant.BLOCKING:
            self._request.copied.wait()
        production.pacer.begin_step("replay")

    def window(self, position: int) -> None:
        self._production.pacer.open(position, receives=True)

    def gap(self, position: int) -> None:
        self._production.pacer.close()

    def fence(self) -> None:
        self._production.pacer.begin_optimizer()
        self._production.worker.fence()

    def stepped(self, names: Sequence[str]) -> None:
        self._production.pacer.end_optimizer()
        self._production.pacer.end_step("replay", names)

    def finish(self) -> None:
        assert self._request is not None
        if not self._request.done.wait(WAIT_SECS):
            raise SystemExit(f"{self.name}: a version was neither committed nor given up")
        self.given_up += not self._request.committed

    def differing(self, expected: torch.Tensor | dict[int, torch.Tensor]) -> int | None:
        return self._production.differing(expected)

    def rate(self) -> float | None:
        records = list(self._production.worker.copier.records)
        if not records or self._request is None or not self._request.committed:
            return None
        if self._variant is Variant.HAS:  # it waits between its windows
            secs = sum(r.end_secs - r.begin_secs for r in records)
        else:
            secs = max(r.end_secs for r in records) - min(r.begin_secs for r in records)
        return sum(r.nbytes for r in records) / secs if secs > 0 else None

    def tier_bytes(self) -> dict[int, int]:
        """Of the last step, by tier."""
        found: Counter[int] = Counter()
        for record in self._production.worker.copier.records:
            found[record.tier] += record.nbytes
        return dict(found)


class FreeSaver(WorkerSaver):
    """The same where nothing waits for a version, as in a job."""

    def __init__(self, production: Production, variant: Variant) -> None:
        super().__init__(production, variant)
        self.requests: list[SnapshotRequest] = []

    def finish(self) -> None:
        assert self._request is not None
        self.requests.append(self._request)

    def committed(self) -> int:
        """How many of the versions were committed; waits until that is known."""
        for request in self.requests:
            if not request.done.wait(WAIT_SECS):
                raise SystemExit(f"{self.name}: a version was neither committed nor given up")
        return sum(request.committed for request in self.requests)
