"""Finds a checkpoint's tokenizer, its special tokens and its chat templates."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.text.gguf_vocab import build_backend
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
)

# GGUF's names for the same, its spelling of "separator" included.
_GGUF_SPECIAL_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}

# Control tokens that end an assistant's turn. Older GGUF files of chat models name no eot_token_id,
# and their eos_token_id only ends a document: such a model would talk past its turn.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

_ADDED_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_tokenizer(checkpoint: Checkpoint, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, or the Hugging Face tokenizer of another ``folder``.

    Raises :class:`CheckpointError` for a missing or damaged tokenizer and
    :class:`UnsupportedModelError` for a kind that Octavo can't reproduce exactly.
    """
    configs = (checkpoint.config, checkpoint.generation_config)
    eos_ids = frozenset(id for config in configs for id in _as_ids(config.get("eos_token_id")))
    if folder is None and checkpoint.metadata is not None:
        tokenizer = _from_gguf(checkpoint.metadata, eos_ids)
    else:
        tokenizer = _from_folder(folder or Path(checkpoint.path), eos_ids)
    tokenizer.bytes_table(skip_special_tokens=False)  # refuses an unknown decoder now, not later
    return tokenizer


def _from_gguf(metadata: Mapping[str, Any], eos_ids: frozenset[int]) -> Tokenizer:
    backend = build_backend(metadata)

    def named_id(name: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if token_id is None else int(token_id)

    special_tokens: dict[str, str | list[str]] = {}
    for name, gguf_name in _GGUF_SPECIAL_NAMES.items():
        if (token_id := named_id(gguf_name)) is not None:
            special_tokens[name] = backend.id_to_token(token_id) or ""
    chat_templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    ends = {named_id(name) for name in ("eos", "eot", "eom")}
    if chat_templates and named_id("eot") is None:
        control = {str(t): id for id, t in backend.get_added_tokens_decoder().items() if t.special}
        ends |= {control[text] for text in _END_OF_TURN if text in control}
    return Tokenizer(
        backend=backend,
        bos_id=named_id("bos"),
        eos_ids=eos_ids | {token_id for token_id in ends if token_id is not None},
        special_tokens=special_tokens,
        chat_templates=chat_templates,
    )


def _from_folder(folder: Path, eos_ids: frozenset[int]) -> Tokenizer:
    config = _read_json(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    _add_listed_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    special_tokens: dict[str, str | list[str]] = {}
    for name in _SPECIAL_NAMES:
        value = named.get(name)
        if isinstance(value, list):
            special_tokens[name] = [_token_text(token) for token in value]
        elif value is not None:
            special_tokens[name] = _token_text(value)
    bos_id, eos_id = (
        backend.token_to_id(text) if isinstance(text := special_tokens.get(name), str) else None
        for name in ("bos_token", "eos_token")
    )
    tokenizer = Tokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
    )
    # As in transformers 5, tokenizer.json alone decides; older versions let the flag overrule it.
    flag = config.get("add_bos_token")
    if bos_id is not None and flag is not None and flag != tokenizer.adds_bos:
        logger.warning(
            "%s: tokenizer_config.json has add_bos_token %s, but tokenizer.json %s BOS and is "
            "followed",
            folder,
            flag,
            "adds" if tokenizer.adds_bos else "doesn't add",
        )
    return tokenizer


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "tekken.json", "vocab.json"):
            if (folder / other).exists():
                raise UnsupportedModelError(
                    f"{folder} has {other} and no tokenizer.json. Convert it with transformers, "
                    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or give "
                    "another folder as the tokenizer"
                )
        raise CheckpointError(
            f"{folder} has no tokenizer.json; give a folder that has one as the tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path} can't be read: {error}") from error
    # Training settings that some files keep; a prompt is never cut or padded in silence.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, listed: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Add what ``tokenizer_config.json`` lists and ``tokenizer.json`` lacks."""
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {name: value for name, value in entry.items() if name in _ADDED_TOKEN_FLAGS}
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != int(token_id):
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {entry['content']!r} the id {token_id}, "
                f"tokenizer.json gives it {backend.token_to_id(entry['content'])}"
            )


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A ``.jinja`` file is the newest way to store one and wins."""
    templates: dict[str, str] = {}
    for stored in (config, _read_json(folder / "chat_template.json")):
        value = stored.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").exists():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, it must hold an object")
    return value


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
