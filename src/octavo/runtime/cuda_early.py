"""What a start on an NVIDIA GPU can begin before torch is imported, which takes seconds.

The GPU's context is made by the driver, in a thread: torch finds it there. Another imports Triton,
which hashes all of itself before it looks for its first kernel, and torch. Where this model's
kernels haven't all been compiled yet, a *forge* begins to import what compiling them takes; the
processes that compile are forked from it (``cuda_compile``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from threading import Thread

from platformdirs import user_cache_path

from octavo import __version__
from octavo.runtime.candidates import Model

_PACKAGE = Path(__file__).parents[1]
_COMPILED = "octavo-compiled"  # in Triton's cache: a file for each model whose kernels are there


def begin(model: Model) -> None:
    """Begin all that, for a model that will be loaded."""
    Thread(target=_make_context, daemon=True).start()
    if not compiled_mark(model).exists():
        forge()
    Thread(target=_import, daemon=True).start()


@cache
def forge() -> subprocess.Popen[str]:
    """This process's forge, told nothing yet; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "octavo.runtime.cuda_compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def dismiss_forge() -> None:
    """End the forge, if one waits: nothing is left to compile."""
    if forge.cache_info().currsize:
        waiting = forge()
        forge.cache_clear()
        assert waiting.stdin is not None
        waiting.stdin.close()


def set_cache_folder() -> Path:
    """Where Triton keeps what it compiles: ours, unless the user says otherwise."""
    ours = user_cache_path("octavo") / "triton" / f"{__version__}-{_version('triton')}"
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(ours)))


def compiled_mark(model: Model) -> Path:
    """The file that says for what GPU all of a model's kernels have been compiled: by these
    sources and versions, with these settings, and into this cache."""
    folder = set_cache_folder()
    versions = [_version(package) for package in ("torch", "triton")]
    settings = sorted(item for item in os.environ.items() if item[0].startswith("TRITON_"))
    longest = model.config.max_model_len or model.spec.max_position
    config = replace(model.config, model=None, max_model_len=longest)
    words = repr((_sources(), versions, settings, model.spec, config))
    return folder / _COMPILED / hashlib.sha256(words.encode()).hexdigest()


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for name in ("attention", "kernels", "models", "runtime"):
        for source in sorted((_PACKAGE / name).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _import() -> None:
    with suppress(ImportError):  # whoever needs it says so
        # 400 MB, without the GIL.
        Thread(target=import_module("triton.runtime.cache").triton_key, daemon=True).start()
        import_module("torch")


def _make_context() -> None:
    """Make the first GPU's primary context, which takes a second and no lock of Python's. What goes
    wrong here goes wrong in torch as well, which says what it is."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
