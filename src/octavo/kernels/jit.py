"""numba, set up once for every CPU kernel: releases the GIL, divides like C, caches on disk.

numba notices when the file of a compiled function changes, but not when that of a function it
calls does. So the cache lies in a folder named after all those files, the versions of numba
and llvmlite, and the CPU; a user's ``NUMBA_CACHE_DIR`` goes first.

What Python calls is kept beside it as machine code that is mapped without numba (``machine_code``):
ops, and functions that are called with integers. It is run only from a folder that nobody but the
user can write to. With any of numba's environment variables set all is left to numba.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import platformdirs

from octavo.kernels import host_cpu
from octavo.kernels.late import LateFunction, look_up, numba, ready
from octavo.kernels.machine_code import NotMovableError, from_bytes, lay_out, place, works_here

logger = logging.getLogger(__name__)
_guard = Lock()

_HERE = Path(__file__).parent
# What decides what is compiled: the kernels, and how files lay their formats out.
_SOURCES = (_HERE.parent / "checkpoint" / "quants.py", *_HERE.glob("*.py"), *_HERE.rglob("cpu*.py"))
_OURS = frozenset(map(str, _SOURCES))


@dataclass(frozen=True)
class Code:
    """Machine code at an address. ``cache_hits``: 1 where it wasn't compiled by this process;
    ``owner`` keeps what numba compiled alive."""

    address: int
    cache_hits: int
    owner: Any = None


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function on its first call, or fetch it from the cache."""
    if function is None:
        return lambda function: jit(function, **options)
    return Jitted(function, options)


class Jitted(LateFunction):
    """A function for kernels to call, and for Python. With integers Python needs no numba for it,
    once it has been compiled."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        def decorate() -> Any:
            return numba.njit(nogil=True, error_model="numpy", cache=cache_works(), **options)

        super().__init__(function, decorate)
        self._options = options
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if set(map(type, arguments)) != {int} or not _mapped():
            return self.real()(*arguments)
        if self._entry is None:
            self._entry = self._integers_only(len(arguments))
        return self._entry(*arguments)

    def _integers_only(self, count: int) -> Callable[..., Any]:
        """To be called with so many integers. It returns an integer, or what means nothing."""

        def signature() -> Any:
            kinds = (numba.types.int64,) * count
            self.real().compile(kinds)
            returns = self.real().overloads[kinds].signature.return_type
            if returns not in (numba.types.void, numba.types.int64):
                raise _OtherResultError
            return returns(*kinds)

        try:
            code = machine_code(self.function, f"{count} integers", signature, **self._options)
        except _OtherResultError:
            made: Callable[..., Any] = self.real()
            return made
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(code.address)


class _OtherResultError(Exception):
    """A function returns neither nothing nor an integer."""


def machine_code(
    function: Callable[..., Any], kind: str, signature: Callable[[], Any], **options: Any
) -> Code:
    """A function as C calls it, by numba's ``signature``; ``kind`` says the same in words, and goes
    into the name under which the code is kept."""
    path = _kept_at(function, kind)
    if path is not None and (address := _fetch(path)):
        return Code(address, 1)
    works = cache_works()
    ready()
    look_up(function)
    compiled = numba.cfunc(signature(), cache=works, error_model="numpy", **options)(function)
    if path is not None:
        # None where numba had it in its own cache.
        elf = compiled._library._compiled_object
        with suppress(NotMovableError, OSError):
            if elf is not None:
                image = lay_out(bytes(elf), compiled.native_name)
                address = place(image)
                _keep(path, image.to_bytes())
                return Code(address, 0)
    return Code(int(compiled.address or 0), compiled.cache_hits, compiled)


# ---- on disk


@cache
def cache_works() -> bool:
    """Point numba at our folder; false where nothing can be written there."""
    _save_one_at_a_time()
    if numba.config.CACHE_DIR:
        return True
    folder = _folder()
    if not folder.exists():
        logger.warning("octavo: compiling kernels for this CPU, once: some 15 s")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)
    return os.access(folder, os.W_OK)


def _save_one_at_a_time() -> None:
    """numba reads a function's index, adds to it and writes it: two processes that compile at once
    would give two codes the same file name, and a later one would run the wrong code."""
    files = numba.core.caching.IndexDataCacheFile

    def save_alone(file: Any, key: Any, data: Any) -> None:
        with open(f"{file._index_path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(file, key, data)

    with _guard:
        save = files.save
        if save.__name__ != save_alone.__name__:  # twice it would wait for itself
            files.save = save_alone


@cache
def _mapped() -> bool:
    """Whether code may be mapped from our folder, once there is some."""
    return works_here() and not any(name.startswith("NUMBA_") for name in os.environ)


def _kept_at(function: Callable[..., Any], kind: str) -> Path | None:
    """Where the code of a function is kept: a name for what the folder's doesn't say. None where
    that isn't all that decides what it is."""
    closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    plain = all(isinstance(value, str | int | float | np.generic) for value in closure)
    if not _mapped() or not plain or function.__code__.co_filename not in _OURS:
        return None
    said = repr((function.__module__, function.__qualname__, closure, kind))
    return _folder() / f"{function.__name__}-{hashlib.sha256(said.encode()).hexdigest()[:24]}.code"


def _fetch(path: Path) -> int:
    """The address of kept code, or 0."""
    if not _is_private(path.parent):
        return 0
    try:
        digest, _, raw = path.read_bytes().partition(b"\n")
        if hashlib.sha256(raw).hexdigest().encode() != digest:
            return 0
        return place(from_bytes(raw))
    except (OSError, NotMovableError):
        return 0


@cache
def _is_private(folder: Path) -> bool:
    """Whether only this user can put something there: what lies there is run."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keep(path: Path, raw: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw)
            file.flush()
            os.replace(file.name, path)  # whole or not at all, also with other processes
        except OSError:
            os.unlink(file.name)
            raise


@cache
def _folder() -> Path:
    return platformdirs.user_cache_path("octavo") / "numba" / _key()


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(set(_SOURCES)):
        digest.update(source.read_bytes())
    for package in ("numba", "llvmlite"):
        # Their versions, without importing either.
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            digest.update(Path(spec.origin).with_name("_version.py").read_bytes())
    versions = sys.version, np.__version__, host_cpu.identity()
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:16]
