"""``octavo run`` over a scripted model."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from helpers.fake_llm import FakeLLM

from octavo.cli import main
from octavo.config import EngineConfig


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr("octavo.cli.run.load", lambda model, engine: fake)
    return fake


def test_text_on_stdout_and_one_line_of_figures_on_stderr(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.report = SimpleNamespace(**vars(llm.report) | {"precision": "activations in 8 bits"})
    assert main(["run", "--prompt", "Say hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\n"
    assert captured.err == (
        "2 prompt tokens · 3 generated · TTFT 0.250 s · 2.0 tok/s · fake-1b · attention reference"
        " · runtime eager · activations in 8 bits\n"
    )


def test_run_is_greedy_and_to_the_end_unless_told_otherwise(llm: FakeLLM) -> None:
    main(["run", "-p", "x"])
    said = (
        "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 4 --max-tokens 5 "
        "--stop a --stop -b --stop=-- --ignore-eos"
    )
    main(["run", "-p", "x", *said.split()])
    greedy, told = llm.params
    assert (greedy.temperature, greedy.max_tokens) == (0.0, None)
    assert (told.temperature, told.top_k, told.top_p, told.min_p) == (0.5, 3, 0.9, 0.1)
    assert (told.seed, told.max_tokens) == (4, 5)
    assert told.stop_strings == ("a", "-b", "--")
    assert told.ignore_eos


def test_json_is_the_last_line_and_the_only_one(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.pieces = ("zwölf ", "Köche")
    assert main(["run", "--json", "--prompt", "x"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "model": "fake-1b",
        "attention_backend": "reference",
        "runtime": "eager",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8],
        "text": "zwölf Köche",
        "finish_reason": "stop",
        "ttft_s": 0.25,
        "tpot_s": 0.5,
        "tokens_per_s": 2.0,
    }


def test_one_token_has_no_time_per_output_token(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.pieces = ("x",)
    main(["run", "--json", "--prompt", "x"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tpot_s"] is None
    assert "tok/s" not in captured.err


def test_prompt_may_come_from_stdin_and_may_start_with_a_hyphen(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\nstdin\n"))
    main(["run", "--prompt", "-"])
    main(["run", "--prompt", "-5 is"])
    assert llm.asked == ["from\nstdin\n", "-5 is"]


def test_chat_puts_the_prompt_into_the_template(llm: FakeLLM) -> None:
    main(["run", "--chat", "--prompt", "hi"])
    assert llm.asked == [[{"role": "user", "content": "hi"}]]


def test_engine_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str | None, EngineConfig]] = []

    def load(model: str | None, engine: EngineConfig) -> FakeLLM:
        given.append((model, engine))
        return FakeLLM()

    monkeypatch.setattr("octavo.cli.run.load", load)
    flags = (
        "--no-enable-prefix-caching --no-async-scheduling --disable-attention-backend cpu "
        "--disable-attention-backend triton --split-kv fixed --max-num-seqs 3 --exact"
    )
    main(["run", "folder", "--prompt", "x", *flags.split()])
    assert given == [
        (
            "folder",
            EngineConfig(
                enable_prefix_caching=False,
                async_scheduling=False,
                disable_attention_backend=("cpu", "triton"),
                split_kv="fixed",
                max_num_seqs=3,
                exact=True,
            ),
        )
    ]
