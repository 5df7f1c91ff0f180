"""Decode attention by blocks of one warp, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import Rows, fill_pool, make_rows, make_spec, num_blocks, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import AttentionSpec
from octavo.attention.backends.triton import TritonBackend, TritonCandidate
from octavo.kernels.split_attention import triton as split_attention
from octavo.kernels.split_attention import triton_warps
from octavo.kernels.split_attention.triton import make_scratch, split_decode
from octavo.kernels.split_attention.triton_warps import fits, warps_decode

torch.set_num_threads(1)
# The weights are rounded once before they meet V, and the answer once more.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}


def spec_for(**changes) -> AttentionSpec:
    dtype = changes.pop("dtype", "float16")
    small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    return make_spec(**{"dtype": dtype, "kv_dtype": dtype} | small | changes)


def rounded(spec: AttentionSpec, rows: Rows) -> Rows:
    def cast(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(getattr(torch, spec.dtype)).float().numpy()

    keys, values = ([cast(x) for x in part] for part in (rows.keys, rows.values))
    return replace(rows, q=cast(rows.q), keys=keys, values=values)


def decode(spec: AttentionSpec, rows: Rows, enough: int, sinks=None, garbage: int = -1):
    """Over a pool that is NaN wherever no key lies, with poisoned scratch and outputs, twice: what
    the first launch leaves in the scratch must not disturb the second."""
    pool = fill_pool(
        spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), TritonBackend(spec, 1), rows
    )
    scratch = make_scratch(spec, len(rows.keys), 1, enough)
    table = np.where(rows.batch.block_table < 0, garbage, rows.batch.block_table).astype(np.int32)
    q = torch.from_numpy(rows.q).to(getattr(torch, spec.dtype))
    answers = []
    for _ in range(2):
        for part in (scratch.out, scratch.m, scratch.l):
            part.fill_(torch.nan)
        out = torch.full((len(q), spec.num_heads, spec.v_head_dim), torch.nan, dtype=q.dtype)
        lse = torch.full((len(q), spec.num_heads), torch.nan)
        warps_decode(
            spec,
            q,
            *pool,
            torch.from_numpy(table),
            torch.from_numpy(rows.batch.seq_lens),
            None if sinks is None else torch.from_numpy(sinks),
            out,
            lse,
            scratch=scratch,
            enough=enough,
        )
        assert not scratch.counters.any()
        answers.append((out.double().numpy(), lse.double().numpy()))
    for first, second in zip(*answers, strict=True):
        np.testing.assert_array_equal(first, second)
    return answers[0]


def assert_right(spec: AttentionSpec, lens: list[int], enough: int, sinks=None, **how) -> None:
    assert fits(spec)
    rows = rounded(spec, make_rows(spec, lens))
    out, lse = decode(spec, rows, enough, sinks, **how)
    want, want_lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[spec.dtype])
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


@pytest.mark.parametrize("few_lines", [0, 1024])
@pytest.mark.parametrize("enough", [1, 3, 8, 40, 300])
def test_any_number_of_pieces_gives_the_dense_answer(enough, few_lines, monkeypatch):
    """With room for two tiles and for three."""
    monkeypatch.setattr(triton_warps, "FEW_LINES", few_lines)
    assert_right(spec_for(), [5, 400, 1, 63, 64, 65, 0, 130], enough)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims_and_dtypes(head_dim, dtype):
    spec = spec_for(dtype=dtype, head_dim=head_dim, num_heads=2, num_kv_heads=1)
    assert_right(spec, [100, 15, 16, 17, 33], 4)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_no_group_size_bleeds_into_another_kv_head(group):
    assert_right(spec_for(num_heads=2 * group), [300, 3], 7)


@pytest.mark.parametrize(("block_size", "length"), [(16, 170), (48, 230), (544, 600)])
def test_block_sizes_that_hold_whole_pages(block_size, length):
    assert_right(spec_for(block_size=block_size), [length, 13], 5)


@pytest.mark.parametrize("window", [1, 50, 200, 4096])
def test_a_window_reads_only_its_keys(window):
    """The keys that it left behind are NaN, and their blocks are no longer in the table."""
    assert_right(spec_for(window=window), [3, 450, 40], 5, garbage=2**30)


def test_soft_cap_and_sinks():
    """Sinks meet lines that one block finishes, lines that are merged, and an empty row."""
    spec = spec_for(soft_cap=5.0, has_sinks=True)
    sinks = np.linspace(-2, 6, spec.num_heads, dtype=np.float32)
    assert_right(spec, [500, 1, 33, 0], 6, sinks)


def test_an_empty_row_is_exactly_zero():
    out, lse = decode(spec_for(), make_rows(spec_for(), [0, 300, 0]), 5)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -np.inf).all()
    assert np.isfinite(out[1]).all()


@given(
    lens=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    enough=st.integers(1, 60),
    window=st.none() | st.integers(1, 300),
)
@settings(max_examples=15, deadline=None)
def test_random_batches(lens, enough, window):
    assert_right(spec_for(num_heads=1, num_kv_heads=1, window=window), lens, enough)


def test_a_full_batch_goes_this_way(monkeypatch):
    """And no other: by the number of lines, and only where nobody chose a tuning."""
    took = []
    monkeypatch.setattr(split_attention, "warps_decode", lambda *args, **how: took.append(how))
    monkeypatch.setattr(split_attention, "FULL_BATCH", 4)
    spec = spec_for()
    for changes, lens, taken in [
        ({}, [20, 30], 1),
        ({}, [20], 0),
        ({"dtype": "float32"}, [20, 30], 0),
        ({"split_mode": "off"}, [20, 30], 0),
        ({"head_dim": 80}, [20, 30], 0),
        ({"block_size": 8}, [20, 30], 0),
        ({"num_heads": 34}, [20, 30], 0),
    ]:
        took.clear()
        spec = spec_for(**changes)
        rows = make_rows(spec, lens)
        pool = fill_pool(
            spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), TritonBackend(spec, 1), rows
        )
        split_decode(
            spec,
            torch.from_numpy(rows.q).to(getattr(torch, spec.dtype)),
            *pool,
            torch.from_numpy(rows.batch.block_table),
            torch.from_numpy(rows.batch.seq_lens),
            num_slots=2,
            scratch=make_scratch(spec, len(lens), 30, 2),
        )
        assert len(took) == taken, changes
