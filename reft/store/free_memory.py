"""How much host memory may still be taken: the least that file system, machine and control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROCESS = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(directory: Path) -> int:
    """Bytes that may still be allocated in ``directory``: the file system's limit, the machine's, and those
    of the control groups that this process is in, such as a container's or a batch job's."""
    stats = os.statvfs(directory)
    limits = [stats.f_bavail * stats.f_frsize, *cgroup_free_bytes()]
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    return max(0, min(limits))


def default_margin_bytes(directory: Path) -> int:
    """Memory to leave free where nobody said how much: 1/64 of the file system, at most 1 GiB."""
    stats = os.statvfs(directory)
    return min(stats.f_blocks * stats.f_frsize // 64, 2**30)


def cgroup_free_bytes(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[int]:
    """What every limited control group above a process still allows; negative if it has more than that.

    tmpfs counts as memory in use, page cache that the kernel can drop does not.

    Args:
        process: directory of the process in /proc.
        root: where the control groups are mounted.
    """
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _free_in(root, path, ("memory.max", "memory.current"), "")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _free_in(root / "memory", path, names, "total_")


def _free_in(mount: Path, path: str, names: tuple[str, str], prefix: str) -> Iterator[int]:
    group = mount / path.lstrip("/")
    # In a container the path may be the host's: what is not mounted is passed over.
    for directory in (group, *group.parents):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, used = (int((directory / name).read_text()) for name in names)
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield limit - used + cache
        if directory == mount:
            return
