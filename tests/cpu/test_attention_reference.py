"""The reference backend against attention in float64, in both phases and over foreign layouts."""

import numpy as np
import pytest
import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle, run

from octavo.attention import merge_partials, plan_splits
from octavo.attention.backends.cpu import CpuCandidate
from octavo.attention.backends.reference import ReferenceCandidate
from octavo.kernels.split_attention import reference

LENGTHS = [1, 15, 16, 17, 0, 300, 1100]
SINKS = np.linspace(-1, 3, 6).astype(np.float32)


def check(spec, rows, got, sinks=None, atol=1e-5):
    out, lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(got[0], out, atol=atol)
    np.testing.assert_allclose(got[1], lse, atol=atol)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 2000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_decode(window, soft_cap, sinks):
    spec = make_spec(window=window, soft_cap=soft_cap, v_head_dim=32)
    rows = make_rows(spec, LENGTHS)
    check(spec, rows, run(ReferenceCandidate(), spec, rows, sinks=sinks), sinks)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 200])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_prefill_with_cached_prefixes(window, soft_cap, sinks):
    spec = make_spec("prefill", window=window, soft_cap=soft_cap, v_head_dim=32)
    rows = make_rows(spec, [1, 15, 16, 17, 0, 300, 260], [1, 5, 16, 7, 0, 100, 260])
    check(spec, rows, run(ReferenceCandidate(), spec, rows, sinks=sinks), sinks)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 12, 24])
def test_groups(group):
    for phase, news in (("decode", [1, 1]), ("prefill", [33, 5])):
        spec = make_spec(phase, num_heads=2 * group, num_kv_heads=2, head_dim=24)
        rows = make_rows(spec, [33, 70], news)
        check(spec, rows, run(ReferenceCandidate(), spec, rows))


def test_prefill_tiles_are_merged(monkeypatch):
    """Tiles far smaller than the prompt, so that rows meet full, partial and skipped tiles."""
    monkeypatch.setattr(reference, "QUERY_TILE", 8)
    monkeypatch.setattr(reference, "KEY_TILE", 12)
    for window in (None, 7, 30):
        spec = make_spec("prefill", window=window)
        rows = make_rows(spec, [100, 61], [100, 20])
        check(spec, rows, run(ReferenceCandidate(), spec, rows))


def test_a_long_prompt_never_has_all_its_scores(monkeypatch):
    """4,096 queries: whole, the scores of 2 heads would be 134 MB; a tile's are 1 MB."""
    largest = 0
    partial_attention = reference.partial_attention

    def watched(q, k, v, **options):
        nonlocal largest
        largest = max(largest, q.shape[0] * q.shape[1] * k.shape[0] * 4)
        return partial_attention(q, k, v, **options)

    monkeypatch.setattr(reference, "partial_attention", watched)
    q, k, v = torch.randn(4096, 2, 8), torch.randn(4096, 1, 8), torch.randn(4096, 1, 8)
    out, _, _ = reference.causal_prefill(q, k, v, scale=0.3)
    assert 0 < largest <= 2**20
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_kv_is_computed_in_float32(dtype):
    """Out is the exact answer for the rounded inputs, rounded once."""
    spec = make_spec(dtype=dtype, kv_dtype=dtype)
    rows = make_rows(spec, [300])
    half = getattr(torch, dtype)
    rows.q = torch.from_numpy(rows.q).to(half).float().numpy()
    for side in (rows.keys, rows.values):
        side[0] = torch.from_numpy(side[0]).to(half).float().numpy()
    out, lse = oracle(spec, rows)
    got = run(ReferenceCandidate(), spec, rows)
    np.testing.assert_allclose(got[0], out, rtol=torch.finfo(half).eps, atol=1e-6)
    np.testing.assert_allclose(got[1], lse, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_prefill_over_the_cpu_candidates_pool(kv_dtype):
    """Written and gathered by the owner: the reference never knows the layout."""
    spec = make_spec("prefill", kv_dtype=kv_dtype, dtype=kv_dtype, window=40, v_head_dim=32)
    owner_spec = make_spec(kv_dtype=kv_dtype, window=40, v_head_dim=32)
    owner = CpuCandidate().open(owner_spec)
    rows = make_rows(spec, [100, 17, 300], [100, 3, 20])
    backend = ReferenceCandidate().open(spec, owner)
    layout = CpuCandidate().kv_layout(owner_spec, num_blocks(rows))
    pool = fill_pool(spec, layout, backend, rows)
    q = torch.from_numpy(rows.q).to(getattr(torch, kv_dtype))
    out, lse = backend.run(q, *pool, backend.plan(rows.batch))
    wanted = run(ReferenceCandidate(), spec, rows)
    np.testing.assert_array_equal(out.float().numpy(), wanted[0])
    np.testing.assert_array_equal(lse.numpy(), wanted[1])


def test_merge_of_torch_partials_stays_torch():
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((3, 4, 8)), rng.standard_normal((3, 4)), rng.random((3, 4))
    parts[0][0, 0], parts[1][0, 0], parts[2][0, 0] = 0, -np.inf, 0
    got = merge_partials(*(torch.from_numpy(x) for x in parts))
    for x, y in zip(got, merge_partials(*parts), strict=True):
        assert isinstance(x, torch.Tensor)
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-14)


def test_decode_follows_the_plan_it_is_given():
    spec = make_spec()
    rows = make_rows(spec, [1000, 64])
    splits = plan_splits(
        [1000, 64], num_kv_heads=2, block_size=16, num_cores=1, mode="fixed", split_tokens=33
    )
    check(spec, rows, run(ReferenceCandidate(), spec, rows, splits=splits))
