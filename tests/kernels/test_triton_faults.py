"""The reported faults of split-KV attention on the ``triton`` candidate, in the interpreter.

The numbers are those of tests/cpu/test_attention_faults.py. What isn't a kernel's is elsewhere: T1,
T2, T14, T15, T18, T28 and T29 are the merge's and the planner's, T22 is the Ascend adapter's. The
pool is NaN wherever a row's live keys don't lie, and a table's empty entries are -1.
"""

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

    def __init__(self, slots: int = 7) -> None:
        self.slots = slots

    def open(self, spec: AttentionSpec) -> TritonBackend:
        return TritonBackend(spec, num_slots=self.slots)


def small(**changes) -> AttentionSpec:
    return make_spec(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | changes)


def check(spec, lens, slots=7, **how):
    rows = make_rows(spec, lens, **how)
    got, want = run(Interpreted(slots), spec, rows), oracle(spec, rows)
    for found, true in zip(got, want, strict=True):
        np.testing.assert_allclose(found, true, atol=5e-6)
    return got


def test_t3_fewer_keys_than_splits():
    for slots in (4, 16):
        check(small(), [1, 2, 3, 0], slots)


def test_t4_t11_short_lengths_with_every_plan():
    lens = [1, 15, 16, 17, 33]
    for mode, slots in (("off", 4), ("auto", 1), ("auto", 8), ("fixed", 8)):
        check(small(split_mode=mode, split_tokens=16), lens, slots)


@pytest.mark.parametrize("slots", [1, 7, 76, 132, 264, 396])
def test_t5_any_number_of_slots(slots):
    check(small(), [17, 40], slots)


@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_t6_t7_pad_rows_are_zero_and_touch_nobody(mode):
    spec = small(split_mode=mode, split_tokens=32)
    out, lse = check(spec, [50, 0, 90, 0, 0])
    assert not out[[1, 3, 4]].any()
    assert np.isneginf(lse[[1, 3, 4]]).all()


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_t8_t20_t21_a_used_workspace_and_a_plan_of_another_step(mode):
    """Under graphs the buffers stay: what an earlier, longer step left there is never read."""
    spec = small(split_mode=mode, split_tokens=32, graph=True)
    rows = make_rows(spec, [70, 200])
    backend = TritonBackend(spec, num_slots=7)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(rows.q)
    plan = backend.plan(rows.batch)
    np.testing.assert_allclose(backend.run(q, *pool, plan)[0], oracle(spec, rows)[0], atol=5e-6)
    for lens in ([1, 0], [33, 200]):
        shorter = replace(
            rows,
            batch=replace(rows.batch, seq_lens=np.array(lens, np.int32)),
            keys=[k[:n] for k, n in zip(rows.keys, lens, strict=True)],
            values=[v[:n] for v, n in zip(rows.values, lens, strict=True)],
        )
        assert backend.plan(shorter.batch) is plan
        out, _ = backend.run(q, *pool, plan)
        np.testing.assert_allclose(out, oracle(spec, shorter)[0], atol=5e-6)


def test_t9_page_4_length_13():
    check(small(block_size=4), [13])  # slots 13 to 15 hold NaN, and so does block 0


def test_t10_uniform_weights():
    for length in (17, 257):
        check(small(), [length], spread=0.0)


def test_t12_queries_that_are_part_of_a_larger_array():
    spec = small()
    rows = make_rows(spec, [40, 9])
    backend = TritonBackend(spec, num_slots=7)
    pool = fill_pool(spec, TritonCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    whole = torch.full((2, spec.num_heads + 3, spec.head_dim), torch.nan)
    whole[:, 2 : 2 + spec.num_heads] = torch.from_numpy(rows.q)
    q = whole[:, 2 : 2 + spec.num_heads]
    out, _ = backend.run(q, *pool, backend.plan(rows.batch))
    np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=5e-6)


@pytest.mark.parametrize("slots", [1, 2, 7, 16, 33])
def test_t13_t16_t27_numbers_of_splits_agree_in_a_batch(slots):
    check(small(), [150, 40], slots)


def test_t17_t19_addresses_past_32_bits():
    """A pool of which only the last blocks are touched: its pages are never made real."""
    spec = small()
    rows = make_rows(spec, [40])
    elements = spec.block_size * spec.num_kv_heads * spec.head_dim
    last = 2**31 // elements + 4
    used = rows.batch.block_table >= 0
    rows.batch.block_table[used] += last - 8
    backend = TritonBackend(spec, num_slots=7)
    layout = TritonCandidate().kv_layout(spec, last)
    pool = [torch.empty(shape, dtype=torch.float32) for shape in (layout.k_shape, layout.v_shape)]
    position = np.arange(40)
    block = rows.batch.block_table[0, position // spec.block_size].astype(np.int64)
    slots = torch.from_numpy(block * spec.block_size + position % spec.block_size)
    k, v = (torch.from_numpy(x[0]) for x in (rows.keys, rows.values))
    backend.write(k, v, *pool, slots)
    out, _ = backend.run(torch.from_numpy(rows.q), *pool, backend.plan(rows.batch))
    np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=5e-6)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 100])
def test_t23_windows(window):
    check(small(window=window, block_size=16), [3, 40, 170])


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 24])
def test_t24_no_head_bleeds_into_another(group):
    check(small(num_heads=2 * group), [33, 5])


@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 112, 256, 544])
def test_t25_block_sizes(block_size):
    check(small(block_size=block_size), [block_size + 1, 60])


def test_t26_a_row_is_the_same_alone_in_a_batch_and_permuted():
    spec = small(split_mode="fixed", split_tokens=16)
    lens = [60, 40, 12, 50]
    rows = make_rows(spec, lens)
    together, _ = run(Interpreted(7), spec, rows)
    for order, slots in (([0], 1), ([3, 1, 0], 16)):
        batch = replace(
            rows.batch,
            query_start_loc=np.arange(len(order) + 1, dtype=np.int32),
            seq_lens=rows.batch.seq_lens[order],
            block_table=rows.batch.block_table[order],
        )
        keys, values = ([part[i] for i in order] for part in (rows.keys, rows.values))
        some = replace(rows, batch=batch, q=rows.q[order], keys=keys, values=values)
        out, _ = run(Interpreted(slots), spec, some)
        assert np.array_equal(out, together[order])
