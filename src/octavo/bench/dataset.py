"""The prompts of a benchmark: made up, or from a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.config import FILE_OUTPUT_LEN, DatasetConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.text import Tokenizer

# Short common words: with the space before it, each is one token of nearly every vocabulary.
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also "
    "well did many must before back see through way where get much go good your down long own "
    "just because still between under last never day same another know while here great high both "
    "might year world life state few old small off public found set part left end place used "
    "water house hand again night side head work right point home line name power best group city "
    "land days number course door light field table town book kind white black cost class case "
    "plan law air sun tree road river paper music story image voice letter window street market "
    "level"
)
_WORDS = WORDS.split()

# ShareGPT's usual limits: shorter turns say nothing, longer ones are outliers.
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048


@dataclass(frozen=True)
class Sample:
    """One request: text, or token ids where no text is needed. ``input_len`` is None where nobody
    has counted."""

    prompt: str | list[int]
    input_len: int | None
    output_len: int


def make_samples(
    config: DatasetConfig, count: int, tokenizer: Tokenizer | None = None
) -> list[Sample]:
    """``count`` texts. Without a tokenizer random ones have as many words as tokens are wanted.

    Raises :class:`ConfigError` for a file that can't be read, or not without a tokenizer.
    """
    rng = random.Random(config.seed)
    if config.dataset_name == "random":
        lens = [_random_lens(rng, config) for _ in range(count)]
        return [Sample(*_random_text(rng, length, tokenizer), output) for length, output in lens]
    if config.dataset_name == "sharegpt":
        found = list(_sharegpt(config, tokenizer))
    else:
        found = list(_custom(config, tokenizer))
    if not found:
        raise ConfigError(f"{config.dataset_path} has no usable prompt")
    rng.shuffle(found)
    return list(islice(cycle(found), count))


def random_id_samples(config: DatasetConfig, count: int, vocab_size: int) -> list[Sample]:
    """``count`` random prompts as token ids, of exact lengths."""
    rng = random.Random(config.seed)
    lens = [_random_lens(rng, config) for _ in range(count)]
    return [Sample(random_ids(rng, length, vocab_size), length, output) for length, output in lens]


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Any ids of the vocabulary, special ones too."""
    return rng.choices(range(vocab_size), k=length)


def _random_lens(rng: random.Random, config: DatasetConfig) -> tuple[int, int]:
    ratio = config.random_range_ratio

    def vary(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)))

    prompt, answer = config.random_lens
    return vary(prompt), vary(answer)


def _random_text(
    rng: random.Random, length: int, tokenizer: Tokenizer | None
) -> tuple[str, int | None]:
    """A text of ``length`` tokens, or as near as its tokenizer comes, and its exact length."""
    text = " ".join(rng.choices(_WORDS, k=length))
    if tokenizer is None:
        return text, None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) > length:  # words of several tokens
        text = tokenizer.decode(ids[:length])
        ids = tokenizer.encode(text, add_special_tokens=False)
    return text, len(ids)


def _sharegpt(config: DatasetConfig, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """The first turn of each conversation, answered at the length of the second."""
    if tokenizer is None and config.output_len is None:
        raise ConfigError(
            "the lengths of sharegpt's answers are counted with a tokenizer; give tokenizer, or "
            "output_len"
        )
    for row in _rows(config, json.loads):
        match row:
            case {"conversations": [{"value": str(prompt)}, {"value": str(answer)}, *_]}:
                pass
            case _:
                continue  # a conversation without an answer
        input_len = _count(prompt, tokenizer)
        output_len = config.output_len or _count(answer, tokenizer) or 0
        if input_len is not None and not MIN_LEN <= input_len <= MAX_PROMPT_LEN:
            continue
        if config.output_len is None and output_len < MIN_LEN:
            continue
        if (input_len or 0) + output_len <= MAX_TOTAL_LEN:
            yield Sample(prompt, input_len, output_len)


def _custom(config: DatasetConfig, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    def parse(text: str) -> list[Any]:
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    for number, row in enumerate(_rows(config, parse), 1):
        match row:
            case {"prompt": str(prompt)} if prompt:
                wanted = config.output_len or row.get("output_tokens", FILE_OUTPUT_LEN)
            case _:
                prompt, wanted = "", None
        if not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(
                f'{config.dataset_path}, row {number}, must be like {{"prompt": "TEXT"}} or '
                '{"prompt": "TEXT", "output_tokens": 128}'
            )
        yield Sample(prompt, _count(prompt, tokenizer), wanted)


def _rows(config: DatasetConfig, parse: Callable[[str], Any]) -> Sequence[Any]:
    assert config.dataset_path is not None
    try:
        rows = parse(Path(config.dataset_path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{config.dataset_path} can't be read: {problem}") from problem
    if not isinstance(rows, list):
        raise ConfigError(f"{config.dataset_path} isn't a list of {config.dataset_name} rows")
    return rows


def _count(text: str, tokenizer: Tokenizer | None) -> int | None:
    return None if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))
