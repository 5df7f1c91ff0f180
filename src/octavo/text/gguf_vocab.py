"""A ``tokenizers.Tokenizer`` built from the vocabulary that a GGUF file carries.

A GGUF file names its tokenizer by ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``; the rest of
the recipe is known to the reader only. The recipes here give llama.cpp's ids, which the tests
hold them to, and an unknown name is refused: a wrong split is a silently worse answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.text.build_cache import cached_build
from octavo.text.detokenizer import SPACE_MARK

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_GEMMA = ("gemma", "gemma2", "gemma3")

WAY_OUT = (
    "Give a folder that holds the model's own tokenizer.json as the tokenizer, or use a GGUF file "
    "that was converted recently"
)


@dataclass(frozen=True)
class _Split:
    """How a byte-level BPE cuts a text before it merges."""

    regex: str | None = None  # None: GPT-2's own
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file doesn't say


def _regex(
    *, letters: str = r"\p{L}", digits: str = r"\p{N}", not_punctuation: str = r"\s\p{L}\p{N}"
) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
        + rf"{letters}+|{digits}| ?[^{not_punctuation}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UP_TO_3_DIGITS = _regex(digits=r"\p{N}{1,3}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen's own tokenizer composes characters (NFC), which a GGUF file doesn't record.
_RECIPES: dict[_Split, str] = {
    _Split(single_digits=True): (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
    ),
    _Split(): "gpt-2 olmo mpt phi-2 trillion granite-docling",
    _Split(_regex(), nfc=True): ("qwen2 deepseek-r1-qwen megrez hunyuan stablelm2 solar-open"),
    _Split(
        _regex(letters=r"[\p{L}\p{M}]", not_punctuation=r"\s\p{L}\p{M}\p{N}"), nfc=True
    ): "qwen35",
    _Split(_UP_TO_3_DIGITS, ignore_merges=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0"
    ),
    _Split(_UP_TO_3_DIGITS): "glm4 chatglm-bpe dbrx smaug-bpe",
    _Split(_TEKKEN, ignore_merges=True, add_bos=True): "tekken",
}
_SPLITS = {name: split for split, names in _RECIPES.items() for name in names.split()}


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises :class:`UnsupportedModelError` for a kind without a recipe and
    :class:`CheckpointError` where a needed list is missing or of the wrong length.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _build_byte_level(metadata)
    if kind == "llama":
        return cached_build(_build_sentencepiece, metadata)
    raise UnsupportedModelError(
        f"tokenizer.ggml.model is {kind!r}, Octavo knows 'gpt2' and 'llama'. {WAY_OUT}"
    )


def _build_byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    split = _split_of(metadata.get("tokenizer.ggml.pre"))
    tokens = _tokens(metadata)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(
            f"tokenizer.ggml.merges is missing, a gpt2 tokenizer needs it. {WAY_OUT}"
        )
    pairs = [_split_merge(merge) for merge in merges]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=pairs,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=split.ignore_merges,
        )
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"tokenizer.ggml.merges contradicts the tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None)
    if split.regex is not None:
        cut = pre_tokenizers.Split(Regex(split.regex), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    elif split.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    types = _token_types(metadata, len(tokens))
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    _add_bos_and_eos(backend, metadata, tokens, add_bos=split.add_bos)
    return backend


def _split_of(pre: object) -> _Split:
    if pre is None or pre == "default":
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {'missing' if pre is None else repr(pre)}: the file doesn't "
            f"say how its tokenizer cuts words and digits, and a guess gives worse answers. "
            f"{WAY_OUT}"
        )
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {pre!r}, which Octavo has no recipe for. {WAY_OUT}. "
            f"Known: {', '.join(sorted(_SPLITS))}"
        )
    return _SPLITS[str(pre)]


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(f"tokenizer.ggml.merges has {merge!r}, which is no pair of tokens")
    return left, right


def _build_sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, whose merges are not stored but follow from the vocabulary."""
    gemma = metadata.get("general.architecture") in _GEMMA
    tokens = _tokens(metadata)
    types = _token_types(metadata, len(tokens))
    if gemma:  # its runs of spaces are stored as real spaces
        tokens = [
            token.replace(" ", SPACE_MARK) if set(token) == {" "} else token for token in tokens
        ]
        # Gemma's first scores are 0 or -1000; the order of its vocabulary is the true rank.
        scores: Sequence[float] = range(0, -len(tokens), -1)
    else:
        scores = _list(metadata, "tokenizer.ggml.scores", len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_derive_merges(vocabulary, scores, types),
            unk_token=_named_token(metadata, "unknown", tokens, default=0)[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell_spaces = normalizers.Replace(" ", SPACE_MARK)
    decoding = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spell_spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spell_spaces
    backend.decoder = decoders.Sequence(decoding)
    backend.add_tokens(
        [
            AddedToken(
                token,
                special=kind in (_CONTROL, _UNKNOWN),
                normalized=gemma and set(token) == {SPACE_MARK},
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]
    )
    _add_bos_and_eos(backend, metadata, tokens, add_bos=True)
    return backend


def _derive_merges(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the likeliest token first.

    Control, unknown and byte tokens are not made: SentencePiece never does, and text that spells
    one has to stay text.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        if types[index] in (_CONTROL, _UNKNOWN, _BYTE):
            continue
        pairs = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((vocabulary[left], vocabulary[right], left, right))
        pairs.sort()
        score = -float(scores[index])
        ranked += [(score, -len(left), -len(right), left, right) for _, _, left, right in pairs]
    ranked.sort(key=lambda entry: entry[:3])  # stable: ties stay in order of their ids
    return [(left, right) for _, _, _, left, right in ranked]


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    add_bos: bool,
) -> None:
    template, named = ["$A"], []
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        named.append(_named_token(metadata, "bos", tokens))
        template.insert(0, named[-1][0])
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        named.append(_named_token(metadata, "eos", tokens))
        template.append(named[-1][0])
    if named:
        backend.post_processor = TemplateProcessing(single=template, special_tokens=named)


def _named_token(
    metadata: Mapping[str, Any], name: str, tokens: Sequence[str], default: int | None = None
) -> tuple[str, int]:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if token_id is None or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{name}_token_id is {token_id}, but the tokenizer needs it; ids go "
            f"from 0 to {len(tokens) - 1}"
        )
    return tokens[token_id], int(token_id)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) == 0:
        raise CheckpointError(f"tokenizer.ggml.tokens is missing. {WAY_OUT}")
    return list(tokens)


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    return [int(kind) for kind in _list(metadata, "tokenizer.ggml.token_type", count)]


def _list(metadata: Mapping[str, Any], key: str, count: int) -> Sequence[Any]:
    values: Sequence[Any] | None = metadata.get(key)
    if values is None or len(values) != count:
        found = "missing" if values is None else f"{len(values)} long"
        raise CheckpointError(f"{key} is {found}, tokenizer.ggml.tokens has {count} entries")
    return values
