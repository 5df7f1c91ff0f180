"""The prompts of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import byte_tokenizer

from octavo.bench.config import DatasetConfig
from octavo.bench.dataset import WORDS, make_samples, random_id_samples
from octavo.errors import ConfigError
from octavo.text import Tokenizer

BYTES = Tokenizer(backend=byte_tokenizer())


def test_random_texts_without_a_tokenizer_count_words() -> None:
    config = DatasetConfig(input_len=50, output_len=7)
    samples = make_samples(config, 20)
    assert all(set(sample.prompt.split()) <= set(WORDS.split()) for sample in samples)
    assert {len(sample.prompt.split()) for sample in samples} == {50}
    assert {(sample.input_len, sample.output_len) for sample in samples} == {(None, 7)}
    assert len({sample.prompt for sample in samples}) == 20  # no prefix to cache
    assert make_samples(config, 20) == samples
    assert make_samples(DatasetConfig(input_len=50, output_len=7, seed=1), 20) != samples


def test_random_texts_with_a_tokenizer_are_exact() -> None:
    for sample in make_samples(DatasetConfig(input_len=33), 5, BYTES):
        assert sample.input_len == len(sample.prompt) == 33


def test_lengths_vary_within_their_ratio() -> None:
    config = DatasetConfig(random_input_len=100, random_output_len=10, random_range_ratio=0.2)
    samples = random_id_samples(config, 2000, vocab_size=300)
    assert {sample.input_len for sample in samples} == set(range(80, 121))
    assert {sample.output_len for sample in samples} == set(range(8, 13))
    assert all(len(sample.prompt) == sample.input_len for sample in samples)
    assert {i for sample in samples for i in sample.prompt} == set(range(300))


def write(path: Path, rows: Any) -> DatasetConfig:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return DatasetConfig(dataset_name="sharegpt", dataset_path=str(path))
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return DatasetConfig(dataset_name="custom", dataset_path=str(path))


def talk(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt(tmp_path: Path) -> None:
    rows = [
        talk("a question", "an answer", "another question"),
        talk("unanswered"),
        talk("too short an answer", "no"),
        talk("abc", "too short a question"),
        talk("long" * 300, "an answer"),
        talk("question", "long" * 600),
        talk("second", "good answer"),
        {"id": "no conversation"},
    ]
    config = write(tmp_path / "talks.json", rows)
    samples = make_samples(config, 5, BYTES)
    assert {(s.prompt, s.input_len, s.output_len) for s in samples} == {
        ("a question", 10, 9),
        ("second", 6, 11),
    }
    with pytest.raises(ConfigError, match="give tokenizer, or output_len"):
        make_samples(config, 5)
    told = DatasetConfig(dataset_name="sharegpt", dataset_path=config.dataset_path, output_len=9)
    assert {(s.input_len, s.output_len) for s in make_samples(told, 10)} == {(None, 9)}


def test_custom(tmp_path: Path) -> None:
    config = write(tmp_path / "own.jsonl", [{"prompt": "one"}, {"prompt": "2", "output_tokens": 9}])
    samples = make_samples(config, 3)
    assert {(s.prompt, s.output_len) for s in samples} == {("one", 256), ("2", 9)}


@pytest.mark.parametrize(
    "row", [{"text": "x"}, {"prompt": ""}, {"prompt": "x", "output_tokens": 0}, "x", ["prompt"]]
)
def test_custom_rows_that_are_wrong_are_named(tmp_path: Path, row: Any) -> None:
    config = write(tmp_path / "own.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ConfigError, match="row 2"):
        make_samples(config, 1)


def test_files_that_are_no_dataset(tmp_path: Path) -> None:
    for text, why in (("{", "can't be read"), ('{"a": 1}', "isn't a list"), ("[]", "no usable")):
        (tmp_path / "bad.json").write_text(text)
        config = DatasetConfig(dataset_name="sharegpt", dataset_path=str(tmp_path / "bad.json"))
        with pytest.raises(ConfigError, match=why):
            make_samples(config, 1, BYTES)
