"""What this machine grants the process: cores and free memory, within the limits of its cgroups.

A container sees the whole machine in ``/proc``, but is held to the limits of its cgroup, version
1 or 2, and of those around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = Path("/")


def granted_cores(root: Path = _SYSTEM) -> int:
    """Cores that this process may keep busy, at least 1: by its affinity, its cgroups' quotas, and
    OMP_NUM_THREADS where that is set."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:  # macOS
        cores = float(os.cpu_count() or 1)
    for folder in _cgroups(root, "cpu"):
        words = _words(folder / "cpu.max")  # "quota period"
        if not words:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0] not in ("max", "-1"):
            cores = min(cores, int(words[0]) / int(words[1]))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit():
        cores = min(cores, int(asked))
    return max(1, int(cores))


def free_memory(root: Path = _SYSTEM) -> int:
    """Bytes that this process may still take before the system or a cgroup's limit stops it."""
    free = _stat(root / "proc/meminfo").get("MemAvailable:")
    if free is None:  # macOS tells only what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free *= 1024
    for folder in _cgroups(root, "memory"):
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
        if not (folder / limit).exists():
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        words = _words(folder / limit) + _words(folder / used)
        if len(words) == 2 and words[0] != "max":
            # The kernel drops file pages that nobody uses before it lets a process fail.
            reclaimable = _stat(folder / "memory.stat").get(cache, 0)
            free = min(free, int(words[0]) - int(words[1]) + reclaimable)
    return max(0, free)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's cgroup and of all around it, in either version's tree."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        folder = base / path.strip("/")
        yield folder
        while folder != base:
            folder = folder.parent
            yield folder


def _stat(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    fields = [line.split() for line in _lines(path)]
    return {words[0]: int(words[1]) for words in fields if len(words) >= 2 and words[1].isdigit()}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not this version of cgroups, or not Linux
        return []
