"""Compiling a model's Triton kernels before they are launched, on all cores.

Triton compiles a kernel where it is first launched, one after the other: a minute for a model. So
launches are first made in vain, and what they would compile is noted; processes compile that into
Triton's cache, where the launches proper find it. What goes wrong here is compiled there, as if
nobody had tried before.

Run as a module this is the forge (see ``cuda_early``): importing torch and Triton takes as long as
compiling a kernel, so one process does it, and those that compile are forked from it. They have no
use for the GPU, and take no memory of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from octavo.runtime.cuda_early import forge

logger = logging.getLogger(__name__)

_MAX_PROCESSES = 16  # of some 100 MB each, beside what they share
_JOBS = "jobs"
_TRIED = "octavo-tried"  # in Triton's cache: a file for each kernel, with what went wrong
_PATIENCE = 600.0  # seconds in which weights are read, or whoever began the forge has failed
_FEW = 3  # kernels are compiled in the time in which the forge begins


@dataclass(frozen=True)
class Kernel:
    """One way in which Triton compiles a function; ``key`` is Triton's hash of the function's
    source and of all that it calls."""

    module: str
    name: str
    key: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


def note_kernels(launch: Callable[[], None]) -> list[Kernel]:
    """Call ``launch`` with no kernel launched, and return those that this process hasn't compiled
    yet. Not one may run: what it reads would be what others have not written."""
    found: dict[tuple[str, str, str], Kernel] = {}

    def note(**call: Any) -> bool:
        function, compiling = call["fn"], call["compile"]
        key = function.module, function.name, str(compiling["key"])
        if key not in found:
            found[key] = Kernel(
                function.module,
                function.name,
                function.jit_function.cache_key,
                compiling["signature"],
                compiling["constants"],
                compiling["configs"][0],
                _options(json.loads(compiling["specialization_data"])["options"]),
            )
        return True  # compile nothing

    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run_nothing(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **constants)

    JITFunction.run = run_nothing
    knobs.runtime.jit_cache_hook = note
    try:
        launch()
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook
    return list(found.values())


def compile_kernels(kernels: Sequence[Kernel], target: GPUTarget, num_processes: int) -> int:
    """Compile them into Triton's cache, but for those that were tried once; how many processes did
    it, when that is done. Few are left to the launches."""
    jobs = [
        (tried, pickle.dumps(kernel))
        for kernel in kernels
        if not (tried := _tried(kernel, target)).exists()
    ]
    if len(jobs) < _FEW:
        return 0
    count = min(num_processes, len(jobs), _MAX_PROCESSES)
    logger.warning("octavo: compiling %d kernels for this GPU, once ...", len(jobs))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        (Path(folder) / _JOBS).write_bytes(pickle.dumps((target, jobs)))
        smith = forge()
        forge.cache_clear()  # it does this once
        assert smith.stdin is not None
        with suppress(OSError):  # it has died, and has compiled nothing
            smith.stdin.write(f"{count} {folder}\n")
            smith.stdin.flush()
        smith.wait()
        smith.stdin.close()
    seconds = time.monotonic() - began
    problems = [_problem(tried) for tried, _ in jobs]
    failed = [problem for problem in problems if problem]
    rest = f", but for {len(failed)}, which are left to their launch: {failed[0]}" if failed else ""
    logger.warning("octavo: compiled in %.1f s by %d processes%s", seconds, count, rest)
    return count


def main() -> None:
    """Import, wait for a line that says how many processes and where the jobs lie, and fork."""
    import_module("octavo.runtime.cuda_load")
    triton_key()  # a hash of all of Triton, 400 MB, that every one of them would make
    with suppress(Exception):  # C that Triton compiles once, for whoever launches
        import_module("triton.backends.nvidia.driver").CudaUtils()
    is_told, _, _ = select.select([sys.stdin], [], [], _PATIENCE)
    words = sys.stdin.readline().split(maxsplit=1) if is_told else []
    if not words:
        return
    workers = []
    for _ in range(int(words[0])):
        pid = os.fork()
        if pid == 0:
            _work_and_exit(Path(words[1].rstrip("\n")))
        workers.append(pid)
    Thread(target=_end_with_parent, args=(workers,), daemon=True).start()
    for pid in workers:
        os.waitpid(pid, 0)


def _end_with_parent(workers: Sequence[int]) -> NoReturn:
    sys.stdin.read()
    for pid in workers:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


def _work_and_exit(folder: Path) -> NoReturn:
    try:
        work(folder)
    finally:
        os._exit(0)


def work(folder: Path) -> None:
    """Compile jobs until all are taken, or nobody waits for them any more."""
    parent = os.getppid()
    target, jobs = pickle.loads((folder / _JOBS).read_bytes())
    for number, (tried, job) in enumerate(jobs):
        if os.getppid() != parent or not _takes(folder, str(number)):
            continue
        problem = ""
        try:
            _compile(pickle.loads(job), target, folder)
        except Exception as error:  # whoever launches it has it again
            problem = f"{type(error).__name__}: {error}"
        tried.parent.mkdir(exist_ok=True)
        tried.write_text(problem)


def _compile(kernel: Kernel, target: GPUTarget, folder: Path) -> None:
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(import_module(kernel.module), kernel.name)
    # It depends on the functions that a process has hashed before: constants of one that is called
    # count only if it was. The cache must go by that of the process that launches.
    function.hash = kernel.key
    source = GluonASTSource if function.is_gluon() else ASTSource
    compiled = triton.compile(
        source(function, kernel.signature, kernel.constants, kernel.attributes),
        target=target,
        options=kernel.options,
    )
    # What launches it is made by the C compiler, which takes as long. Many kernels share theirs.
    shared = list(kernel.signature.values()), getattr(compiled.metadata, "tensordesc_meta", None)
    if _takes(folder, _digest(shared)):
        CudaLauncher(compiled.src, compiled.metadata)


def _takes(folder: Path, name: str) -> bool:
    """Whether this process is the first to take it."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _tried(kernel: Kernel, target: GPUTarget) -> Path:
    return Path(knobs.cache.dir) / _TRIED / _digest((kernel, target, triton.__version__))


def _problem(tried: Path) -> str:
    """What went wrong, or nothing."""
    return tried.read_text() if tried.exists() else "its process died"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they were before they became JSON, which has no tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


if __name__ == "__main__":
    main()
