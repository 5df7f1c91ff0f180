"""``octavo bench latency``, ``throughput`` and ``startup`` measure: their lines, and the last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import smollm2_path, tiny

from octavo.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(tmp_path_factory.mktemp("tiny")))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], dict[str, Any]]:
    assert main(["bench", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    sizes = ["--batch-size", "3", "--input-len", "20", "--output-len", "5"]
    counts = ["--num-iters", "4", "--num-iters-warmup", "1", "--output-json", str(file)]
    # Random weights and no tokenizer: speed needs neither.
    dummy = ["--load-format", "dummy", "--skip-tokenizer-init"]
    lines, found = run(capsys, "latency", model, *sizes, *counts, *dummy)
    labels = [re.sub(r"[\d.e-]+ seconds$", "# seconds", line) for line in lines[:8]]
    assert labels == [
        "Avg latency: # seconds",
        "Std latency: # seconds",
        *(f"{p}% percentile latency: # seconds" for p in (10, 25, 50, 75, 90, 99)),
    ]
    rate = r"\d+\.\d% of the matrix rate \(\S+ of \S+ TFLOP/s\)$"
    assert re.match(rf"Prefill: [\d,.]+ tok/s, {rate}", lines[8])
    shared = r"\d+% of what this memory can do \(\S+ of \S+ GB/s\)"
    assert re.match(rf"Decode: [\d,.]+ tok/s, {shared}, {rate}", lines[9])
    assert len(found["latencies"]) == 4
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert sorted(found["percentiles"], key=int) == ["10", "25", "50", "75", "90", "99"]
    assert found["decode_tokens_per_s"] > 0
    assert found["read_gb_s"] > found["decode_gb_s"] > 0
    assert found["matrix_tflops"] > found["prefill_tflops"] > 0
    assert json.loads(file.read_text()) == found


def test_quantised_weights_beside_the_int8_rate(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "1", "--input-len", "8", "--output-len", "3"]
    counts = ["--num-iters", "1", "--num-iters-warmup", "0"]
    lines, found = run(capsys, "latency", str(smollm2_path()), *sizes, *counts)
    rate = r"\d+\.\d% of the int8 rate \(\S+ of \S+ TOP/s\)$"
    assert re.search(rate, lines[8])
    assert re.search(rate, lines[9])
    assert found["matmul_dtype"] == "int8"
    # A core makes a few of the products that it can, but not none, and no more.
    assert found["matrix_tflops"] > found["decode_tflops"] > 0


def test_throughput(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "20", "--output-len", "6", "--num-prompts", "5"]
    eager = ["--max-num-seqs", "2", "--enforce-eager"]
    lines, found = run(capsys, "throughput", model, *lengths, *eager)
    assert re.match(
        r"Throughput: \S+ requests/s, \S+ total tokens/s, \S+ output tokens/s", lines[0]
    )
    assert lines[1:3] == ["Total num prompt tokens:  100", "Total num output tokens:  30"]
    assert "of what this memory can do" in lines[3]
    assert re.search(r", \d+\.\d% of the matrix rate \(\S+ of \S+ TFLOP/s\)$", lines[3])
    assert found["matrix_tflops"] > found["tflops"] > 0
    assert found["num_requests"] == 5
    assert found["total_num_tokens"] == 130
    assert found["num_steps"] >= 3 * 6  # 5 answers of 6 tokens, 2 at a time
    assert found["requests_per_second"] == pytest.approx(5 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(30 / found["elapsed_time"])


def test_throughput_of_a_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": turns}]))
    data = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3"]
    _, found = run(capsys, "throughput", model, *data)
    assert found["total_num_tokens"] == 3 * (1 + 8 + 6)  # BOS, and a token a byte


def test_what_does_not_fit_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", model, "--input-len", "100000"]) == 1
    assert "room for" in capsys.readouterr().err


def test_startup(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines, found = run(capsys, "startup", model, "--num-iters", "1")
    names = ["interpreter", "import", "open", "plan", "runtime import", "tokenizer", "weights"]
    names += ["engine", "first token"]
    assert list(found["phases"]) == names
    assert all(seconds >= 0 for seconds in found["phases"].values())
    assert found["total"] == pytest.approx(sum(found["phases"].values()))
    for name in [*names, "total"]:
        assert any(line.strip().startswith(name) for line in lines)


def test_startup_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", str(tmp_path / "nothing.gguf")]) == 1
    assert "nothing.gguf" in capsys.readouterr().err
