"""The Ascend adapter, call by call, over a CPU stand-in of torch_npu's fused operator.

Specs are judged for an NPU and opened where the stand-in's tensors are. Pools are NaN wherever a
row's live keys don't lie, and table entries that hold nothing are -1.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import fia_standin
from helpers.attention import Rows, fill_pool, make_rows, make_spec, num_blocks, oracle, run
from helpers.fia_standin import FiaStandIn

from octavo.attention import AttentionSpec, SplitPlan, plan_splits
from octavo.attention.backends import ascend_fia
from octavo.attention.backends.ascend_fia import AscendFiaCandidate, FiaCall, Layout
from octavo.attention.candidates import candidate, open_pair, select
from octavo.errors import ConfigError

BNSD, BSND, TND = (AscendFiaCandidate(layout) for layout in ("BNSD", "BSND", "TND"))
every_layout = pytest.mark.parametrize("fia", [BNSD, BSND, TND], ids=["BNSD", "BSND", "TND"])
SINKS = np.linspace(-1, 3, 6).astype(np.float32)


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> FiaStandIn:
    return fia_standin.install(monkeypatch)


def fia_spec(phase: str = "decode", **changes) -> AttentionSpec:
    """6 query and 2 KV heads of 128 in bfloat16, blocks of 128."""
    narrow = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128, "block_size": 128}
    return make_spec(phase, **(narrow | changes))


def bf16_rows(spec: AttentionSpec, *args, **kwargs) -> Rows:
    """Rows whose numbers bfloat16 can hold, so that the truth is that of what is stored."""
    rows = make_rows(spec, *args, **kwargs)
    rows.q, *kv = (
        torch.from_numpy(x).bfloat16().float().numpy() for x in (rows.q, *rows.keys, *rows.values)
    )
    rows.keys, rows.values = kv[: len(rows.keys)], kv[len(rows.keys) :]
    return rows


def check(spec: AttentionSpec, rows: Rows, got, sinks=None) -> None:
    """``out`` to what bfloat16 can show (8 bits, and a rounding of each partial), ``lse`` to
    float32's."""
    out, lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(got[0], out, atol=2**-8, rtol=2**-7)
    np.testing.assert_allclose(got[1], lse, atol=1e-5)


def on_npu(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, device="npu")


def aligned(spec: AttentionSpec, lens: list[int], splits: int) -> SplitPlan:
    """Each row in ``splits`` segments of whole blocks, empty ones where it is too short."""
    blocks = [-(-n // spec.block_size) for n in lens]
    edges = np.array(
        [
            [min(b * i // splits * spec.block_size, n) for i in range(splits)] + [n]
            for n, b in zip(lens, blocks, strict=True)
        ],
        np.int32,
    )
    plan = plan_splits(lens, num_kv_heads=1, block_size=spec.block_size, num_cores=1, mode="off")
    return replace(
        plan,
        row_start=np.arange(len(lens) + 1, dtype=np.int32) * splits,
        starts=edges[:, :-1].reshape(-1),
        stops=edges[:, 1:].reshape(-1),
    )


# ---- the answers


@every_layout
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_decode(fia, mode, sinks) -> None:
    spec = fia_spec(split_mode=mode, split_tokens=256, has_sinks=sinks is not None)
    assert fia.supports(on_npu(spec)).ok == (mode != "off" or fia is TND)
    rows = bf16_rows(spec, [1, 127, 128, 129, 0, 700])
    check(spec, rows, run(fia, spec, rows, sinks=sinks), sinks)


@every_layout
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_prefill_with_cached_prefixes(fia, sinks) -> None:
    spec = fia_spec("prefill")
    assert fia.supports(on_npu(spec)).ok
    rows = bf16_rows(spec, [1, 5, 128, 129, 0, 300], [1, 5, 128, 3, 0, 40])
    check(spec, rows, run(fia, spec, rows, sinks=sinks), sinks)


@pytest.mark.parametrize("window", [1, 5, 128, 150, 700, 5000])
@pytest.mark.parametrize(("phase", "new"), [("decode", None), ("prefill", [3, 60, 20])])
def test_t23_windows(operator, window, phase, new) -> None:
    """Its edge inside a block, the window as long as the row, longer. What it has left behind is
    not even named: the table begins with the first block seen. Never split, in any mode."""
    spec = fia_spec(phase, window=window, split_mode="fixed", split_tokens=128)
    assert TND.supports(on_npu(spec)).ok
    rows = bf16_rows(spec, [3, 700, 257], new)
    check(spec, rows, run(TND, spec, rows))
    (call,) = operator.calls
    assert (call["sparse_mode"], call["pre_tokens"], call["next_tokens"]) == (4, window - 1, 0)
    seen = window - 1 + np.diff(rows.batch.query_start_loc)
    first = np.maximum(rows.batch.seq_lens - seen, 0) // 128
    assert call["actual_seq_kvlen"] == (rows.batch.seq_lens - 128 * first).tolist()


@every_layout
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 24])
def test_t24_groups(fia, group) -> None:
    """Each KV head's values are its own number, so an answer tells whose keys it read."""
    spec = fia_spec(num_heads=2 * group, num_kv_heads=2)
    rows = bf16_rows(spec, [70, 300])
    for values in rows.values:
        values[:] = np.array([1.0, 2.0])[None, :, None]
    out, _ = run(fia, spec, rows, splits=aligned(spec, [70, 300], 2))
    np.testing.assert_array_equal(out[:, :group], 1)
    np.testing.assert_array_equal(out[:, group:], 2)


@every_layout
@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 112, 256, 544])
def test_t25_block_sizes(fia, block_size) -> None:
    spec = fia_spec(block_size=block_size)
    support = fia.supports(on_npu(spec))
    assert support.ok == (block_size % 16 == 0 and (block_size <= 512 or fia is TND))
    if not support.ok:
        assert support.reason.startswith(f"block_size {block_size} isn't a multiple of 16")
        return
    lens = [1, block_size, block_size + 1, 700]
    rows = bf16_rows(spec, lens)
    check(spec, rows, run(fia, spec, rows))
    check(spec, rows, run(fia, spec, rows, splits=aligned(spec, lens, 2)))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 256, 512])
@pytest.mark.parametrize("fia", [BNSD, BSND], ids=["BNSD", "BSND"])
def test_head_sizes(fia, head_dim) -> None:
    for phase, new in (("decode", None), ("prefill", [20, 9])):
        spec = fia_spec(phase, head_dim=head_dim)
        assert fia.supports(on_npu(spec)).ok
        rows = bf16_rows(spec, [20, 140], new)
        check(spec, rows, run(fia, spec, rows))


@pytest.mark.parametrize(
    ("heads", "head_dim", "v_head_dim"), [(6, 128, 128), (6, 192, 128), (6, 192, 192), (2, 64, 64)]
)
def test_head_sizes_of_tnd(heads, head_dim, v_head_dim) -> None:
    for phase, new in (("decode", None), ("prefill", [20, 9])):
        spec = fia_spec(phase, num_heads=heads, head_dim=head_dim, v_head_dim=v_head_dim)
        assert TND.supports(on_npu(spec)).ok
        rows = bf16_rows(spec, [20, 140], new)
        check(spec, rows, run(TND, spec, rows))


def test_float16() -> None:
    spec = fia_spec(dtype="float16", kv_dtype="float16")
    assert BNSD.supports(on_npu(spec)).ok
    rows = make_rows(spec, [140])
    out, _ = run(BNSD, spec, rows)
    np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=2e-3)


@every_layout
def test_b1_the_newest_key_and_each_edge_is_read(fia) -> None:
    """A needle: one key takes nearly all the weight. The newest, the first, and both sides of every
    cut."""
    spec = fia_spec(split_mode="fixed", split_tokens=256, num_heads=2)
    length = 640
    for needle in (0, 255, 256, 511, 512, length - 1):
        rows = bf16_rows(spec, [length, 3])
        rows.keys[0][needle] = 4 * rows.q[0]
        out, _ = run(fia, spec, rows)
        np.testing.assert_allclose(out[0], rows.values[0][needle], atol=2e-2)


@every_layout
def test_b4_every_number_has_its_place(fia) -> None:
    """Unique markers through ``write`` and ``gather``; a layer's pool is nothing but keys."""
    spec = fia_spec(block_size=16, dtype="float16", kv_dtype="float16", head_dim=16)
    rows = make_rows(spec, [40, 17])
    for row, keys in enumerate(rows.keys):
        keys[:] = np.arange(keys.size).reshape(keys.shape) + 1280 * row - 1000
        rows.values[row][:] = -keys
    backend = fia.open(spec)
    layout = fia.kv_layout(spec, num_blocks(rows))
    pool = fill_pool(spec, layout, backend, rows)
    for row, length in enumerate((40, 17)):
        k, v = backend.gather(*pool, torch.from_numpy(rows.batch.block_table[row]), length)
        np.testing.assert_array_equal(k.numpy(), rows.keys[row])
        np.testing.assert_array_equal(v.numpy(), rows.values[row])
    block, last = rows.batch.block_table[0, 1], rows.keys[0][31, 1]
    place = pool[0][block, 15, 16:] if fia is BSND else pool[0][block, 1, 15]
    np.testing.assert_array_equal(place.numpy(), last)


@every_layout
def test_t12_queries_that_are_part_of_a_larger_array(fia) -> None:
    for phase, new in (("decode", None), ("prefill", [2, 5])):
        spec = fia_spec(phase)
        rows = bf16_rows(spec, [100, 300], new)
        backend = fia.open(spec)
        pool = fill_pool(spec, fia.kv_layout(spec, num_blocks(rows)), backend, rows)
        tokens = len(rows.q)
        q = torch.randn(tokens, 10 * 128).bfloat16()[:, : 6 * 128].view(tokens, 6, 128)
        q.copy_(torch.from_numpy(rows.q))
        out, lse = backend.run(q, *pool, backend.plan(rows.batch))
        check(spec, rows, (out.float().numpy(), lse.numpy()))


# ---- splits


@every_layout
@pytest.mark.parametrize("splits", [1, 2, 7, 16, 33])
def test_t3_t16_numbers_of_splits_agree(fia, splits) -> None:
    """Rows with fewer blocks than splits, and one without keys, among them."""
    spec = fia_spec(block_size=16)
    lens = [600, 1, 33, 0, 16]
    rows = bf16_rows(spec, lens)
    check(spec, rows, run(fia, spec, rows, splits=aligned(spec, lens, splits)))


@pytest.mark.parametrize("cores", [1, 7, 24, 76, 132])
def test_t5_tnd_cuts_where_the_operator_does_not(monkeypatch, cores) -> None:
    """One call, the segments as its rows; ``auto`` knows the device's cores."""
    monkeypatch.setattr(ascend_fia, "COST", ascend_fia.SplitCost(min_tokens=16, merge_tokens=16))
    operator = fia_standin.install(monkeypatch, cores)
    spec = fia_spec(block_size=16)
    rows = bf16_rows(spec, [640, 5])
    check(spec, rows, run(TND, spec, rows))
    (call,) = operator.calls
    lens = call["actual_seq_kvlen"]
    assert sum(lens) == 645
    assert (len(lens) == 2) if cores == 1 else (len(lens) > 2)
    assert call["actual_seq_qlen"] == list(range(1, len(lens) + 1))


def test_auto_leaves_the_cutting_to_the_operator_where_it_cuts(operator) -> None:
    spec = fia_spec()
    rows = bf16_rows(spec, [3000])
    for fia in (BNSD, BSND):
        run(fia, spec, rows)
        assert operator.calls[-1]["actual_seq_kvlen"] == [3000]


def test_a_row_longer_than_the_operator_takes() -> None:
    spec = fia_spec()
    batch = make_rows(spec, [0]).batch
    table = np.arange(2400, dtype=np.int32)[None]
    batch = replace(batch, seq_lens=np.array([300_000], np.int32), block_table=table)
    (call,) = BNSD.open(spec).plan(batch).calls
    assert call.kv_lens == [262_144, 300_000 - 262_144]
    assert call.block_table[1, 0] == 2048


@every_layout
def test_t26_a_row_is_the_same_alone_and_in_a_batch(fia) -> None:
    """As far as our part goes: the operator's own has to be shown on its hardware."""
    spec = fia_spec(split_mode="fixed", split_tokens=128)
    lens = [300, 400, 20, 257]
    rows = bf16_rows(spec, lens)
    out, lse = run(fia, spec, rows)
    for order in ([0], [1], [3], [3, 1, 0, 2]):
        some = bf16_rows(spec, [lens[i] for i in order])
        some.q = rows.q[order]
        some.keys = [rows.keys[i] for i in order]
        some.values = [rows.values[i] for i in order]
        again = run(fia, spec, some)
        np.testing.assert_array_equal(again[0], out[order])
        np.testing.assert_array_equal(again[1], lse[order])


@every_layout
def test_more_rows_than_a_call_takes(operator, monkeypatch, fia) -> None:
    monkeypatch.setattr(ascend_fia, "MAX_ROWS", 3)
    lens = [300, 0, 17, 129]
    spec = fia_spec(split_mode="fixed", split_tokens=128)
    rows = bf16_rows(spec, lens)
    check(spec, rows, run(fia, spec, rows))
    assert [call["actual_seq_kvlen"] for call in operator.calls] == [[128, 128, 44], [17, 128, 1]]


def test_cuts_that_it_cannot_make() -> None:
    spec = fia_spec()
    rows = make_rows(spec, [300])
    with pytest.raises(ConfigError, match="at multiples of block_size 128"):
        BNSD.open(spec).plan(rows.batch, aligned(replace(spec, block_size=100), [300], 2))
    spec = fia_spec(window=200)
    with pytest.raises(ConfigError, match="doesn't split the history of a sliding window"):
        TND.open(spec).plan(rows.batch, aligned(spec, [300], 2))


# ---- the calls


def test_decode_call_of_bnsd(operator) -> None:
    """All that is given, and nothing else: no mask, which is ignored there, and no query lengths.
    The defaults are traps: scale 1, one head, no block size."""
    spec = fia_spec(scale=0.3)
    run(BNSD, spec, bf16_rows(spec, [9, 128, 69]))
    (call,) = operator.calls
    tensors = {name: tuple(call.pop(name).shape) for name in ("query", "key", "value")}
    pool = (5, 2, 128, 128)
    assert tensors == {"query": (3, 6, 1, 128), "key": pool, "value": pool}
    assert call.pop("block_table").dtype == torch.int32
    assert call == {
        "actual_seq_kvlen": [9, 128, 69],
        "block_size": 128,
        "num_query_heads": 6,
        "num_key_value_heads": 2,
        "softmax_scale": 0.3,
        "input_layout": "BNSD",
        "return_softmax_lse": True,
    }


def test_decode_call_of_bsnd(operator) -> None:
    spec = fia_spec()
    run(BSND, spec, bf16_rows(spec, [9, 69]))
    (call,) = operator.calls
    assert call["query"].shape == (2, 1, 6, 128)
    assert call["key"].shape[1:] == (128, 2 * 128)
    assert not {"atten_mask", "sparse_mode", "actual_seq_qlen"} & set(call)


def test_b2_tnd_query_lengths_are_cumulative_and_key_lengths_are_not(operator) -> None:
    spec = fia_spec()
    run(TND, spec, bf16_rows(spec, [69, 69, 69, 69]))
    spec = fia_spec("prefill")
    run(TND, spec, bf16_rows(spec, [69, 10, 0, 69], [4, 10, 0, 1]))
    decode, prefill = operator.calls
    assert decode["actual_seq_qlen"] == [1, 2, 3, 4]
    assert decode["actual_seq_kvlen"] == [69, 69, 69, 69]
    assert prefill["actual_seq_qlen"] == [4, 14, 15]
    assert prefill["actual_seq_kvlen"] == [69, 10, 69]
    for call in (decode, prefill):
        assert call["sparse_mode"] == 3
        assert torch.equal(call["atten_mask"], torch.ones(2048, 2048).triu(1).to(torch.int8))
        assert call["key"].shape[1:] == (2, 128, 128)


@pytest.mark.parametrize("fia", [BNSD, BSND], ids=["BNSD", "BSND"])
def test_prefill_goes_row_by_row(operator, fia) -> None:
    spec = fia_spec("prefill")
    run(fia, spec, bf16_rows(spec, [69, 0, 10], [4, 0, 10]))
    shapes = [(4, 6), (10, 6)] if fia is BSND else [(6, 4), (6, 10)]
    assert [call["query"].shape for call in operator.calls] == [(1, *s, 128) for s in shapes]
    assert [call["actual_seq_kvlen"] for call in operator.calls] == [[69], [10]]
    assert [call["sparse_mode"] for call in operator.calls] == [3, 3]


@every_layout
def test_t6_t7_t22_pad_rows_are_zero_and_every_list_is_as_long_as_its_batch(operator, fia) -> None:
    """A pad row has no keys and a table of -1. The operator never hears of it."""
    spec = fia_spec()
    for lens in ([40, 300, 3, 0], [1, 17, 0, 5, 64, 0, 0, 200], [0, 0]):
        operator.calls.clear()
        rows = bf16_rows(spec, lens)
        out, lse = run(fia, spec, rows)
        check(spec, rows, (out, lse))
        pads = np.array(lens) == 0
        assert (out[pads] == 0).all()
        assert (lse[pads] == -np.inf).all()
        for call in operator.calls:
            assert len(call["actual_seq_kvlen"]) == len(call["block_table"]) == sum(~pads)
            assert 0 not in call["actual_seq_kvlen"]


@every_layout
@pytest.mark.parametrize("entry", [-1, 0, 2**31 - 1])
def test_t9_table_entries_that_hold_nothing(operator, fia, entry) -> None:
    """Whatever they are, the operator gets ids of real blocks, and reads none of them."""
    spec = fia_spec(window=20 if fia is TND else None)
    rows = bf16_rows(spec, [300, 13])
    table = rows.batch.block_table.copy()
    table[table == -1] = entry
    backend = fia.open(spec)
    pool = fill_pool(spec, fia.kv_layout(spec, num_blocks(rows)), backend, rows)
    plan = backend.plan(replace(rows.batch, block_table=table))
    out, lse = backend.run(torch.from_numpy(rows.q).bfloat16(), *pool, plan)
    check(spec, rows, (out.float().numpy(), lse.numpy()))


def test_a_missing_block_is_an_error_not_block_0() -> None:
    spec = fia_spec()
    rows = make_rows(spec, [300])
    rows.batch.block_table[0, 1] = -1
    with pytest.raises(ValueError, match="isn't in the block table"):
        BNSD.open(spec).plan(rows.batch)


@every_layout
def test_a_row_without_keys_is_converted(fia) -> None:
    """The operator's +inf, with an output that nothing defines, is our -inf with zeros."""
    spec = fia_spec()
    backend = fia.open(spec)
    layout = fia.kv_layout(spec, 1)
    pool = [torch.full(layout.k_shape, torch.nan).bfloat16() for _ in "kv"]
    call = FiaCall(torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32), [1], [0])
    out, lse = backend.attend(torch.ones(1, 6, 128).bfloat16(), *pool, call)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_b6_the_step_is_prepared_once_for_all_layers(operator) -> None:
    spec = fia_spec()
    rows = bf16_rows(spec, [9, 69])
    backend = TND.open(spec)
    pool = fill_pool(spec, TND.kv_layout(spec, num_blocks(rows)), backend, rows)
    plan = backend.plan(rows.batch)
    for _ in range(2):
        backend.run(torch.from_numpy(rows.q).bfloat16(), *pool, plan)
    one, other = operator.calls
    assert one["block_table"] is other["block_table"]
    assert one["atten_mask"] is other["atten_mask"]


# ---- what it refuses


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("BNSD", {"device": "cuda:0"}, "runs on Ascend NPUs, not on cuda:0"),
        ("BNSD", {"graph": True}, "takes lengths from the host"),
        ("BNSD", {"dtype": "float32", "kv_dtype": "float32"}, "not in float32"),
        ("BNSD", {"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn don't go with queries in bfloat16"),
        ("BNSD", {"kv_dtype": "float16"}, "float16 don't go with queries in bfloat16"),
        ("BNSD", {"soft_cap": 30.0}, "has no soft cap"),
        ("BNSD", {"num_heads": 7}, "7 query heads aren't a multiple of 2"),
        ("BNSD", {"num_heads": 260}, "260 query heads are more than 256"),
        ("BNSD", {"num_heads": 130}, "65 query heads a KV head are more than 64"),
        ("BNSD", {"head_dim": 72}, "head_dim 72 isn't a multiple of 16 up to 512"),
        ("BSND", {"head_dim": 528}, "head_dim 528 isn't a multiple of 16 up to 512"),
        ("BNSD", {"head_dim": 192, "v_head_dim": 128}, "v_head_dim 128 isn't head_dim 192"),
        ("TND", {"head_dim": 64}, "layout TND takes head_dim 128, or 64 without GQA, not 64"),
        ("TND", {"head_dim": 256}, "OCTAVO_ASCEND_FIA_LAYOUT=BNSD takes others"),
        ("BNSD", {"window": 100}, "ignores sliding windows in decode; OCTAVO_ASCEND_FIA_LAYOUT"),
        ("BSND", {"phase": "prefill", "window": 100}, "layout BSND ignores sliding windows"),
        ("BNSD", {"split_mode": "off"}, "the operator decides about splitting"),
        ("BSND", {"num_heads": 128, "num_kv_heads": 128, "head_dim": 512}, "more than 65535"),
        ("BNSD", {"block_size": 8}, "isn't a multiple of 16 up to 512"),
        ("BNSD", {"block_size": 528}, "isn't a multiple of 16 up to 512"),
        ("TND", {"block_size": 1040}, "isn't a multiple of 16 up to 1024"),
        ("BNSD", {"phase": "prefill", "block_size": 16}, "a multiple of 128 up to 512"),
        ("BSND", {"phase": "prefill", "block_size": 640}, "a multiple of 128 up to 512"),
        ("TND", {"split_mode": "fixed", "split_tokens": 100}, "segments of 100 tokens don't begin"),
        ("TND", {"split_mode": "fixed", "split_tokens": 2048}, "may itself cut segments of 2048"),
    ],
)
def test_refusals(layout: Layout, changes, reason) -> None:
    support = AscendFiaCandidate(layout).supports(fia_spec(**({"device": "npu"} | changes)))
    assert not support.ok
    assert reason in support.reason


def test_without_torch_npu(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert BNSD.supports(fia_spec(device="npu")).reason == "the package torch_npu isn't installed"


def test_a_torch_npu_without_the_operator(monkeypatch) -> None:
    monkeypatch.delattr(sys.modules["torch_npu"], fia_standin.OPERATOR)
    with pytest.raises(ConfigError, match=r"torch_npu 0.0 \(stand-in\) has no npu_fused_infer"):
        BNSD.open(fia_spec())


@every_layout
def test_t17_t19_a_pool_that_the_operator_cannot_address(fia) -> None:
    """8 KV heads x 128: 2,097,151 tokens a layer."""
    spec = fia_spec(num_heads=8, num_kv_heads=8)
    assert fia.kv_layout(spec, 16_383).k_shape[0] == 16_383
    with pytest.raises(ConfigError, match="set num_gpu_blocks_override to at most 16,383"):
        fia.kv_layout(spec, 16_384)


def test_the_layout_is_a_setting(monkeypatch) -> None:
    monkeypatch.delenv("OCTAVO_ASCEND_FIA_LAYOUT", raising=False)
    assert AscendFiaCandidate().layout == "BNSD"
    monkeypatch.setenv("OCTAVO_ASCEND_FIA_LAYOUT", "TND")
    assert AscendFiaCandidate().layout == "TND"
    monkeypatch.setenv("OCTAVO_ASCEND_FIA_LAYOUT", "BSH")
    with pytest.raises(ConfigError, match="is 'BSH'; the layouts are BNSD, BSND, TND"):
        AscendFiaCandidate()


# ---- among the other candidates


def npu_specs(**changes) -> tuple[AttentionSpec, AttentionSpec]:
    return fia_spec("prefill", device="npu", **changes), fia_spec(device="npu", **changes)


def test_off_until_asked_for() -> None:
    selection = select(*npu_specs())
    assert (selection.prefill, selection.decode) == ("reference", "reference")
    for phase in ("prefill", "decode"):
        (verdict,) = (v for v in selection.verdicts[phase] if v.candidate == "ascend_fia")
        assert verdict.state == "off"
        assert verdict.reason == (
            "no certificate covers it; --attention-backend ascend_fia turns it on"
        )
    selection = select(*npu_specs(), backend="ascend_fia")
    assert (selection.prefill, selection.decode) == ("ascend_fia", "ascend_fia")
    assert selection.kv_layout(5).k_shape == (5, 2, 128, 128)


def test_asked_for_but_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"can't serve prefill: block_size 16 .* --block-size 128"
    ):
        select(*npu_specs(block_size=16), backend="ascend_fia")


def test_the_reference_reads_its_pool() -> None:
    """Where prefill is the reference's, over the pool of ours."""
    prefill, decode = (replace(spec, device="cpu") for spec in npu_specs())
    selection = replace(
        select(*npu_specs(), backend="ascend_fia"),
        prefill="reference",
        prefill_spec=prefill,
        decode_spec=decode,
    )
    backend, owner = open_pair(selection)
    rows = bf16_rows(prefill, [140, 20], [30, 20])
    pool = fill_pool(prefill, selection.kv_layout(num_blocks(rows)), owner, rows)
    out, lse = backend.run(torch.from_numpy(rows.q).bfloat16(), *pool, backend.plan(rows.batch))
    check(prefill, rows, (out.float().numpy(), lse.numpy()))


def test_judging_it_imports_neither_torch_nor_torch_npu() -> None:
    code = """
import sys
from octavo.attention.backends.ascend_fia import AscendFiaCandidate
AscendFiaCandidate()
assert not {"torch", "torch_npu"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert candidate("ascend_fia").name == "ascend_fia"
