"""The ``triton`` candidate: what it refuses and why, and its plan, on CPU in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle, run

from octavo.attention import AttentionSpec
from octavo.attention.backends.triton import TritonBackend, TritonCandidate

torch.set_num_threads(1)


class Interpreted(TritonCandidate):
    """On a CPU there is no kernel to count the resident blocks of."""

    def open(self, spec: AttentionSpec) -> TritonBackend:
        return TritonBackend(spec, num_slots=7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on CUDA GPUs, not on cpu"),
        ({"device": "npu:0"}, "runs on CUDA GPUs, not on npu:0"),
        ({"dtype": "float64"}, "float64 isn't one of bfloat16, float16, float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "stores keys and values as the queries' float32"),
        ({"num_heads": 7}, "7 query heads aren't a multiple of 2"),
        ({"num_heads": 256}, "128 query heads a KV head are more than 64"),
        ({"head_dim": 576, "v_head_dim": 512}, "head_dim 576 is more than 256"),
        (
            {"split_mode": "fixed", "split_tokens": 100},
            "fixed splits of 100 tokens aren't multiples of 16",
        ),
    ],
)
def test_a_refusal_says_why(changes, reason):
    support = TritonCandidate().supports(make_spec(**{"device": "cuda"} | changes))
    assert not support.ok
    assert support.reason == reason


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_the_house_needs_is_supported(phase):
    for heads, head_dim, block_size, window in [(24, 64, 1, None), (14, 192, 544, 512)]:
        spec = make_spec(
            phase,
            device="cuda:1",
            num_heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            soft_cap=30.0,
            has_sinks=True,
        )
        assert TritonCandidate().supports(spec).ok


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_plan_and_run(phase):
    spec = make_spec(phase, window=50, head_dim=32)
    query_lens = [3, 60, 1] if phase == "prefill" else None
    rows = make_rows(spec, [3, 130, 20], query_lens)
    out, lse = run(Interpreted(), spec, rows)
    want, want_lse = oracle(spec, rows)
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_under_graphs_equal_shapes_keep_their_buffers(mode):
    """What was captured reads the rows that were planned last."""
    spec = make_spec(split_mode=mode, split_tokens=32, head_dim=16, graph=True)
    rows = make_rows(spec, [90, 90])
    backend = TritonBackend(spec, num_slots=7)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    first = backend.plan(replace(rows.batch, seq_lens=np.array([1, 0], np.int32)))
    assert backend.plan(rows.batch) is first
    out, _ = backend.run(torch.from_numpy(rows.q), *pool, first)
    np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=3e-6)


def test_gather_follows_the_block_table():
    spec = make_spec(block_size=4)
    rows = make_rows(spec, [10, 7])
    backend = TritonBackend(spec, num_slots=1)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    for row, length in enumerate([10, 7]):
        k, v = backend.gather(*pool, torch.from_numpy(rows.batch.block_table[row]), length)
        assert torch.equal(k, torch.from_numpy(rows.keys[row]))
        assert torch.equal(v, torch.from_numpy(rows.values[row]))
