"""What a decode step must read."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.checkpoints import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.latency import Latencies, decode_gb_s, decode_tflops, prefill_tflops
from octavo.bench.roof import _sum_of_windows, read_cost, row_flops
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.models.weights import num_parameters


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
@settings(deadline=None)
def test_windows(first: int, last: int, window: int | None) -> None:
    limit = 10**9 if window is None else window
    assert _sum_of_windows(first, last, window) == sum(
        min(n, limit) for n in range(first, last + 1)
    )


def test_cost_of_a_step(tmp_path: Path) -> None:
    model = str(tiny(tmp_path))
    cost = read_cost(EngineConfig(model=model, device="cpu", exact=True))
    spec = cost.spec
    untied = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    assert cost.weight_bytes == 4 * (num_parameters(spec) - untied)
    history = cost.of_history(5, 6)
    assert history == spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4 * (5 + 6)
    # Rows of 4 prompt tokens see 5 and 6 keys in the two steps after the first token.
    found = Latencies([1.0, 9.0, 2.0], [0.2, 0.3, 0.1], [0.1, 9.0, 0.5])
    gb_s = decode_gb_s(cost, found, input_len=4, output_len=3, batch_size=10)
    assert gb_s == pytest.approx((cost.weight_bytes + 10 * history / 2) / 0.5 / 1e9)
    half = read_cost(EngineConfig(model=model, device="cpu", kv_cache_dtype="bfloat16"))
    assert half.of_history(5, 6) == history / 2


def test_operations_of_a_row(tmp_path: Path) -> None:
    cost = read_cost(EngineConfig(model=str(tiny(tmp_path)), device="cpu", enforce_eager=True))
    assert cost.matmul_dtype == "float32"
    spec = cost.spec
    table = spec.vocab_size * spec.hidden_size
    norms = spec.hidden_size * (2 * spec.num_layers + 1)
    untied = 0 if spec.tied_embeddings else table
    matrices = num_parameters(spec) - untied - table - norms  # but for the head
    pair = 4 * spec.num_heads * spec.head_dim * spec.num_layers
    assert row_flops(spec, 5, 6, 1) == 2 * 2 * matrices + (5 + 6) * pair + 2 * table
    assert row_flops(spec, 7, 6, 0) == 0
    found = Latencies([1.0], [0.25], [0.5])
    sizes = {"input_len": 4, "batch_size": 10}
    decode = 10 * row_flops(spec, 5, 6, 2) / 2 / 0.5 / 1e12
    assert decode_tflops(spec, found, output_len=3, **sizes) == pytest.approx(decode)
    prefill = 10 * row_flops(spec, 1, 4, 1) / 0.25 / 1e12
    assert prefill_tflops(spec, found, **sizes) == pytest.approx(prefill)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["latency", "--batch-size", "0"], "batch_size is 0"),
        (["latency", "--batch-size", "65"], "raise max_num_seqs"),
        (["latency", "--num-iters", "0"], "num_iters is 0"),
        (["latency", "--num-iters-warmup", "-1"], "num_iters_warmup"),
        (["startup", "--num-iters", "0"], "num_iters is 0"),
        (["throughput", "--num-prompts", "0"], "num_prompts is 0"),
        (["throughput", "nowhere"], "nowhere"),
    ],
)
def test_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert named in capsys.readouterr().err
