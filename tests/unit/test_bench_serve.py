"""``octavo bench serve``: arrivals, figures, vLLM's labels, and what is refused."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

import pytest
from helpers.stub_openai import case_39
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.client import Answer, AnswerReader, Piece, Usage
from octavo.bench.config import DatasetConfig, LoadConfig
from octavo.bench.dataset import Sample
from octavo.bench.serve import Result, arrival_times, request_body
from octavo.bench.serve_figures import count_tokens, figures, result_block, token_gaps
from octavo.cli import main
from octavo.errors import ConfigError

SAMPLE = Sample("hello", None, 128)


def answer(
    sent: float, times: list[float], tokens: int, prompt: int = 10, error: str | None = None
) -> Answer:
    pieces = [Piece(time, None) for time in times]
    return Answer(sent, 200, pieces, "text", Usage(prompt, tokens), error)


def measure(answers: list[Answer], duration: float, **flags: Any) -> dict[str, Any]:
    load = LoadConfig(**flags)
    result = Result("m", 100.0, duration, answers, [0.0] * len(answers))
    return figures(load, [SAMPLE] * len(answers), result, count_tokens(answers, None))


def test_o39() -> None:
    reader = AnswerReader(sent=100.0)
    for ms, data in case_39():
        reader.feed(data, 100.0 + ms / 1000)
    failed = answer(100.0, [0.001, 0.002], 2, error="cut off")
    found = measure([reader.end(), failed], 0.4)
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["total_output_tokens"] == 32
    assert found["total_input_tokens"] == 10
    assert found["mean_ttft_ms"] == found["p99_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx((380 - 100) / 31)
    assert found["mean_e2el_ms"] == pytest.approx(380)
    assert found["itls"] == [pytest.approx([0.01] * 28), []]  # 4 tokens in 40 ms; no TTFT
    assert found["output_throughput"] == pytest.approx(80)
    assert found["max_output_tokens_per_s"] >= found["output_throughput"]
    assert found["output_lens"] == [32, 0]
    assert found["errors"] == ["", "cut off"]


def test_time_between_tokens_as_the_server_counts_them() -> None:
    pieces = [Piece(0.1, 1), Piece(0.2, 2), Piece(0.3, 2), Piece(0.5, 5)]
    one = Answer(0.0, 200, pieces, "abcd", Usage(1, 5))
    assert token_gaps(one, 5) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    # An end without text came with the last piece.
    assert token_gaps(one, 6) == pytest.approx([0.1] + [0.3 / 4] * 4)


def test_an_answer_that_nobody_can_count_fails() -> None:
    uncounted = [Answer(0.0, 200, [Piece(0.1, None)], "one two", None) for _ in range(2)]
    assert count_tokens(uncounted[:1], lambda text: len(text.split())) == [2]
    assert count_tokens(uncounted[1:], None) == [0]
    assert "--tokenizer" in (uncounted[1].error or "")


def test_one_token_has_no_time_per_token_and_meets_any_limit_on_it() -> None:
    answers = [answer(100.0, [0.2], 1), answer(100.0, [0.2, 0.8], 4)]
    found = measure(answers, 2.0, goodput=("tpot:100",))
    assert found["mean_tpot_ms"] == pytest.approx(200)
    assert found["request_goodput"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (["ttft:200"], 2),
        (["ttft:199"], 1),
        (["e2el:500"], 1),
        (["ttft:200", "e2el:900", "tpot:1000"], 2),
        (["ttft:50", "e2el:500"], 0),
    ],
)
def test_goodput(limits: list[str], good: int) -> None:
    answers = [answer(100.0, [0.1, 0.7], 2), answer(100.0, [0.2, 0.5], 2)]
    answers.append(answer(100.0, [0.01, 0.02], 2, error="failed"))
    assert measure(answers, 4.0, goodput=tuple(limits))["request_goodput"] == good / 4


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.lists(st.floats(0.001, 3), min_size=1, max_size=6)),
        min_size=1,
        max_size=6,
    ),
    st.integers(6, 40),
)
@settings(deadline=None)
def test_peaks(requests: list[tuple[float, list[float]]], tokens: int) -> None:
    answers = [answer(100.0 + at, sorted(times), tokens) for at, times in requests]
    duration = max(one.sent + one.latency for one in answers) - 100.0
    found = measure(answers, duration)
    assert found["max_output_tokens_per_s"] >= found["output_throughput"] * (1 - 1e-9)
    assert 1 <= found["max_concurrent_requests"] <= len(answers)


def test_one_after_another_is_not_at_once() -> None:
    answers = [answer(100.0, [0.5], 1), answer(100.5, [0.5], 1), answer(100.75, [0.5], 1)]
    assert measure(answers, 2.0)["max_concurrent_requests"] == 2


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         1         
Maximum request concurrency:             2         
Request rate configured (RPS):           4.00      
Benchmark duration (s):                  2.00      
Total input tokens:                      20        
Total generated tokens:                  14        
Request throughput (req/s):              1.00      
Request goodput (req/s):                 0.50      
Output token throughput (tok/s):         7.00      
Peak output token throughput (tok/s):    14.00     
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          17.00     
---------------Time to First Token----------------
Mean TTFT (ms):                          150.00    
Median TTFT (ms):                        150.00    
P50 TTFT (ms):                           150.00    
P99.9 TTFT (ms):                         199.90    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          87.50     
Median TPOT (ms):                        87.50     
P50 TPOT (ms):                           87.50     
P99.9 TPOT (ms):                         124.92    
---------------Inter-token Latency----------------
Mean ITL (ms):                           90.00     
Median ITL (ms):                         66.67     
P50 ITL (ms):                            66.67     
P99.9 ITL (ms):                          199.10    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          600.00    
Median E2EL (ms):                        600.00    
P50 E2EL (ms):                           600.00    
P99.9 E2EL (ms):                         699.80    
---------------Client-side Queueing---------------
Mean Client Queue Time (ms):             0.00      
Median Client Queue Time (ms):           0.00      
P50 Client Queue Time (ms):              0.00      
P99.9 Client Queue Time (ms):            0.00      
==================================================
"""  # noqa: W291 - values are padded to 10


def test_the_block_is_vllms_to_the_byte() -> None:
    flags: dict[str, Any] = {
        "max_concurrency": 2,
        "request_rate": 4.0,
        "goodput": ("ttft:100",),
        "metric_percentiles": "50, 99.9",
        "percentile_metrics": "ttft,tpot,itl,e2el,client_queue_time",
    }
    answers = [
        answer(100.0, [0.1, 0.3, 0.5], 9),
        answer(100.0, [0.2, 0.3, 0.4, 0.5, 0.7], 5),
        answer(100.0, [], 0, error="no"),
    ]
    found = measure(answers, 2.0, **flags)
    assert result_block(LoadConfig(**flags), found) + "\n" == BLOCK


KEYS = """
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times
queue_times generated_texts errors max_output_tokens_per_s max_concurrent_requests
"""


def test_json_keys() -> None:
    found = measure([answer(100.0, [0.1, 0.2], 2)], 1.0, metric_percentiles="90,99.9")
    statistics = [
        f"{kind}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "std", "p90", "p99.9")
    ]
    assert list(found) == KEYS.split() + statistics
    assert found["request_goodput"] is None


def test_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0] * 3


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_times_between_requests(burstiness: float, variation: float) -> None:
    times = arrival_times(20_000, 50.0, burstiness, random.Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400.0)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    # A gamma distribution's deviation is its mean over the root of its shape.
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.05)


def test_a_clock() -> None:
    times = arrival_times(4, 2.0, math.inf, random.Random(0))
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_requests() -> None:
    chat = LoadConfig(
        backend="openai-chat", temperature=0.0, extra_body='{"top_k": 5, "user": "b"}'
    )
    body = request_body(chat, "m", SAMPLE, ignore_eos=True)
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 128,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_k": 5,
        "user": "b",
    }
    body = request_body(LoadConfig(), "m", SAMPLE, ignore_eos=False)
    assert (body["prompt"], body["max_tokens"]) == ("hello", 128)
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--request-rate", "0"], "request_rate is 0"),
        (["--request-rate", "nan"], "request_rate is nan"),
        (["--burstiness", "2"], "burstiness needs a request_rate"),
        (["--max-concurrency", "0"], "max_concurrency is 0"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--percentile-metrics", "ttft,speed"], "'speed'"),
        (["--percentile-metrics", "client_queue_time"], "needs max_concurrency"),
        (["--metric-percentiles", "99,101"], "'99,101'"),
        (["--metric-percentiles", "p99"], "'p99'"),
        (["--goodput", "itl:5"], "'itl:5'"),
        (["--goodput", "ttft"], "'ttft'"),
        (["--goodput", "ttft:nan"], "'ttft:nan'"),
        (["--metadata", "x=1"], "give save_result"),
        (["--save-result", "--metadata", "x"], "KEY=VALUE"),
        (["--result-dir", "x"], "give save_result"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--base-url", "http://x", "--port", "1"], "leave out --host and --port"),
        (["--base-url", "x:1", "--model", "m"], "base_url is 'x:1'"),
        (["--endpoint", "v1/completions"], "must begin with /"),
        (["--dataset-path", "x"], "random prompts come from no file"),
        (["--dataset-name", "custom"], "give dataset_path"),
        (["--dataset-name", "custom", "--dataset-path", "x", "--input-len", "5"], "input_len is"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "/nowhere can't be read"),
        (["--input-len", "5", "--random-input-len", "5"], "say the same"),
        (["--random-range-ratio", "1"], "random_range_ratio is 1"),
    ],
)
def test_refused_before_anything_is_sent(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 1
    assert named in capsys.readouterr().err


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--plot-timeline"]) == 2
    assert "--plot-timeline" in capsys.readouterr().err


def test_addresses() -> None:
    assert LoadConfig().url == "http://127.0.0.1:8000"
    assert LoadConfig(host="::1", port=80).url == "http://[::1]:80"
    assert LoadConfig(base_url="https://h/prefix/").url == "https://h/prefix"
    assert LoadConfig(backend="openai-chat").path == "/v1/chat/completions"
    with pytest.raises(ConfigError, match="num_warmups is -1"):
        LoadConfig(num_warmups=-1)
    assert DatasetConfig().random_lens == (1024, 128)
