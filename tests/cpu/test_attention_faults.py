"""29 reported faults of split-KV attention, as small inputs, on each backend that a CPU can run.

Their numbers are those of the project's collection (tests named t1 ... t29; T1, T2, T5, T14, T15,
T18, T23, T25, T26, T28 and T29 have more in tests/unit). Every pool here is NaN wherever a row's
live keys don't lie: the tail of its last block, block 0, blocks of nobody, blocks that its window
has left behind; table entries that hold nothing are -1 (T9). T22 is the Ascend adapter's.
Keys and values are numbers that bfloat16 and int8 hold exactly, so all dtypes have one answer.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import attention as helpers
from helpers.attention import Rows, fill_pool, make_spec, num_blocks, oracle, run

from octavo.attention import AttentionBatch, SplitPlan, merge_lse, plan_splits
from octavo.attention.backends.cpu import CpuCandidate
from octavo.attention.backends.reference import ReferenceCandidate
from octavo.verify.problems import held


class CpuWith(CpuCandidate):
    """Stores keys and values in another dtype than a test's spec says."""

    def __init__(self, kv_dtype):
        self.kv_dtype = kv_dtype

    def supports(self, spec):
        return super().supports(replace(spec, kv_dtype=self.kv_dtype))

    def kv_layout(self, spec, num_blocks):
        return super().kv_layout(replace(spec, kv_dtype=self.kv_dtype), num_blocks)

    def open(self, spec):
        return super().open(replace(spec, kv_dtype=self.kv_dtype))


both = pytest.mark.parametrize(
    "candidate", [ReferenceCandidate(), CpuCandidate()], ids=["reference", "cpu"]
)
every = pytest.mark.parametrize(
    "candidate",
    [ReferenceCandidate(), CpuCandidate(), CpuWith("bfloat16"), CpuWith("int8")],
    ids=["reference", "cpu", "cpu, bfloat16", "cpu, int8"],
)


def make_rows(spec, *lens, **options):
    rows = helpers.make_rows(spec, *lens, **options)
    rows.keys, rows.values = (
        [held(torch.from_numpy(x), replace(spec, kv_dtype="int8")).numpy() for x in side]
        for side in (rows.keys, rows.values)
    )
    return rows


def check(spec, rows, got, atol=1e-5):
    out, lse = oracle(spec, rows)
    np.testing.assert_allclose(got[0], out, atol=atol)
    np.testing.assert_allclose(got[1], lse, atol=atol)


def cut(spec, lens, splits):
    """Each row in ``splits`` segments of about equal length; empty ones where it is too short."""
    row_start = np.arange(len(lens) + 1, dtype=np.int32) * splits
    edges = np.array([[n * i // splits for i in range(splits + 1)] for n in lens], np.int32)
    return SplitPlan(
        row_start=row_start,
        starts=edges[:, :-1].reshape(-1),
        stops=edges[:, 1:].reshape(-1),
        seq_lens=np.array(lens),
        num_kv_heads=spec.num_kv_heads,
        num_cores=1,
        mode="auto",
        segment_tokens=0,
        min_tokens=1,
    )


@every
def test_t3_fewer_keys_than_splits(candidate):
    spec = make_spec()
    for splits in (4, 16):
        lens = [1, 2, 3, 0]
        rows = make_rows(spec, lens)
        check(spec, rows, run(candidate, spec, rows, splits=cut(spec, lens, splits)))


@every
def test_t4_t11_short_lengths_with_every_plan(candidate):
    """Each length up to two blocks, cut by auto, by hand, and at sizes that fit no tile."""
    lens = list(range(1, 33))
    spec = make_spec()
    rows = make_rows(spec, lens)
    check(spec, rows, run(candidate, spec, rows))
    for splits in (1, 2, 4, 8):
        check(spec, rows, run(candidate, spec, rows, splits=cut(spec, lens, splits)))
    for split_tokens in (1, 17, 100):
        fixed = replace(spec, split_mode="fixed", split_tokens=split_tokens)
        check(fixed, rows, run(candidate, fixed, rows))


@every
@pytest.mark.parametrize("cores", [1, 7, 76, 132, 264, 396])
def test_t5_any_number_of_cores(candidate, cores):
    spec = make_spec()
    lens = [700, 17, 3000]
    rows = make_rows(spec, lens)
    splits = plan_splits(lens, num_kv_heads=2, block_size=16, num_cores=cores)
    check(spec, rows, run(candidate, spec, rows, splits=splits))


@every
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_t6_t7_pad_rows_are_zero_and_touch_nobody(candidate, mode):
    """Sizes 3 of 4 and 5 of 8; a pad row has no keys and a table of -1."""
    spec = make_spec(split_mode=mode)
    for lens in ([40, 900, 3], [1, 17, 1300, 5, 64]):
        rows = make_rows(spec, lens)
        pads = 8 - len(lens) if len(lens) > 3 else 1
        padded = make_rows(spec, lens + [0] * pads)
        padded.q[: len(lens)] = rows.q
        padded.keys[: len(lens)], padded.values[: len(lens)] = rows.keys, rows.values
        out, lse = run(candidate, spec, padded, splits=None)
        assert (out[len(lens) :] == 0).all()
        assert (lse[len(lens) :] == -np.inf).all()
        check(spec, rows, (out[: len(lens)], lse[: len(lens)]))
        if mode != "auto":
            alone = run(candidate, spec, rows)
            np.testing.assert_array_equal(out[: len(lens)], alone[0])


def test_t8_a_used_workspace():
    """Partials left from an earlier step, here NaN, change nothing."""
    spec = make_spec(split_mode="fixed", split_tokens=64)
    rows = make_rows(spec, [300, 1, 0, 65])
    backend = CpuCandidate().open(spec)
    pool = fill_pool(spec, CpuCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    plan = backend.plan(rows.batch)
    for workspace in (plan.step.part_out, plan.step.part_m, plan.step.part_l):
        workspace[:] = np.nan
    out, lse = backend.run(torch.from_numpy(rows.q), *pool, plan)
    check(spec, rows, (out.numpy(), lse.numpy()))


def test_t9_page_4_length_13():
    spec = make_spec(block_size=4)
    rows = make_rows(spec, [13])
    check(spec, rows, run(ReferenceCandidate(), spec, rows))


@every
def test_t9_any_table_entry_that_holds_nothing(candidate):
    """Stale ids and -1 alike: what is past the end or behind the window isn't looked at."""
    spec = make_spec(window=20)
    rows = make_rows(spec, [100, 13])
    for entry in (-1, 0, 2**31 - 1):
        table = rows.batch.block_table.copy()
        table[table == -1] = entry
        batch = replace(rows.batch, block_table=table)
        backend = candidate.open(spec)
        pool = fill_pool(spec, candidate.kv_layout(spec, num_blocks(rows)), backend, rows)
        out, lse = backend.run(torch.from_numpy(rows.q), *pool, backend.plan(batch))
        check(spec, rows, (out.numpy(), lse.numpy()))


@every
def test_t10_uniform_weights(candidate):
    """A query of zeros: the mean of the values, at lengths just past a tile."""
    spec = make_spec()
    rows = make_rows(spec, [17, 257])
    rows.q[:] = 0
    out, lse = run(candidate, spec, rows)
    for row, n in enumerate((17, 257)):
        mean = rows.values[row].mean(0).repeat(3, 0)
        np.testing.assert_allclose(out[row], mean, atol=1e-6)
        np.testing.assert_allclose(lse[row], np.log(n), atol=1e-6)


@every
def test_t12_queries_that_are_part_of_a_larger_array(candidate):
    spec = make_spec(split_mode="fixed", split_tokens=64)
    rows = make_rows(spec, [100, 300])
    backend = candidate.open(spec)
    pool = fill_pool(spec, candidate.kv_layout(spec, num_blocks(rows)), backend, rows)
    qkv = torch.randn(2, (6 + 2 + 2) * 64)
    q = qkv[:, : 6 * 64].view(2, 6, 64)
    q.copy_(torch.from_numpy(rows.q))
    assert not q.is_contiguous()
    out, lse = backend.run(q, *pool, backend.plan(rows.batch))
    check(spec, rows, (out.numpy(), lse.numpy()))


@both
def test_t13_t16_t27_numbers_of_splits_agree_in_a_batch(candidate):
    """16/8 heads x 128, 4,096 tokens: 1 to 33 splits, two sequences."""
    spec = make_spec(num_heads=16, num_kv_heads=8, head_dim=128)
    lens = [4096, 1025]
    rows = make_rows(spec, lens)
    wanted = oracle(spec, rows)
    for splits in (1, 2, 7, 16, 32, 33):
        out, lse = run(candidate, spec, rows, splits=cut(spec, lens, splits))
        np.testing.assert_allclose(out, wanted[0], atol=2e-6)
        np.testing.assert_allclose(lse, wanted[1], atol=2e-6)


@every
def test_t14_our_lse_is_natural(candidate):
    """Prefix 3,072 and suffix 64, attended apart and merged outside, as two candidates would."""
    spec = make_spec()
    rows = make_rows(spec, [3136])
    whole = run(candidate, spec, rows)
    halves = []
    for part in (slice(0, 3072), slice(3072, 3136)):
        some = make_rows(spec, [part.stop - part.start])
        some.q, some.keys, some.values = rows.q, [rows.keys[0][part]], [rows.values[0][part]]
        halves.append(run(candidate, spec, some))
    out, lse = merge_lse(*(np.stack(x) for x in zip(*halves, strict=True)))
    np.testing.assert_allclose(out, whole[0], atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], atol=1e-6)


@both
def test_t17_t19_addresses_past_32_bits(candidate):
    """The last blocks of a pool of 2**31 numbers and 4 GB; only the pages used are ever real."""
    spec = make_spec(
        num_heads=8, num_kv_heads=8, head_dim=256, kv_dtype="bfloat16", dtype="bfloat16"
    )
    blocks = 2**31 // (8 * 256 * 16) + 8
    rows = make_rows(spec, [40])
    rows.batch.block_table[rows.batch.block_table > 0] += blocks - 5
    backend, layout = candidate.open(spec), candidate.kv_layout(spec, blocks)
    pool = [torch.empty(shape, dtype=torch.bfloat16) for shape in (layout.k_shape, layout.v_shape)]
    assert pool[0].numel() > 2**31
    table = rows.batch.block_table[0]
    slots = np.array([table[i // 16] * 16 + i % 16 for i in range(40)], np.int32)
    k, v = (torch.from_numpy(x[0]).bfloat16() for x in (rows.keys, rows.values))
    backend.write(k, v, *pool, torch.from_numpy(slots))
    got_k, got_v = backend.gather(*pool, torch.from_numpy(table), 40)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    rows.keys, rows.values = [k.float().numpy()], [v.float().numpy()]
    q = torch.from_numpy(rows.q).bfloat16()
    rows.q = q.float().numpy()
    out, lse = backend.run(q, *pool, backend.plan(rows.batch))
    np.testing.assert_allclose(out.float().numpy(), oracle(spec, rows)[0], atol=1e-2)
    np.testing.assert_allclose(lse.numpy(), oracle(spec, rows)[1], atol=1e-5)


@every
def test_t20_t21_a_plan_is_of_its_own_step(candidate):
    """One backend through growing and shrinking lengths, each step against the truth."""
    spec = make_spec()
    backend = candidate.open(spec)
    for lens in ([1, 1], [900, 3], [17, 4000], [2, 1]):
        rows = make_rows(spec, lens)
        pool = fill_pool(spec, candidate.kv_layout(spec, num_blocks(rows)), backend, rows)
        out, lse = backend.run(torch.from_numpy(rows.q), *pool, backend.plan(rows.batch))
        check(spec, rows, (out.numpy(), lse.numpy()))


@every
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
@pytest.mark.parametrize("window", [1, 5, 16, 23, 128, 4096, 5000])
def test_t23_windows(candidate, mode, window):
    """Shorter than a block, its edge inside a block, as long as the row, longer; B = 2."""
    spec = make_spec(window=window, split_mode=mode, split_tokens=100)
    rows = make_rows(spec, [3, 4096])
    check(spec, rows, run(candidate, spec, rows))


@both
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 24])
def test_t24_no_head_bleeds_into_another(candidate, group):
    """Each KV head's values are its own number, so an answer tells whose keys it read."""
    spec = make_spec(num_heads=2 * group, num_kv_heads=2, head_dim=96)
    rows = make_rows(spec, [70, 600])
    for values in rows.values:
        values[:] = np.array([1.0, 2.0])[None, :, None]
    out, _ = run(candidate, spec, rows, splits=cut(spec, [70, 600], 7))
    np.testing.assert_allclose(out[:, :group], 1, atol=1e-6)
    np.testing.assert_allclose(out[:, group:], 2, atol=1e-6)


@every
@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 112, 256, 544])
def test_t25_block_sizes(candidate, block_size):
    spec = make_spec(block_size=block_size)
    support = candidate.supports(spec)
    if not support.ok:
        assert support.reason == f"block_size {block_size} isn't a multiple of 16"
        return
    rows = make_rows(spec, [1, block_size, block_size + 1, 1700])
    check(spec, rows, run(candidate, spec, rows))
    check(
        spec,
        rows,
        run(candidate, spec, rows, splits=cut(spec, [1, block_size, block_size + 1, 1700], 7)),
    )


@both
def test_t26_a_row_is_the_same_alone_in_a_batch_and_permuted(candidate):
    """Bitwise, in fixed mode. Then one row shrinks from 900 to 800 and no other changes."""
    spec = make_spec(
        num_heads=32, num_kv_heads=8, head_dim=128, split_mode="fixed", split_tokens=256
    )
    lens = [900, 1000, 120, 500]
    rows = make_rows(spec, lens)
    out, lse = run(candidate, spec, rows)

    def pick(order: list[int], lens: list[int]) -> Rows:
        some = make_rows(spec, lens)
        some.q = rows.q[order]
        some.keys = [rows.keys[i][:n] for i, n in zip(order, lens, strict=True)]
        some.values = [rows.values[i][:n] for i, n in zip(order, lens, strict=True)]
        return some

    for order in ([0], [1], [2], [3], [3, 1, 0, 2]):
        again = run(candidate, spec, pick(order, [lens[i] for i in order]))
        np.testing.assert_array_equal(again[0], out[order])
        np.testing.assert_array_equal(again[1], lse[order])
    shrunk = run(candidate, spec, pick([0, 1, 2, 3], [800, 1000, 120, 500]))
    np.testing.assert_array_equal(shrunk[0][1:], out[1:])
    assert (shrunk[0][0] != out[0]).any()


def test_t28_the_workspace_is_as_large_as_the_plan():
    spec = make_spec(
        num_heads=64, num_kv_heads=8, head_dim=128, split_mode="fixed", split_tokens=512
    )
    plan = CpuCandidate().open(spec).plan(make_rows(spec, [1300, 0, 7]).batch)
    assert plan.step.part_out.shape == (3 + 0 + 1, 64, 128)
    assert plan.step.part_m.shape == plan.step.part_l.shape == (4, 64)


@both
def test_t29_live_lengths_not_the_tables_width(candidate):
    """A table for 131,072 tokens and a row of 40: planned as 40."""
    spec = make_spec()
    table = np.full((1, 8192), -1, np.int32)
    table[0, :3] = [1, 2, 3]
    batch = AttentionBatch(np.array([0, 1], np.int32), np.array([40], np.int32), table)
    plan = candidate.open(spec).plan(batch)
    assert plan.splits.boundaries == [[(0, 40)]]
