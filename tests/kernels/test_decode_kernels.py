"""The fused kernels of small decode steps, in Triton's interpreter, against their torch references.

Outputs are NaN before each launch, and so is every place of the cache that no row sees.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from helpers.decode import attend, check_attention, error, make_rows, reference_attention

from octavo.attention.spec import AttentionSpec
from octavo.kernels.embed import reference as embed_reference
from octavo.kernels.embed import triton as embed
from octavo.kernels.linear import triton_products
from octavo.kernels.linear.table import choose_tile
from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear.triton_products import few_rows_tile
from octavo.kernels.linear_add import reference as linear_add_reference
from octavo.kernels.linear_add.triton import linear_add, square_columns
from octavo.kernels.norm_gate_up import reference as norm_gate_up_reference
from octavo.kernels.norm_gate_up.triton import norm_gate_up
from octavo.kernels.norm_linear import reference as norm_linear_reference
from octavo.kernels.norm_linear.triton import norm_linear
from octavo.kernels.rope_attention.triton import Cut, choose_cut, most_splits, supports

torch.set_num_threads(1)
BF16 = torch.bfloat16
EPS = 1e-6
# Rows, N, K, tile: K short of a chunk, of one and a bit, and of more chunks than are on their way.
PRODUCTS = [
    (1, 40, 96, Tile(16, 128, 4)),
    (1, 48, 64, Tile(16, 64, 1)),
    (1, 40, 96, Tile(16, 256, 4, one_row=True)),
    (1, 48, 64, Tile(64, 128, 4, one_row=True)),
    (1, 33, 1104, Tile(8, 512, 4, ahead=1, one_row=True)),
    (1, 70, 520, Tile(32, 128, 4, ahead=3, one_row=True)),
    (1, 130, 712, Tile(64, 64, 4, ahead=2, one_row=True)),
    (1, 33, 1104, Tile(8, 512, 4, ahead=1, one_row=True, early=1)),
    (1, 70, 520, Tile(32, 128, 4, ahead=2, one_row=True, early=2)),
    (1, 130, 712, Tile(64, 64, 4, ahead=1, one_row=True, early=4)),
    (1, 48, 128, Tile(64, 128, 4, ahead=2, one_row=True, early=2)),
    (3, 40, 96, Tile(16, 64, 2)),
    (5, 80, 136, Tile(32, 128, 4)),
    (16, 16, 320, Tile(16, 64, 2, ahead=2)),
    (1, 33, 264, Tile(16, 64, 1, ahead=1)),
]


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BF16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("rows", "n", "k", "tile"), PRODUCTS)
@pytest.mark.parametrize("extras", [False, True])
def test_norm_linear(rows, n, k, tile, extras):
    h, squares, weight = randn(rows, k), torch.rand(rows, 7) * 20, randn(n, k)
    how = {"eps": EPS, "bias": randn(n), "soft_cap": 5.0} if extras else {"eps": EPS}
    out = nans(rows, n)
    norm_linear(h, squares, weight, out, tile=tile, **how)
    assert error(out, norm_linear_reference.norm_linear(h, squares, weight, **how)) < 1e-6


@pytest.mark.parametrize(("rows", "n", "k", "tile"), PRODUCTS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_gate_up(rows, n, k, tile, activation):
    tile = replace(tile, rows=2 * tile.rows)
    h, squares, weight, bias = (
        randn(rows, k),
        torch.rand(rows, 3) * 20,
        randn(2 * n, k),
        randn(2 * n),
    )
    out = nans(rows, n)
    how = {"eps": EPS, "activation": activation, "bias": bias}
    norm_gate_up(h, squares, weight, out, tile=tile, **how)
    assert error(out, norm_gate_up_reference.norm_gate_up(h, squares, weight, **how)) < 1e-6


@pytest.mark.parametrize(("rows", "n", "k", "tile"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_add(rows, n, k, tile, biased):
    y, weight, x, norm = randn(rows, k), randn(n, k), torch.randn(rows, n), torch.rand(n)
    bias = randn(n) if biased else None
    want = linear_add_reference.linear_add(y, weight, x, norm, bias=bias)
    h, squares = nans(rows, n), nans(rows, square_columns(n, k, rows, tile))
    linear_add(y, weight, x, norm, h, squares, bias=bias, tile=tile)
    for found, right in zip((x, h, squares.sum(-1, keepdim=True)), want, strict=True):
        assert error(found, right) < 1e-6


def test_a_row_where_there_are_no_warpgroups(monkeypatch):
    assert few_rows_tile(4096, 1024, 1) == choose_tile(4096, 1024, 1)
    monkeypatch.setattr(triton_products, "has_warpgroups", lambda: False)
    assert few_rows_tile(4096, 1024, 1) == choose_tile(4096, 1024, 2)


def test_activations_and_outputs_that_are_part_of_larger_arrays():
    rows, n, k, tile = 3, 24, 64, Tile(16, 64, 2)
    h, squares, weight = randn(rows, 100)[:, 8:72], torch.rand(rows, 9)[:, :5] * 20, randn(n, k)
    wide = nans(rows, 50)
    out = wide[:, 4 : 4 + n]
    norm_linear(h, squares, weight, out, eps=EPS, tile=tile)
    assert error(out, norm_linear_reference.norm_linear(h, squares, weight, eps=EPS)) < 1e-6
    assert wide[:, :4].isnan().all()
    assert wide[:, 4 + n :].isnan().all()


@pytest.mark.parametrize("hidden", [96, 1500])
def test_embed(hidden):
    ids, table, norm = torch.tensor([3, -1, 0]), randn(5, hidden), torch.rand(hidden)
    x, h = nans(3, hidden), nans(3, hidden)
    squares = nans(3, embed.square_columns(hidden))
    embed.embed(ids, table, norm, x, h, squares, scale=3.0)
    want = embed_reference.embed(ids, table, norm, scale=3.0)
    for found, right in zip((x, h, squares.sum(-1, keepdim=True)), want, strict=True):
        assert error(found, right) < 1e-6
    assert not x[1].any()


@pytest.mark.parametrize("lens", [[1], [2], [31], [32], [33], [64], [65], [0, 40, 1]])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_a_tile(lens, splits):
    check_attention(make_rows(lens), Cut(splits, 32, 2, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(3, 1, 64, 64), (6, 2, 80, 80), (4, 4, 32, 16), (9, 3, 96, 24), (14, 1, 16, 16)],
)
def test_heads(heads, kv_heads, head_dim, rotary_dim):
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    check_attention(make_rows([50, 17], rotary_dim=rotary_dim, **shape), Cut(2, 16, 1, 2))


@pytest.mark.parametrize("window", [1, 16, 40, 100])
def test_a_window_sees_its_keys_only(window):
    check_attention(make_rows([3, 90, 41], window=window), Cut(3, 16, 1, 1))


def test_a_soft_cap_without_norms():
    check_attention(make_rows([60, 9], soft_cap=3.0, norms=False, block_size=7), Cut(2, 32, 2, 1))


def test_a_slot_of_minus_one_stores_nothing():
    rows = make_rows([20])
    rows.slot_mapping.fill_(-1)
    check_attention(rows, Cut(1, 32, 2, 1))


def test_more_splits_than_are_merged_at_a_time():
    check_attention(make_rows([600], num_heads=2, num_kv_heads=1), Cut(36, 16, 1, 1))


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shares_that_are_there_at_once_are_the_same(window, dtype):
    lens = [1, 17, 64, 65, 66, 129, 200, 300, 0]
    rows = make_rows(lens, window=window, dtype=dtype)
    rows = replace(rows, spec=replace(rows.spec, split_mode="fixed", split_tokens=128))
    cuts = [Cut(4, 64, warps, 2, 128, whole) for warps, whole in ((8, True), (4, True), (4, False))]
    cuts.append(Cut(4, 64, 4, 1, 128))
    answers = [attend(rows, cut)[0] for cut in cuts]
    assert error(answers[0], reference_attention(rows)) < 8e-3
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


def test_fixed_cuts_differ_in_what_changes_no_bit():
    spec = make_rows([1], num_heads=16, num_kv_heads=8, head_dim=128).spec
    spec = replace(spec, split_mode="fixed", split_tokens=256)
    assert choose_cut(spec, 1, 250) == Cut(1, 64, 8, 4, 256, whole=True)
    assert choose_cut(spec, 1, 4000) == Cut(16, 64, 8, 4, 256, whole=True)
    assert choose_cut(spec, 1, 8192) == Cut(32, 64, 4, 2, 256)
    assert choose_cut(spec, 64, 250) == Cut(1, 64, 4, 2, 256)
    few = replace(spec, num_kv_heads=1)  # too many queries for eight warps
    assert choose_cut(few, 1, 250) == Cut(1, 64, 4, 4, 256, whole=True)
    few = replace(spec, num_kv_heads=4)
    assert choose_cut(few, 1, 8192).whole
    assert not choose_cut(few, 1, 8193).whole  # shares are longer
    wide = replace(spec, head_dim=256, v_head_dim=256)
    assert choose_cut(wide, 1, 100) == Cut(1, 64, 4, 2, 256)


def test_a_cut_of_known_lengths():
    """What was measured, and no cut for every length."""
    spec = make_rows([1], num_heads=16, num_kv_heads=8, head_dim=128).spec
    lengths = (1, 256, 257, 700, 1000, 1025, 2048, 3072, 3073, 6144, 6145, 12_288, 32_768)
    cuts = {length: choose_cut(spec, 1, length) for length in lengths}
    assert cuts[1] == cuts[256] == Cut(1, 256, 8, 1)
    assert cuts[257] == Cut(2, 256, 8, 1)
    assert cuts[700] == Cut(3, 256, 8, 1)
    assert cuts[1000] == cuts[1025] == Cut(6, 256, 8, 1)
    assert cuts[2048] == cuts[3072] == Cut(12, 256, 8, 1)
    assert cuts[3073] == cuts[6144] == Cut(16, 128, 8, 2)
    assert cuts[6145] == cuts[12_288] == cuts[32_768] == Cut(32, 64, 4, 3)
    assert choose_cut(spec, 2, 129) == Cut(2, 128, 4, 1)
    assert choose_cut(spec, 2, 1500) == Cut(12, 128, 4, 1)
    assert choose_cut(spec, 8, 128) == Cut(2, 64, 4, 1)
    assert choose_cut(spec, 8, 500) == Cut(3, 64, 4, 3)
    assert choose_cut(spec, 1, 131_072).splits == 33
    assert choose_cut(spec, 16, 2048).splits == 2


@pytest.mark.parametrize("heads", [(16, 8, 128), (14, 2, 64), (16, 16, 64), (4, 1, 256)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_cuts_change_at_powers_of_two_and_halfway(rows, heads):
    """``CudaRuntime.kinds_of_decode`` counts on it: other cuts would be compiled while serving."""
    num_heads, num_kv_heads, head_dim = heads
    spec = make_rows([1], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim).spec
    seen = {choose_cut(spec, rows, n << i >> 1) for i in range(18) for n in (2, 3)}
    for length in range(1, 131_072, 61):
        cut = choose_cut(spec, rows, length)
        assert cut in seen
        assert cut.splits <= most_splits(spec, 132)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "float32 isn't one of bfloat16, float16"),
        ({"kv_dtype": "float16"}, "stores keys and values as the queries' bfloat16"),
        ({"num_heads": 15, "num_kv_heads": 1}, "15 query heads a KV head are more than 14"),
        ({"head_dim": 36, "v_head_dim": 36}, "head_dim 36 is no multiple of 8 up to 256"),
        ({"v_head_dim": 16}, "head_dim 32 isn't v_head_dim 16"),
        ({"has_sinks": True}, "has no attention sinks"),
        ({"phase": "prefill"}, "rows have one query token each"),
    ],
)
def test_a_refusal_says_why(changes, reason):
    base = vars(make_rows([1]).spec)
    support = supports(AttentionSpec(**{**base, **changes}))
    assert not support.ok
    assert support.reason == reason
