"""The ``triton`` candidate on a real GPU. Run this folder by itself: tests/kernels switches Triton
to its interpreter for the whole process."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import Rows, fill_pool, make_rows, make_spec, num_blocks, oracle, run

from octavo.attention import AttentionBatch, AttentionSpec
from octavo.attention.backends.triton import TritonBackend, TritonCandidate
from octavo.kernels.rope_write.triton import rope_write
from octavo.kernels.split_attention.triton import make_scratch, split_decode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a CUDA GPU and compiled kernels",
)
CANDIDATE = TritonCandidate()
# fp32 is multiplied in fp32; half precision rounds the weights once more before they meet V.
TOLERANCE = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}


def gpu_spec(phase: str = "decode", dtype: str = "bfloat16", **changes) -> AttentionSpec:
    return make_spec(phase, device="cuda", dtype=dtype, kv_dtype=dtype, **changes)


def rounded(spec: AttentionSpec, rows: Rows) -> Rows:
    def cast(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(getattr(torch, spec.dtype)).float().numpy()

    keys, values = ([cast(x) for x in part] for part in (rows.keys, rows.values))
    return replace(rows, q=cast(rows.q), keys=keys, values=values)


def assert_right(spec: AttentionSpec, seq_lens, query_lens=None, sinks=None, **how) -> None:
    assert CANDIDATE.supports(spec).ok
    rows = rounded(spec, make_rows(spec, seq_lens, query_lens, **how))
    out, lse = run(CANDIDATE, spec, rows, sinks=sinks)
    want, want_lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[spec.dtype])
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


SHAPES = [  # query heads, KV heads, head_dim, v_head_dim, block_size
    (16, 8, 128, 128, 16),
    (32, 8, 128, 128, 16),
    (64, 8, 128, 128, 16),
    (9, 3, 64, 64, 16),
    (10, 2, 80, 80, 48),
    (7, 1, 96, 96, 1),
    (24, 2, 128, 128, 544),
    (24, 1, 192, 128, 16),
    (8, 4, 256, 256, 16),
    (4, 4, 64, 64, 7),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_shapes(shape, mode, dtype):
    heads, kv_heads, head_dim, v_head_dim, block_size = shape
    spec = gpu_spec(
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_size=block_size,
        split_mode=mode,
        split_tokens=256,
    )
    assert_right(spec, [1, 0, 700, 63, 64, 65, 1500])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
@pytest.mark.parametrize("window", [None, 1, 5, 100, 1024])
def test_decode_features(window, mode, dtype):
    spec = gpu_spec(dtype=dtype, window=window, soft_cap=20.0, has_sinks=True, split_mode=mode)
    sinks = np.linspace(-2, 4, spec.num_heads, dtype=np.float32)
    assert_right(spec, [3, 0, 5000, 16, 17, 1025], sinks=sinks, spread=3)


@pytest.mark.parametrize("lines", [512, 1536])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [(16, 8, 128), (32, 8, 128), (64, 8, 128), (9, 3, 64), (14, 2, 64), (8, 4, 256), (16, 1, 128)],
    ids=str,
)
def test_full_batches(shape, dtype, lines):
    """Enough lines for blocks of one warp; short ones, and one that many blocks read."""
    heads, kv_heads, head_dim = shape
    spec = gpu_spec(dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    lens = [0, 1, 15, 16, 17, 31, 32, 33, 200, 700, 9000]
    lens += [50] * (-(-lines // kv_heads) - len(lens))
    assert_right(spec, lens)


@pytest.mark.parametrize("num_rows", [64, 200])
def test_full_batches_wait_for_the_newest_keys(num_rows):
    """Behind the kernel that writes them, while which older keys are already read."""
    spec = gpu_spec(num_heads=16, num_kv_heads=8, head_dim=128)
    lens = torch.randint(1, 200, (num_rows,), dtype=torch.int32, device="cuda")
    newest = lens - 1
    table = torch.arange(13 * num_rows, dtype=torch.int32, device="cuda").view(num_rows, 13)
    slots = table.gather(1, (newest // 16).long()[:, None])[:, 0] * 16 + newest % 16
    pool = torch.randn(2, 13 * num_rows, 16, 8, 128, device="cuda").bfloat16()
    qkv = torch.randn(num_rows, 32 * 128, device="cuda").bfloat16()
    cos, sin = torch.randn(2, 200, 64, device="cuda")
    scratch = make_scratch(spec, num_rows, 200, 264)
    answers = []
    for waits in (False, True):
        pool.flatten(1, 2)[:, slots.long()] = torch.nan
        torch.cuda.synchronize()
        q = rope_write(qkv, newest, cos, sin, *pool, slots, num_heads=16)
        if waits:
            torch.cuda.synchronize()
        answers.append(split_decode(spec, q, *pool, table, lens, num_slots=264, scratch=scratch)[0])
    assert torch.equal(*answers)


@pytest.mark.parametrize("window", [None, 1, 5, 100, 1024])
def test_full_batches_with_every_feature(window):
    spec = gpu_spec(
        window=window, soft_cap=20.0, has_sinks=True, num_kv_heads=8, num_heads=16, block_size=48
    )
    sinks = np.linspace(-2, 4, spec.num_heads, dtype=np.float32)
    assert_right(spec, [3, 0, 5000, 16, 17, 1025] + [60] * 60, sinks=sinks, spread=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_shapes(shape, dtype):
    heads, kv_heads, head_dim, v_head_dim, block_size = shape
    spec = gpu_spec(
        "prefill",
        dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_size=block_size,
    )
    assert_right(spec, [1, 130, 300, 64], [1, 130, 40, 1])


@pytest.mark.parametrize("window", [None, 1, 5, 100, 1024])
def test_prefill_features(window):
    spec = gpu_spec("prefill", window=window, soft_cap=20.0, has_sinks=True)
    sinks = np.linspace(-2, 4, spec.num_heads, dtype=np.float32)
    assert_right(spec, [3, 700, 400], [3, 300, 129], sinks=sinks)


@pytest.mark.parametrize("place", [0, 255, 256, 2047, 2048, 4095, 4999])
def test_a_needle_anywhere_is_found(place):
    """One key carries nearly all weight: what a cosine cannot see, this does."""
    spec = gpu_spec(dtype="float32", split_mode="fixed", split_tokens=256)
    rows = make_rows(spec, [5000])
    group = spec.num_heads // spec.num_kv_heads
    for head in range(spec.num_kv_heads):
        rows.keys[0][place, head] = 4 * rows.q[0, head * group]
    for mode in ("off", "auto", "fixed"):
        out, _ = run(CANDIDATE, replace(spec, split_mode=mode), rows)
        want, _ = oracle(spec, rows)
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("mode", ["off", "auto", "fixed"])
def test_one_capture_serves_every_length(mode):
    """sglang#26019, vllm#51119: plans that went stale inside a captured graph. The scratch is
    poisoned before every replay (flashinfer#5176)."""
    spec = gpu_spec(split_mode=mode, graph=True)
    longest = [4096] * 4
    rows = rounded(spec, make_rows(spec, longest))
    backend = CANDIDATE.open(spec)
    pool = fill_pool(spec, CANDIDATE.kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(rows.q).cuda().bfloat16()

    def batch(lens: list[int]) -> AttentionBatch:
        return replace(rows.batch, seq_lens=np.array(lens, np.int32))

    plan = backend.plan(batch([1, 1, 1, 1]))
    backend.run(q, *pool, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = backend.run(q, *pool, plan)
    for lens in ([1, 1, 1, 1], longest, [0, 5, 0, 17], [4096, 1, 100, 2049], [512, 0, 513, 511]):
        assert backend.plan(batch(lens)) is plan
        for part in (plan.scratch.out, plan.scratch.m, plan.scratch.l, out, lse):
            part.fill_(torch.nan)
        graph.replay()
        short = replace(
            rows,
            keys=[k[:n] for k, n in zip(rows.keys, lens, strict=True)],
            values=[v[:n] for v, n in zip(rows.values, lens, strict=True)],
        )
        want, want_lse = oracle(spec, short)
        np.testing.assert_allclose(out.float().cpu(), want, atol=TOLERANCE["bfloat16"])
        np.testing.assert_allclose(lse.cpu(), want_lse, atol=2e-5)


class OfSlots(TritonCandidate):
    """As if the device held so many blocks at once."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def open(self, spec: AttentionSpec) -> TritonBackend:
        return TritonBackend(spec, self.num_slots)


@pytest.mark.parametrize("window", [None, 3000])
def test_in_fixed_mode_a_row_is_bitwise_the_same_in_any_batch_and_for_any_slots(window):
    """FA#1570. Batches of 1, 4 and 20 are compiled apart, and slots decide which of two kernels
    adds up a group of leaves: the bits must not tell."""
    spec = gpu_spec(
        split_mode="fixed",
        split_tokens=128,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        window=window,
    )
    lens = [900, 1000, 120, 5000] + [77] * 16
    rows = make_rows(spec, lens)
    all_out, all_lse = run(CANDIDATE, spec, rows)
    for some, slots in itertools.product(([0], [3], [3, 2, 1, 0]), (1, 40, 100, 264, 1000)):
        part = Rows(
            AttentionBatch(
                np.arange(len(some) + 1, dtype=np.int32),
                rows.batch.seq_lens[some],
                rows.batch.block_table[some],
            ),
            rows.q[some],
            [rows.keys[i] for i in some],
            [rows.values[i] for i in some],
        )
        out, lse = run(OfSlots(slots), spec, part)
        assert (out == all_out[some]).all()
        assert (lse == all_lse[some]).all()


@pytest.mark.parametrize("lens", [[3000, 1, 0, 500, 129], [3000, 1, 0, 500] + [129] * 60], ids=len)
@pytest.mark.parametrize("slots", [1, 2, 7, 16, 33, 76, 132, 264, 396, 1000])
def test_any_number_of_slots_agrees_and_repeats_bitwise(slots, lens):
    """A moving result would be a race between two kernels, or the blocks of one."""
    spec = gpu_spec(num_heads=32, num_kv_heads=8, head_dim=128)
    rows = rounded(spec, make_rows(spec, lens))
    backend = TritonBackend(spec, slots)
    pool = fill_pool(spec, CANDIDATE.kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(rows.q).cuda().bfloat16()
    plan = backend.plan(rows.batch)
    first, first_lse = backend.run(q, *pool, plan)
    for _ in range(50):
        out, lse = backend.run(q, *pool, plan)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)
    want, want_lse = oracle(spec, rows)
    np.testing.assert_allclose(first.float().cpu(), want, atol=TOLERANCE["bfloat16"])
    np.testing.assert_allclose(first_lse.cpu(), want_lse, atol=2e-5)


def test_block_ids_beyond_32_bits_of_elements():
    """vllm#47671, on the last blocks of a cache of 2.3 thousand million elements."""
    spec = gpu_spec(num_heads=32, num_kv_heads=8, head_dim=128)
    blocks = 140_000
    shape = (blocks, 16, 8, 128)
    k, v = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.arange(blocks - 20, blocks, dtype=torch.int32, device="cuda")[None]
    for cache in (k, v):
        cache[-20:].normal_()
    q = torch.randn(1, 32, 128, dtype=torch.bfloat16, device="cuda")
    lens = torch.tensor([300], dtype=torch.int32, device="cuda")
    out, _ = split_decode(
        spec, q, k, v, table, lens, num_slots=64, scratch=make_scratch(spec, 1, 300, 64)
    )
    keys, values = (x[-20:].flatten(0, 1)[:300].double().repeat_interleave(4, 1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", q[0].double(), keys) * spec.scale
    want = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    torch.testing.assert_close(out[0].double(), want, atol=TOLERANCE["bfloat16"], rtol=0)
