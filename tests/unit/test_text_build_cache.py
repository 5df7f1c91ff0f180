"""A slow tokenizer is built once; a damaged or foreign file is never trusted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.tokenizers import sentencepiece_metadata

from octavo.text.build_cache import cached_build
from octavo.text.gguf_vocab import build_backend

METADATA = sentencepiece_metadata(["\u2581", "a", "b", "ab"])


class Builder:
    """Counts how often a tokenizer is really built."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
        self.count += 1
        return tokenizers.Tokenizer(tokenizers.models.BPE())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo" / "tokenizers"


def test_kept_and_read_again(folder: Path) -> None:
    ids = [build_backend(METADATA).encode("ab a").ids for _ in range(2)]
    assert ids[0] == ids[1] == [1, 259, 262, 259, 260]
    assert len(list(folder.iterdir())) == 1  # and no temporary file left


def test_built_once_for_each_input() -> None:
    build = Builder()
    for _ in range(2):
        cached_build(build, METADATA)
        cached_build(build, METADATA | {"tokenizer.ggml.add_space_prefix": False})
        cached_build(build, METADATA | {"general.architecture": "gemma"})
        cached_build(build, METADATA | {"general.name": "doesn't matter"})
    assert build.count == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"flipped"])
def test_a_damaged_file_is_rebuilt(
    folder: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    cached_build(build, METADATA)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"BPE", b"XYZ") if damage == b"flipped" else damage)
    with caplog.at_level(logging.WARNING):
        cached_build(build, METADATA)
    assert "damaged" in caplog.text
    assert (build.count, path.read_bytes()) == (2, whole)


def test_an_unwritable_folder_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "octavo").write_text("a file where the folder should be")
    build = Builder()
    with caplog.at_level(logging.WARNING):
        cached_build(build, METADATA)
        cached_build(build, METADATA)
    assert build.count == 2
    assert "can't keep" in caplog.text
