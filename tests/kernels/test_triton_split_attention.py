"""The Triton decode kernel in Triton's interpreter, against float64 and the torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from helpers.attention import Rows, fill_pool, make_rows, make_spec, num_blocks, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import AttentionSpec, merge_partials, plan_splits
from octavo.attention.backends.triton import TritonBackend, TritonCandidate
from octavo.kernels.split_attention.triton import (
    Tuning,
    default_tuning,
    make_scratch,
    num_shares,
    split_decode,
)
from octavo.kernels.split_attention.triton_lines import is_cut, nearest_leaf, share_of

torch.set_num_threads(1)
TUNING = Tuning(tokens=32, num_warps=4, num_stages=3)
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def decode(
    spec: AttentionSpec,
    rows: Rows,
    *,
    slots: int = 7,
    sinks: np.ndarray | None = None,
    tuning: Tuning = TUNING,
    garbage: int = -1,
) -> tuple[np.ndarray, np.ndarray]:
    """Run over a pool that is NaN wherever no key lies, with poisoned scratch and outputs."""
    backend = TritonBackend(spec, slots)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    longest = int(max(rows.batch.seq_lens))
    scratch = poisoned(make_scratch(spec, len(rows.keys), longest, slots, tuning))
    table = np.where(rows.batch.block_table < 0, garbage, rows.batch.block_table)
    q = torch.from_numpy(rows.q).to(getattr(torch, spec.dtype))
    out = torch.full((len(q), spec.num_heads, spec.v_head_dim), torch.nan, dtype=q.dtype)
    lse = torch.full((len(q), spec.num_heads), torch.nan)
    split_decode(
        spec,
        q,
        *pool,
        torch.from_numpy(table.astype(np.int32)),
        torch.from_numpy(rows.batch.seq_lens),
        num_slots=slots,
        scratch=scratch,
        sinks=None if sinks is None else torch.from_numpy(sinks),
        out=out,
        lse=lse,
        tuning=tuning,
    )
    return out.double().numpy(), lse.double().numpy()


def poisoned(scratch):
    for part in (scratch.out, scratch.m, scratch.l):
        part.fill_(torch.nan)
    return scratch


def rounded(spec: AttentionSpec, rows: Rows) -> Rows:
    """The rows as the pool's dtype holds them, so that only the kernel's own error is left."""

    def cast(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(getattr(torch, spec.dtype)).float().numpy()

    keys, values = ([cast(x) for x in part] for part in (rows.keys, rows.values))
    return replace(rows, q=cast(rows.q), keys=keys, values=values)


def assert_right(spec: AttentionSpec, rows: Rows, sinks: np.ndarray | None = None, **how) -> None:
    rows = rounded(spec, rows)
    out, lse = decode(spec, rows, sinks=sinks, **how)
    want, want_lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[spec.dtype])
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


def spec_for(**changes) -> AttentionSpec:
    dtype = changes.pop("dtype", "float32")
    small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return make_spec(**{"dtype": dtype, "kv_dtype": dtype} | small | changes)


@pytest.mark.parametrize(
    ("mode", "slots"), [("off", 9), ("auto", 1), ("auto", 7), ("auto", 40), ("fixed", 7)]
)
def test_every_mode_and_number_of_slots_gives_the_dense_answer(mode, slots):
    spec = spec_for(split_mode=mode, split_tokens=32)
    assert_right(spec, make_rows(spec, [5, 200, 1, 70]), slots=slots)


@pytest.mark.parametrize("group", [1, 3, 7, 24])
def test_no_group_size_bleeds_into_another_kv_head(group):
    spec = spec_for(num_heads=2 * group, num_kv_heads=2)
    assert_right(spec, make_rows(spec, [70, 3]), slots=5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_half_precision(mode, dtype):
    spec = spec_for(head_dim=64, dtype=dtype, split_mode=mode, split_tokens=32)
    assert_right(spec, make_rows(spec, [100, 3]), slots=5)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(80, 80), (96, 96), (192, 128), (256, 256)])
def test_head_dims_that_are_no_powers_of_two_are_padded(head_dim, v_head_dim):
    spec = spec_for(head_dim=head_dim, v_head_dim=v_head_dim, num_heads=2, num_kv_heads=1)
    assert_right(spec, make_rows(spec, [50]), slots=3, tuning=default_tuning(spec))


@pytest.mark.parametrize(("block_size", "length"), [(1, 70), (7, 100), (48, 130), (544, 600)])
def test_any_block_size(block_size, length):
    spec = spec_for(block_size=block_size, num_heads=2, num_kv_heads=1)
    assert_right(spec, make_rows(spec, [length, 13]), slots=3)


@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
@pytest.mark.parametrize("window", [1, 200, 4096])
def test_a_window_reads_only_its_keys(window, mode):
    """The keys that it left behind are NaN, and their blocks are no longer in the table."""
    spec = spec_for(window=window, split_mode=mode, split_tokens=32, num_heads=2)
    assert_right(spec, make_rows(spec, [3, 250, 40]), slots=7, garbage=2**30)


@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_soft_cap_and_sinks(mode):
    spec = spec_for(soft_cap=5.0, has_sinks=True, split_mode=mode, split_tokens=32)
    sinks = np.linspace(-2, 6, spec.num_heads, dtype=np.float32)
    assert_right(spec, make_rows(spec, [200, 1, 33], spread=4), sinks)


@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_an_empty_row_is_exactly_zero_and_changes_no_other(mode):
    """CUDA graphs pad the batch with rows of length 0 (vllm#57094, sglang#1779)."""
    spec = spec_for(split_mode=mode, split_tokens=64)
    out, lse = decode(spec, make_rows(spec, [0, 300, 0, 0]))
    assert (out[[0, 2, 3]] == 0).all()
    assert (lse[[0, 2, 3]] == -np.inf).all()
    assert np.isfinite(out[1]).all()


def test_an_empty_row_with_a_sink_has_the_sinks_weight():
    spec = spec_for(has_sinks=True)
    sinks = np.arange(spec.num_heads, dtype=np.float32)
    out, lse = decode(spec, make_rows(spec, [0, 20]), sinks=sinks)
    assert (out[0] == 0).all()
    np.testing.assert_allclose(lse[0], sinks, atol=1e-6)


@pytest.mark.parametrize("garbage", [-1, 2**30])
def test_table_entries_beyond_the_row_are_never_followed(garbage):
    spec = spec_for(block_size=4)
    assert_right(spec, make_rows(spec, [13, 64]), garbage=garbage)


def test_block_ids_far_beyond_32_bits_of_elements():
    """vllm#47671: block id times stride overflows int32. The cache is 6 GB of untouched pages."""
    spec = spec_for(dtype="float16", block_size=16, num_heads=1, num_kv_heads=1)
    k, v = (torch.empty(3 * 2**30, dtype=torch.float16) for _ in range(2))
    blocks = len(k) // (16 * 16)
    k_cache, v_cache = (x.view(blocks, 16, 1, 16) for x in (k, v))
    last = torch.tensor([[blocks - 1, blocks - 5]], dtype=torch.int32)
    k_cache[last[0].long()] = torch.randn(2, 16, 1, 16).half()
    v_cache[last[0].long()] = torch.randn(2, 16, 1, 16).half()
    q = torch.randn(1, 1, 16).half()
    out, _ = split_decode(
        spec,
        q,
        k_cache,
        v_cache,
        last,
        torch.tensor([30], dtype=torch.int32),
        num_slots=2,
        scratch=make_scratch(spec, 1, 30, 2),
    )
    keys, values = (x[last[0].long()].flatten(0, 1)[:30, 0].double() for x in (k_cache, v_cache))
    want = (q[0].double() @ keys.T * spec.scale).softmax(-1) @ values
    torch.testing.assert_close(out[0].double(), want, atol=2e-3, rtol=0)


def test_strided_queries_and_outputs():
    """FlagGems#5235: a combine kernel that took the output for contiguous."""
    spec = spec_for()
    rows = make_rows(spec, [100, 7])
    pool = fill_pool(
        spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), TritonBackend(spec, 5), rows
    )
    wide = torch.zeros(2, 3 * spec.num_heads, spec.head_dim)
    wide[:, : spec.num_heads] = torch.from_numpy(rows.q)
    out = torch.full((2, 2 * spec.num_heads, spec.head_dim), 7.0)[:, ::2]
    split_decode(
        spec,
        wide[:, : spec.num_heads],
        *pool,
        torch.from_numpy(rows.batch.block_table),
        torch.from_numpy(rows.batch.seq_lens),
        num_slots=5,
        scratch=make_scratch(spec, 2, 100, 5),
        out=out,
        tuning=TUNING,
    )
    np.testing.assert_allclose(out.numpy(), oracle(spec, rows)[0], atol=2e-6)
    assert (out._base[:, 1::2] == 7).all()


@pytest.mark.parametrize("window", [None, 120])
def test_in_fixed_mode_a_row_is_bitwise_the_same_in_any_batch_and_on_any_device(window):
    """FA#1570: the length of one row changed the bits of another. Slots decide which groups of
    leaves are added up by one block and which by the merge: the bits must not tell."""
    spec = spec_for(split_mode="fixed", split_tokens=16, num_heads=2, num_kv_heads=1, window=window)
    rows = make_rows(spec, [40, 140, 12, 64])
    tuning = replace(TUNING, tokens=16)
    together, lse = decode(spec, rows, tuning=tuning)
    whole, mixed, cut = 1, 3, 20  # what becomes of most groups of the longest row
    for some, slots in [
        ([0], 2),
        ([2], 3),
        ([1], whole),
        ([1], mixed),
        ([1], cut),
        ([3, 1, 0, 2], 16),
    ]:
        out, other_lse = decode(spec, some_of(rows, some), slots=slots, tuning=tuning)
        assert (out == together[some]).all()
        assert (other_lse == lse[some]).all()


def test_in_fixed_mode_long_rows_have_longer_leaves_and_the_same_bits_wherever_they_are_cut():
    """Lengths around those at which a leaf grows, with at most six leaves a line."""
    spec = spec_for(split_mode="fixed", split_tokens=16, num_heads=2, num_kv_heads=1)
    rows = make_rows(spec, [95, 96, 97, 300])
    tuning = replace(TUNING, tokens=16, leaves=6, fold=2)
    together, lse = decode(spec, rows, tuning=tuning)
    np.testing.assert_allclose(together, oracle(spec, rows)[0], atol=2e-6)
    for i, slots in [(0, 1), (1, 5), (2, 3), (3, 1), (3, 2), (3, 4), (3, 9)]:
        out, other_lse = decode(spec, some_of(rows, [i]), slots=slots, tuning=tuning)
        assert (out[0] == together[i]).all()
        assert (other_lse[0] == lse[i]).all()


def some_of(rows: Rows, some: list[int]) -> Rows:
    batch = replace(
        rows.batch,
        query_start_loc=np.arange(len(some) + 1, dtype=np.int32),
        seq_lens=rows.batch.seq_lens[some],
        block_table=rows.batch.block_table[some],
    )
    return Rows(batch, rows.q[some], [rows.keys[i] for i in some], [rows.values[i] for i in some])


def test_partials_are_true_and_merge_to_the_answer():
    """With one leaf a group every leaf's partial is left, at the place of its number."""
    spec = spec_for(split_mode="fixed", split_tokens=32, window=100)
    tuning = replace(TUNING, fold=1)
    rows = make_rows(spec, [150, 90])
    pool = fill_pool(
        spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), TritonBackend(spec, 5), rows
    )
    scratch = poisoned(make_scratch(spec, 2, 150, 5, tuning))
    out, _ = split_decode(
        spec,
        torch.from_numpy(rows.q),
        *pool,
        torch.from_numpy(rows.batch.block_table),
        torch.from_numpy(rows.batch.seq_lens),
        num_slots=5,
        scratch=scratch,
        tuning=tuning,
    )
    plan = plan_splits(
        [150, 90],
        num_kv_heads=2,
        block_size=16,
        num_cores=5,
        mode="fixed",
        split_tokens=32,
        window=100,
    )
    for row, cuts in enumerate(plan.boundaries):
        for head in range(2):
            heads = slice(2 * head, 2 * head + 2)
            place = (row * 2 + head) * scratch.line_places
            sums, m, l = (x[place : place + len(cuts)] for x in (scratch.out, scratch.m, scratch.l))
            m = m * np.log(2)
            for i, (start, stop) in enumerate(cuts):
                scores = rows.q[row, heads] @ rows.keys[row][start:stop, head].T * spec.scale
                want = scores.max(-1)
                np.testing.assert_allclose(m[i], want, atol=2e-6)
                np.testing.assert_allclose(l[i], np.exp(scores - want[:, None]).sum(-1), rtol=1e-5)
            merged, _, _ = merge_partials(sums / l[..., None], m, l)
            torch.testing.assert_close(merged, out[row, heads], atol=1e-6, rtol=0)


def test_short_lines_of_a_long_batch_are_read_whole():
    """Nothing of theirs is left for the merge, only of the one long line."""
    spec = spec_for(num_heads=2, num_kv_heads=1)
    tuning = replace(TUNING, tokens=16, uncut=2)
    rows = make_rows(spec, [60, 500, 17, 80, 33, 64, 10, 70])
    pool = fill_pool(
        spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), TritonBackend(spec, 3), rows
    )
    scratch = poisoned(make_scratch(spec, 8, 500, 3, tuning))
    out, _ = split_decode(
        spec,
        torch.from_numpy(rows.q),
        *pool,
        torch.from_numpy(rows.batch.block_table),
        torch.from_numpy(rows.batch.seq_lens),
        num_slots=3,
        scratch=scratch,
        tuning=tuning,
    )
    np.testing.assert_allclose(out.numpy(), oracle(spec, rows)[0], atol=2e-6)
    # 56 units in 8 shares of 7; the second line has units 4 to 35, so it is cut five times.
    assert (~scratch.l[:, 0].isnan()).sum() == 6


@pytest.mark.parametrize(
    ("mode", "rows", "slots", "shares"),
    [
        ("off", 100, 264, 800),
        ("auto", 1, 264, 264),
        ("auto", 4, 264, 256),
        ("auto", 64, 264, 512),
        ("auto", 18, 264, 264),  # 144 would leave nearly half of the slots idle
        ("auto", 36, 264, 264),  # so would the second wave of 288
        ("fixed", 36, 264, 264),
        ("auto", 1, 6, 6),
    ],
)
def test_no_eighth_of_the_slots_is_left_idle(mode, rows, slots, shares):
    spec = spec_for(split_mode=mode, num_heads=8, num_kv_heads=8)
    assert num_shares(spec, rows, slots) == shares


@pytest.mark.parametrize(
    ("total", "shares"),
    [(1, 1), (7, 7), (100, 7), (20010, 20000), (32769, 32768), (2**28, 32768), (2**29 + 5, 264)],
)
def test_every_unit_is_found_in_its_share(total, shares):
    """Where shares begin and end, and in the middle: the kernel divides in fp32 and corrects."""

    @triton.jit
    def find(units, found, total, shares, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(found + at, share_of(tl.load(units + at), total, shares))

    size = 1 << 12
    cuts = np.arange(shares + 1, dtype=np.int64) * total // shares
    middles = np.arange(size, dtype=np.int64) * (total - 1) // (size - 1)
    units = np.unique(np.concatenate([cuts[:-1], cuts[1:] - 1, middles]))
    padded = np.resize(units, triton.cdiv(len(units), size) * size).astype(np.int32)
    found = torch.empty(len(padded), dtype=torch.int32)
    find[(len(padded) // size,)](torch.from_numpy(padded), found, total, shares, N=size)
    want = np.searchsorted(cuts, padded, side="right") - 1
    np.testing.assert_array_equal(found.numpy(), want)


@pytest.mark.parametrize(("first_unit", "line_units"), [(0, 1), (0, 37), (3, 38), (5, 64)])
@pytest.mark.parametrize("shares", [1, 2, 7, 50])
def test_the_merge_knows_which_groups_the_split_kernel_cut(first_unit, line_units, shares):
    """Groups of 4 leaves of 3 units; the line lies between two others."""
    leaf, fold, line_start = 3, 4, 11
    total = line_start + line_units + 20
    shares = min(shares, total)

    @triton.jit
    def ask(begins, cut, line_start, first, units, total, shares, LEAF: tl.constexpr):
        i = tl.program_id(0)
        unit = tl.minimum(tl.maximum(i * total // shares - line_start, 0), units)
        tl.store(begins + i, nearest_leaf(unit, first, units, LEAF))
        group = (first // (4 * LEAF) + tl.arange(0, 8)) * (4 * LEAF) - first
        start = tl.minimum(tl.maximum(group, 0), units)
        stop = tl.minimum(group + 4 * LEAF, units)
        found = is_cut(start, stop, line_start, first, units, LEAF, total, shares)
        tl.store(cut + tl.arange(0, 8), found.to(tl.int32))

    begins = torch.empty(shares, dtype=torch.int32)
    cut = torch.empty(8, dtype=torch.int32)
    ask[(shares,)](begins, cut, line_start, first_unit, line_units, total, shares, LEAF=leaf)
    begins = begins.numpy()
    assert (np.diff(begins) >= 0).all()
    inner = begins[(begins > 0) & (begins < line_units)]
    assert ((first_unit + inner) % leaf == 0).all()
    group = (first_unit // (leaf * fold) + np.arange(8)) * leaf * fold - first_unit
    want = [bool(((inner > g) & (inner < g + leaf * fold)).any()) for g in group]
    np.testing.assert_array_equal(cut.numpy().astype(bool), want)


@settings(max_examples=6, deadline=None)
@given(
    lens=st.lists(st.integers(0, 130), min_size=1, max_size=4),
    slots=st.integers(1, 40),
    mode=st.sampled_from(["off", "auto", "fixed"]),
    split_tokens=st.sampled_from([16, 32, 48]),
    fold=st.integers(1, 5),
    leaves=st.integers(1, 9),
    uncut=st.integers(1, 4),
    window=st.none() | st.integers(1, 160),
)
def test_any_batch_is_covered_exactly(lens, slots, mode, split_tokens, fold, leaves, uncut, window):
    spec = spec_for(
        num_heads=2,
        num_kv_heads=2,
        block_size=8,
        window=window,
        split_mode=mode,
        split_tokens=split_tokens,
    )
    tuning = Tuning(16, 4, 3, leaves=leaves, fold=fold, uncut=uncut)
    assert_right(spec, make_rows(spec, lens), slots=slots, tuning=tuning)
