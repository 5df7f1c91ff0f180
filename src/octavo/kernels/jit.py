"""numba, set up once for every CPU kernel: releases the GIL, divides like C, caches on disk.

numba notices when the file of a compiled function changes, but not when that of a function it
calls does. So the cache lies in a folder named after all those files, the versions of numba
and llvmlite, and the CPU; a user's ``NUMBA_CACHE_DIR`` goes first.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import platformdirs

logger = logging.getLogger(__name__)
config: Any = numba.config  # mypy sees none of its names


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on its first call, or fetch it from the cache."""
    compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=cache_works())(
        function
    )
    return compiled


@cache
def cache_works() -> bool:
    """Point numba at our folder; false where nothing can be written there."""
    if config.CACHE_DIR:
        return True
    folder = platformdirs.user_cache_path("octavo") / "numba" / _key()
    if not folder.exists():
        logger.warning("octavo: compiling kernels for this CPU, once: some 15 s")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    config.CACHE_DIR = str(folder)
    return os.access(folder, os.W_OK)


def _key() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.rglob("cpu*.py")]):
        digest.update(source.read_bytes())
    cpu = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    digest.update(repr((numba.__version__, llvmlite.__version__, cpu)).encode())
    return digest.hexdigest()[:16]
