"""Metrics: vLLM's names, what they count, and that nothing is counted twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.server import Server, serving, wait_for
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.metrics import _observe

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
    log = ("--enable-log-requests", "--enable-request-id-headers")
    splits = ("--split-kv", "fixed", "--split-kv-tokens", "16")
    with serving(book, *flags, *log, *splits) as server:
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


def test_the_clients_name_for_its_call(metered: Server, server: Server) -> None:
    name, body = "order-66/a", {"prompt": "a", "temperature": 0}
    for path, sent, status in (
        ("/v1/completions", body, 200),
        ("/v1/completions", body | {"stream": True}, 200),
        ("/v1/completions", {"prompt": 5}, 400),
        ("/nowhere", body, 404),
    ):
        reply = metered.call("POST", path, sent, headers={"X-Request-Id": name})
        assert (reply.status, reply.headers["x-request-id"]) == (status, name)
    wait_for(lambda: metered.log.count(f"({name}) came") == 2)
    assert f"/v1/completions ({name}) refused with 400" in metered.log
    made = [metered.call("GET", "/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for unfit in ("", "two words", "x" * 129, "\xe9"):  # as if there were none
        reply = metered.call("GET", "/health", headers={"X-Request-Id": unfit})
        assert len(reply.headers["x-request-id"]) == len(made[0])
    quiet = server.call("POST", "/v1/completions", body, headers={"X-Request-Id": name})
    assert "x-request-id" not in {header.lower() for header in quiet.headers}


@pytest.mark.parametrize("value", [0.0, 0.0005, 0.0123, 7.5, 1e9])
def test_many_observations_at_once(value: float) -> None:
    def said(observe: Callable[[Histogram], None]) -> list[tuple[str, float]]:
        histogram = Histogram("x", "", buckets=(0.0005, 0.01, 7.5), registry=None)
        observe(histogram)
        [family] = histogram.collect()
        samples = [sample for sample in family.samples if sample.name != "x_created"]
        return [(str(sample.labels), sample.value) for sample in samples]

    def one_by_one(histogram: Histogram) -> None:
        for _ in range(4):
            histogram.observe(value)

    assert said(lambda histogram: _observe(histogram, value, 4)) == said(one_by_one)


def test_splits_per_sequence(metered: Server) -> None:
    def told() -> dict[tuple[str, str | None], float]:
        text = metered.call("GET", "/metrics").body.decode()
        families = text_string_to_metric_families(text)
        [family] = [one for one in families if one.name == "octavo:attention_num_splits"]
        return {
            (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
            for sample in family.samples
        }

    before = told()
    for length in (10, 40):
        body = {"prompt": [5] * length, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        metered.post("/v1/completions", body)
    new = {name: value - before[name] for name, value in told().items()}
    # The first token comes of the prefill; each further one is a decode row of this length.
    lengths = [length + made for length in (10, 40) for made in range(1, 30)]
    splits = [-(-length // 16) for length in lengths]
    assert new["count", None] == len(splits)
    assert new["sum", None] == sum(splits)
    for edge in (1, 2, 4, 8, 256):
        assert new["bucket", f"{edge}.0"] == len([one for one in splits if one <= edge])


def test_the_dashboard_asks_for_what_there_is(metered: Server) -> None:
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"octavo:\w+", dashboard))
    assert len(asked) > 15
    there = metered.call("GET", "/metrics").body.decode()
    assert {name for name in asked if not re.search(rf"^{name}\b", there, re.MULTILINE)} == set()
