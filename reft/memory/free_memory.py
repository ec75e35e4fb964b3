"""How much host memory may still be taken: the least that file system, machine and control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # the first version of control groups writes a number that is greater where there is none


@dataclass(frozen=True)
class Bound:
    """A memory that may run full."""

    name: str  # for people
    used_bytes: int  # used_bytes, limit_bytes: in use, and in all
    limit_bytes: int


def free_bytes(directory: Path) -> int:
    """Bytes that may still be allocated in ``directory``: the file system's limit, the machine's, and those
    of the control groups that this process is in, such as a container's or a batch job's."""
    stats = os.statvfs(directory)
    limits = [stats.f_bavail * stats.f_frsize, *cgroup_free_bytes()]
    if (machine := _machine()) is not None:
        limits.append(machine.limit_bytes - machine.used_bytes)
    return max(0, min(limits))


def bounds(directory: Path, process: Path = _PROCESS, root: Path = _CGROUPS) -> list[Bound]:
    """Everything that limits the memory of a process: the machine, its control groups, and the file system of
    ``directory``. Arguments as of :func:`cgroup_bounds`."""
    found = [machine] if (machine := _machine()) is not None else []
    found += (b for b in cgroup_bounds(process, root) if 0 < b.limit_bytes < _NO_LIMIT)
    with suppress(OSError):
        stats = os.statvfs(directory)
        total = stats.f_blocks * stats.f_frsize
        used = total - stats.f_bavail * stats.f_frsize
        found.append(Bound(f"the file system of {directory.parent}", used, total))
    return found


def _machine() -> Bound | None:
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        total, available = (int(fields[n].split()[0]) * 1024 for n in ("MemTotal", "MemAvailable"))
        return Bound("the host", total - available, total)
    return None


def default_margin_bytes(directory: Path) -> int:
    """Memory to leave free where nobody said how much: 1/64 of the file system, at most 1 GiB."""
    stats = os.statvfs(directory)
    return min(stats.f_blocks * stats.f_frsize // 64, 2**30)


def cgroup_free_bytes(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[int]:
    """What every limited control group above a process still allows; negative if it has more than that.
    Arguments as of :func:`cgroup_bounds`."""
    return (bound.limit_bytes - bound.used_bytes for bound in cgroup_bounds(process, root))


def cgroup_bounds(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[Bound]:
    """Every limited control group above a process, of either version.

    tmpfs counts as memory in use, page cache that the kernel can drop does not."""
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _free_in(root, path, ("memory.max", "memory.current"), "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _free_in(root / "memory", path, names, "total_")


def _free_in(mount: Path, path: str, names: tuple[str, str], prefix: str) -> Iterator[Bound]:
    group = mount / path.lstrip("/")
    # In a container the path may be the host's: what is not mounted is passed over.
    for directory in (group, *group.parents):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, used = (int((directory / name).read_text()) for name in names)
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            name = "/" + str(directory.relative_to(mount)).lstrip(".")
            yield Bound(f"control group {name}", used - cache, limit)
        if directory == mount:
            return
