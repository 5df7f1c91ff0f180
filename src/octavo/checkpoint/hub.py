"""Fetching from the Hugging Face hub only the files that Octavo reads.

``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_ENDPOINT`` and ``HF_TOKEN`` mean what they mean to
huggingface_hub. Without network, what an earlier run left in its cache is used.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.checkpoint.folder import PICKLE_SUFFIXES, SINGLE
from octavo.checkpoint.gguf_file import first_part, part_paths
from octavo.errors import ModelNotFoundError, UnsupportedModelError

# Any failure of transport: huggingface_hub sits on requests, httpx or httpx2 by version, and this
# is the base of that library's errors.
_TRANSPORT_ERRORS: tuple[type[BaseException], ...] = (HfHubHTTPError.__bases__[0], OSError)

_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP|NVFP|BF16|F16|F32)\w*", re.IGNORECASE)


def fetch_model(repo: str, revision: str | None, *, with_weights: bool = True) -> Path:
    """The local folder with config, tokenizer and, if wanted, safetensors weights of ``repo``."""
    files = _list_files(repo, revision)
    top = [file for file in files if "/" not in file]
    texts = [file for file in top if file.endswith((".json", ".jinja", "tokenizer.model"))]
    if not with_weights:
        return _download(repo, revision, texts)
    weights = [file for file in top if file.endswith(".safetensors")]
    if SINGLE in weights:
        weights = [SINGLE]
    # Mistral's own format holds the same weights again.
    weights = [file for file in weights if not file.startswith("consolidated")]
    if weights:
        return _download(repo, revision, weights + texts)
    if ggufs := _gguf_models(files):
        raise ModelNotFoundError(
            f"{repo} holds GGUF files; say which, as {repo}:QUANT with one of {_quants(ggufs)}"
        )
    if any(file.endswith(PICKLE_SUFFIXES) for file in files):
        raise UnsupportedModelError(
            f"{repo} holds pickled weights only. Nothing is unpickled, since that runs code; look "
            "for a safetensors or GGUF conversion"
        )
    raise ModelNotFoundError(f"{repo} holds no safetensors or GGUF weights")


def fetch_gguf(repo: str, quant: str, revision: str | None) -> Path:
    """The local path (first part of a split file) of the GGUF in ``repo`` whose name has
    ``quant`` as a whole word: ``Q4_K`` doesn't find ``Q4_K_M``; upper and lower case are one."""
    ggufs = _gguf_models(_list_files(repo, revision))
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[-.]", re.IGNORECASE)
    found = [file for file in ggufs if word.search(Path(file).name)]
    if not found:
        there = f"those there are {_quants(ggufs)}" if ggufs else "it holds no GGUF files"
        raise ModelNotFoundError(f"{repo} has no GGUF of quantisation {quant!r}; {there}")
    if len(found) > 1:
        raise ModelNotFoundError(
            f"{quant!r} fits {len(found)} files of {repo}: {', '.join(found)}; say more of the name"
        )
    parts = part_paths(Path(found[0])) or [Path(found[0])]
    return _download(repo, revision, [str(part) for part in parts]) / found[0]


def _gguf_models(files: list[str]) -> list[str]:
    """GGUF files that hold a model (an ``mmproj`` is a vision tower), a split one by its first
    part."""
    ggufs = (file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    return sorted({str(first_part(Path(file))) for file in ggufs})


def _quants(ggufs: list[str]) -> str:
    names = (Path(file).name for file in ggufs)
    return ", ".join(match[0] if (match := _QUANT.search(name)) else name for name in names)


def _list_files(repo: str, revision: str | None) -> list[str]:
    """The repository's files or, where the hub can't be reached, those of them in the cache."""
    try:
        # list_repo_files would ask again for 23 s where there is no network.
        info = HfApi().model_info(repo, revision=revision)
        return [file.rfilename for file in info.siblings or []]
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _not_fetched(repo, revision, error) from error
    except _TRANSPORT_ERRORS as error:
        try:
            # No pattern: the folder itself, however much of the repository it holds.
            folder = snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=[]
            )
        except LocalEntryNotFoundError:
            raise _not_fetched(repo, revision, error) from error
        cached = Path(folder)
        return [str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file()]


def _download(repo: str, revision: str | None, files: list[str]) -> Path:
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except _TRANSPORT_ERRORS as error:
        raise _not_fetched(repo, revision, error) from error


def _not_fetched(repo: str, revision: str | None, error: BaseException) -> ModelNotFoundError:
    match error:
        case HFValidationError():
            reason = f"is no name that the hub allows: {error}"
        case GatedRepoError():
            reason = "is gated; accept its terms on the hub and set HF_TOKEN"
        case RevisionNotFoundError():
            reason = f"has no revision {revision!r}"
        case RepositoryNotFoundError():
            reason = "is not on the hub, or is private; check the name, or set HF_TOKEN"
        case _:
            reason = (
                "can't be fetched from the Hugging Face hub and isn't (wholly) in its cache: "
                f"{type(error).__name__}: {error}. Check the network, HF_HUB_OFFLINE and "
                "HF_ENDPOINT, or give a local folder or .gguf file"
            )
    return ModelNotFoundError(f"{repo} {reason}")
