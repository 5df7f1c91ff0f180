"""The Triton prefill and store kernels in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle

from octavo.attention.backends.triton import TritonBackend, TritonCandidate
from octavo.kernels.kv_store.triton import store_kv
from octavo.kernels.paged_prefill.triton import PrefillTuning, paged_prefill

torch.set_num_threads(1)
SMALL = PrefillTuning(rows=32, tokens=16, num_warps=4, num_stages=2)


def assert_right(spec, seq_lens, query_lens, sinks=None, tuning=SMALL, tolerance=2e-6, padding=0):
    rows = make_rows(spec, seq_lens, query_lens)
    backend = TritonBackend(spec, 0)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(np.pad(rows.q, ((0, padding), (0, 0), (0, 0)))).to(pool[0].dtype)
    out = torch.full((len(q), spec.num_heads, spec.v_head_dim), torch.nan, dtype=q.dtype)
    _, lse = paged_prefill(
        spec,
        q,
        *pool,
        torch.from_numpy(rows.batch.block_table),
        torch.from_numpy(rows.batch.seq_lens),
        torch.from_numpy(rows.batch.query_start_loc),
        sinks=None if sinks is None else torch.from_numpy(sinks),
        out=out,
        tuning=tuning,
    )
    want, want_lse = oracle(spec, rows, sinks)
    count = len(rows.q)
    np.testing.assert_allclose(out[:count].double(), want, atol=tolerance)
    np.testing.assert_allclose(lse[:count].double(), want_lse, atol=max(5e-6, tolerance))
    assert out[count:].isnan().all()


def test_whole_prompts_chunks_and_single_tokens_in_one_batch():
    assert_right(make_spec("prefill", head_dim=16), [5, 100, 150, 50], [5, 1, 20, 50])


@pytest.mark.parametrize("group", [1, 3, 7, 24])
def test_group_sizes_are_packed_without_bleeding(group):
    spec = make_spec("prefill", num_heads=2 * group, num_kv_heads=2, head_dim=16)
    assert_right(spec, [20, 33], [20, 9])


@pytest.mark.parametrize(
    ("window", "tuning"),
    [(w, SMALL) for w in (1, 17, 4096)] + [(w, PrefillTuning(16, 32, 4, 2)) for w in (5, 64)],
)
def test_windows(window, tuning):
    """Keys that every query of the row has left behind are NaN and out of the table."""
    spec = make_spec("prefill", window=window, head_dim=16, num_heads=3, num_kv_heads=1)
    assert_right(spec, [5, 100, 130], [5, 50, 1], tuning=tuning)


def test_soft_cap_and_sinks():
    spec = make_spec("prefill", soft_cap=3.0, has_sinks=True)
    assert_right(spec, [60, 33], [60, 10], np.linspace(-1, 3, spec.num_heads, dtype=np.float32))


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "block_size"), [(80, 80, 1), (96, 64, 48), (192, 128, 544)]
)
def test_head_dims_and_block_sizes(head_dim, v_head_dim, block_size):
    spec = make_spec(
        "prefill",
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_size=block_size,
        num_heads=2,
        num_kv_heads=1,
    )
    assert_right(spec, [50], [30])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_precision(dtype, tolerance):
    spec = make_spec("prefill", dtype=dtype, kv_dtype=dtype)
    assert_right(spec, [40, 20], [40, 3], tolerance=tolerance)


def test_rows_without_queries_and_padding_tokens_are_left_alone():
    assert_right(make_spec("prefill"), [30, 17, 9], [30, 0, 2], padding=5)


def test_a_row_of_length_zero_gives_zeros():
    spec = make_spec("prefill")
    q = torch.randn(1, spec.num_heads, spec.head_dim)
    cache = torch.full((1, 16, spec.num_kv_heads, spec.head_dim), torch.nan)
    out, lse = paged_prefill(
        spec,
        q,
        cache,
        cache,
        torch.tensor([[-1]], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_store_writes_the_slots_and_nothing_else():
    k_cache, v_cache = torch.zeros(4, 3, 2, 5, dtype=torch.float16), torch.zeros(4, 3, 2, 7)
    k, v = torch.randn(4, 2, 5), torch.randn(4, 2, 7)
    slots = torch.tensor([11, 0, -1, 4], dtype=torch.int32)
    store_kv(k, v, k_cache, v_cache, slots)
    want_k, want_v = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    kept = slots >= 0
    want_k.flatten(0, 1)[slots[kept].long()] = k[kept].half()
    want_v.flatten(0, 1)[slots[kept].long()] = v[kept]
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)
