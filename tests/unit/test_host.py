"""Cores and memory as cgroups grant them, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.host import free_memory, granted_cores

GB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemAvailable: {16 * 2**20} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/outer/inner\n"}
V1 = {"proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"}


def test_this_machine() -> None:
    assert granted_cores() >= 1
    assert free_memory() > 0


def test_no_cgroups(tmp_path: Path) -> None:
    assert free_memory(tree(tmp_path, {})) == 16 * GB


@pytest.mark.parametrize("folder", ["outer/inner/", "outer/", ""])
def test_memory_v2(tmp_path: Path, folder: str) -> None:
    """The narrowest limit counts, the process's own or one around it."""
    at = f"sys/fs/cgroup/{folder}"
    files = {
        f"{at}memory.max": f"{8 * GB}",
        f"{at}memory.current": f"{3 * GB}",
        f"{at}memory.stat": f"anon 5\ninactive_file {1 * GB}\n",
    }
    assert free_memory(tree(tmp_path, {**V2, **files})) == 6 * GB


def test_memory_v2_without_limit(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/outer/inner/"
    files = {f"{at}memory.max": "max\n", f"{at}memory.current": f"{3 * GB}"}
    assert free_memory(tree(tmp_path, {**V2, **files})) == 16 * GB


@pytest.mark.parametrize("folder", ["job/", ""])  # a container sees its own at the root
def test_memory_v1(tmp_path: Path, folder: str) -> None:
    at = f"sys/fs/cgroup/memory/{folder}"
    files = {
        f"{at}memory.limit_in_bytes": f"{8 * GB}",
        f"{at}memory.usage_in_bytes": f"{7 * GB}",
        f"{at}memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GB}\n",
    }
    assert free_memory(tree(tmp_path, {**V1, **files})) == 3 * GB


def test_memory_v1_without_limit(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory/job/"
    files = {f"{at}memory.limit_in_bytes": str(2**63 - 4096), f"{at}memory.usage_in_bytes": "5"}
    assert free_memory(tree(tmp_path, {**V1, **files})) == 16 * GB


def test_over_the_limit_is_nothing_free(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/"
    files = {f"{at}memory.max": f"{GB}", f"{at}memory.current": f"{2 * GB}"}
    assert free_memory(tree(tmp_path, {**V2, **files})) == 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "250000 100000"}, 2),
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "50000 100000"}, 1),
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "max 100000"}, 8),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_cores(
    tmp_path: Path, files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert granted_cores(tree(tmp_path, files)) == cores


def test_omp_num_threads_asks_for_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert granted_cores() <= 3
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert granted_cores() <= 8
