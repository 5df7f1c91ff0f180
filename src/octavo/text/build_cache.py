"""Keeps a tokenizer that is slow to build (Gemma's takes seconds) between runs.

A file of the user's cache folder holds the serialised tokenizer behind its SHA-256, under the
hash of everything it was built from. A file that doesn't match its hash is built anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs
import tokenizers

logger = logging.getLogger(__name__)

Metadata = Mapping[str, Any]

_RECIPE = 1  # raise it when the same metadata gives another tokenizer


def cached_build(
    build: Callable[[Metadata], tokenizers.Tokenizer], metadata: Metadata
) -> tokenizers.Tokenizer:
    """``build(metadata)``, or what an earlier run kept of it.

    ``build`` may read ``general.architecture`` and the keys ``tokenizer.ggml.*`` only.
    """
    folder = platformdirs.user_cache_path("octavo") / "tokenizers"
    path = folder / f"{_fingerprint(metadata)}.json"
    kept = _read(path)
    if kept is not None:
        return kept
    backend = build(metadata)
    try:
        _write(path, backend)
    except OSError as error:
        logger.warning("can't keep the tokenizer in %s: %s", folder, error)
    return backend


def _read(path: Path) -> tokenizers.Tokenizer | None:
    try:
        digest, _, serialised = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("can't read the kept tokenizer %s: %s", path, error)
        return None
    if hashlib.sha256(serialised).hexdigest().encode() != digest:
        logger.warning("the kept tokenizer %s is damaged; building it anew", path)
        return None
    return tokenizers.Tokenizer.from_buffer(serialised)


def _write(path: Path, backend: tokenizers.Tokenizer) -> None:
    serialised = backend.to_str().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(serialised).hexdigest().encode() + b"\n" + serialised)
            file.flush()
            os.replace(file.name, path)  # whole or not at all, also with other processes
        except OSError:
            os.unlink(file.name)
            raise


def _fingerprint(metadata: Metadata) -> str:
    digest = hashlib.sha256(f"{_RECIPE} tokenizers {tokenizers.__version__}".encode())
    for key in sorted(metadata):
        if key == "general.architecture" or key.startswith("tokenizer.ggml."):
            value = metadata[key]
            content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
            digest.update(f"{key} {len(content)}\n".encode() + content)
    return digest.hexdigest()
