"""Metrics: vLLM's names, what they count, and that nothing is counted twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.server import Server, serving, wait_for
from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_prompt_tokens"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_params_n"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_generation_tokens", "iteration_tokens_total"),
    *("request_max_num_generation_tokens", "request_params_max_tokens"),
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def metered(book: Path) -> Iterator[Server]:
    flags = ("--metrics-alias-vllm", "--goodput", "ttft:60000", "e2el:60000")
    with serving(book, *flags, "--enable-log-requests") as server:
        yield server


def test_names_and_counts(metered: Server) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 100}
    for stream in (False, True):
        metered.call("POST", "/v1/completions", body | {"stream": stream})
    metered.call("POST", "/v1/completions", body | {"n": 2, "max_tokens": 2})
    metered.call("POST", "/v1/completions", {"prompt": 5})
    metered.call("POST", "/v1/completions", body | {"model": "none"})
    for prefix in ("octavo:", "vllm:"):
        for name in HISTOGRAMS:
            count = metered.metric(f"{prefix}{name}_count")
            assert count > 0, name
            if "step" not in name and not name.startswith(("iteration", "inter", "request_m")):
                assert count == (3 if "params" in name else 4), name
        for name in GAUGES:
            assert metered.metric(prefix + name) == 0
        assert metered.metric(f"{prefix}generation_tokens_total") == 8 + 8 + 2 * 2
        assert metered.metric(f"{prefix}prompt_tokens_total") == 4 * 2
        assert metered.metric(f"{prefix}request_success_total", finished_reason="stop") == 2
        assert metered.metric(f"{prefix}request_success_total", finished_reason="length") == 2
        assert metered.metric(f"{prefix}inter_token_latency_seconds_count") == 7 + 7 + 2
    assert metered.metric("octavo:request_goodput_total") == 4
    assert metered.metric("octavo:request_errors_total", kind="InvalidRequestError") == 1
    assert metered.metric("octavo:request_errors_total", kind="model_not_found") == 1
    assert (
        metered.metric("octavo:http_requests_total", status="200", handler="/v1/completions") == 3
    )
    assert metered.metric("octavo:cache_config_info", block_size="16") == 1


def test_the_text_is_prometheus_format(metered: Server) -> None:
    reply = metered.call("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.body.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        for sample in family.samples:
            assert {"model_name", "engine"} <= sample.labels.keys()


def test_the_log_of_requests(metered: Server) -> None:
    answer = metered.post("/v1/completions", {"prompt": "a", "temperature": 0, "seed": 12})

    def lines() -> list[str]:
        return [line for line in metered.log.splitlines() if answer["id"] in line]

    wait_for(lambda: len(lines()) == 2)  # the second is written when the answer has left
    came, went = lines()
    assert "2 prompt tokens" in came
    assert "seed=12" in came
    assert "stop, 8 tokens" in went
    metered.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1000})
    wait_for(lambda: "refused" in metered.log.splitlines()[-1])


def test_the_dashboard_asks_for_what_there_is(metered: Server) -> None:
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"octavo:\w+", dashboard))
    assert len(asked) > 15
    there = metered.call("GET", "/metrics").body.decode()
    assert {name for name in asked if not re.search(rf"^{name}\b", there, re.MULTILINE)} == set()
