"""What compiled functions share with other processes: the cache on disk."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile

from octavo.kernels.jit import cache_works

COUNT = 100


def cache(folder: Path) -> Any:
    return IndexDataCacheFile(str(folder), "function", "stamp")


def save(folder: Path, who: int, both_are_here: Barrier) -> None:
    assert cache_works()
    both_are_here.wait(60)
    for i in range(COUNT):
        cache(folder).save((who, i), f"code {who} {i}")


def test_processes_that_save_at_once_keep_each_others_code_apart(tmp_path: Path) -> None:
    context = get_context("spawn")
    both_are_here = context.Barrier(2)
    processes = [
        context.Process(target=save, args=(tmp_path, who, both_are_here)) for who in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for who in range(2):
        for i in range(COUNT):
            assert cache(tmp_path).load((who, i)) == f"code {who} {i}"
