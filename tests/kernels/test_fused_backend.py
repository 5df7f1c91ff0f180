"""The ``fused`` candidate in the interpreter: the reported faults (with their numbers, as in
test_triton_faults.py), questions of ``octavo verify``, and what it refuses.

Keys and values are float32 here, which the interpreter takes: a wrong key shows at 5e-6.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle, run

from octavo.attention import AttentionSpec, Support
from octavo.attention.backends import fused
from octavo.attention.backends.fused import FusedBackend, FusedCandidate
from octavo.kernels.rope_attention.limits import refusal
from octavo.kernels.rope_attention.triton import choose_cut
from octavo.verify.checks import CHECKS, Check, Subject
from octavo.verify.checks import ask as verify_ask
from octavo.verify.faults import Fault, FaultyCandidate
from octavo.verify.problems import exact, hide_needles, make_pool, make_problem, solve

torch.set_num_threads(1)


class Interpreted(FusedCandidate):
    """On a CPU there is no GPU to count the multiprocessors of."""

    def __init__(self, sms: int = 2) -> None:
        self.sms = sms

    def supports(self, spec: AttentionSpec) -> Support:
        reason = refusal(replace(spec, dtype="bfloat16", kv_dtype="bfloat16"))
        return Support(not reason, reason)

    def open(self, spec: AttentionSpec) -> FusedBackend:
        return FusedBackend(spec, self.sms)


def small(**changes) -> AttentionSpec:
    return make_spec(**{"num_heads": 2, "num_kv_heads": 1, "head_dim": 16} | changes)


def check(spec, lens, sms=2, **how):
    rows = make_rows(spec, lens, **how)
    got, want = run(Interpreted(sms), spec, rows), oracle(spec, rows)
    for found, true in zip(got, want, strict=True):
        np.testing.assert_allclose(found, true, atol=5e-6)
    return got


def test_t3_fewer_keys_than_splits():
    check(small(split_mode="fixed", split_tokens=2), [1, 3, 0])


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_t4_t11_short_lengths_with_every_plan(mode):
    check(small(split_mode=mode, split_tokens=16), [1, 16, 17])


@pytest.mark.parametrize("sms", [1, 132])
def test_t5_any_number_of_slots(sms):
    check(small(), [300], sms)


@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_t6_t7_pad_rows_are_zero_and_touch_nobody(mode):
    out, lse = check(small(split_mode=mode, split_tokens=32), [50, 0])
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()


def test_t8_t20_t21_a_used_workspace_and_a_plan_of_another_step():
    """Under graphs the buffers stay: what an earlier, longer step left there is never read."""
    spec = small(graph=True)
    rows = make_rows(spec, [70, 200])
    backend = FusedBackend(spec, 8)
    pool = fill_pool(spec, FusedCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(rows.q)
    plan = backend.plan(rows.batch)
    assert plan.cut.splits > 1
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
    check(small(), [257], spread=0.0)


@pytest.mark.parametrize("share", [75, 22])
def test_t13_t16_t27_numbers_of_splits_agree(share):
    check(small(split_mode="fixed", split_tokens=share), [150])


def test_t17_t19_addresses_past_32_bits():
    """A pool of which only the last blocks are touched: its pages are never made real."""
    spec = small()
    rows = make_rows(spec, [40])
    last = 2**31 // (spec.block_size * spec.num_kv_heads * spec.head_dim) + 4
    rows.batch.block_table[rows.batch.block_table >= 0] += last - 8
    backend = FusedBackend(spec, 8)
    layout = FusedCandidate().kv_layout(spec, last)
    pool = [torch.empty(shape, dtype=torch.float32) for shape in (layout.k_shape, layout.v_shape)]
    position = np.arange(40)
    block = rows.batch.block_table[0, position // spec.block_size].astype(np.int64)
    slots = torch.from_numpy(block * spec.block_size + position % spec.block_size)
    backend.write(*(torch.from_numpy(x[0]) for x in (rows.keys, rows.values)), *pool, slots)
    out, _ = backend.run(torch.from_numpy(rows.q), *pool, backend.plan(rows.batch))
    np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=5e-6)


@pytest.mark.parametrize(("mode", "window"), [("auto", 1), ("auto", 100), ("fixed", 100)])
def test_t23_windows(mode, window):
    check(small(window=window, split_mode=mode, split_tokens=48), [3, 170])


@pytest.mark.parametrize("group", [1, 3, 14])
def test_t24_no_head_bleeds_into_another(group):
    check(small(num_heads=2 * group, num_kv_heads=2), [33])


@pytest.mark.parametrize("block_size", [1, 7, 544])
def test_t25_block_sizes(block_size):
    check(small(block_size=block_size), [60])


def test_t26_a_row_is_the_same_alone_in_a_batch_and_permuted():
    spec = small(split_mode="fixed", split_tokens=32)
    rows = make_rows(spec, [60, 12])
    together, _ = run(Interpreted(), spec, rows)
    for order in ([1], [1, 0]):
        batch = replace(
            rows.batch,
            query_start_loc=np.arange(len(order) + 1, dtype=np.int32),
            seq_lens=rows.batch.seq_lens[order],
            block_table=rows.batch.block_table[order],
        )
        keys, values = ([part[i] for i in order] for part in (rows.keys, rows.values))
        some = replace(rows, batch=batch, q=rows.q[order], keys=keys, values=values)
        out, _ = run(Interpreted(), spec, some)
        assert np.array_equal(out, together[order])


def test_more_rows_than_a_launch_takes():
    check(small(), list(range(1, 18)))


def test_a_needle_beside_every_cut_of_the_kernel():
    """Shares are equal, so cuts lie elsewhere than those of ``fixed`` splits do."""
    spec, length, candidate = small(), 257, Interpreted(132)
    cut = choose_cut(spec, 6, length)
    tiles = -(-length // cut.tokens)
    cuts = [cut.tokens * (i * tiles // cut.splits) for i in range(1, cut.splits)]
    places = [0, length - 1, *(key - side for key in cuts for side in (0, 1))]
    assert len(places) == 6
    problem = make_problem(spec, [length] * len(places))
    hide_needles(problem, places)
    backend = candidate.open(spec)
    out, _ = solve(backend, problem, make_pool(candidate, backend, problem))
    assert torch.allclose(out.double(), exact(problem)[0], atol=5e-6)


# ---- octavo verify. On a GPU it asks all that it has; here what costs little.


def ask(candidate, *questions: str) -> list[bool | None]:
    subject = Subject(candidate, small(), quick=True)
    return [check_of(question, subject).passed for question in questions]


def check_of(question: str, subject: Subject) -> Check:
    return verify_ask(question, partial(CHECKS[question], subject))


def test_what_is_right_passes():
    questions = "write and gather", "sliding window", "soft cap", "sinks"
    assert ask(Interpreted(1), *questions) == [True, True, True, None]


@pytest.mark.parametrize("fault", [fault for fault in get_args(Fault) if fault != "stale-plan"])
def test_a_fault_is_found(fault):
    """A stale plan is found by many steps, which take long here."""
    question = "sliding window" if fault == "off-by-one-window" else "soft cap"
    assert ask(FaultyCandidate(Interpreted(1), fault), question) == [False]


@pytest.mark.parametrize(
    ("changes", "hardware", "reason"),
    [
        ({"device": "cpu"}, "sm_90", "runs on CUDA GPUs, not on cpu"),
        ({}, "sm_89", "needs an NVIDIA GPU of compute capability 9.0 or more"),
        ({}, "unknown GPU", "needs an NVIDIA GPU of compute capability 9.0 or more"),
        ({"has_sinks": True}, "sm_100", "has no attention sinks"),
    ],
)
def test_a_refusal_says_why(changes, hardware, reason, monkeypatch):
    monkeypatch.setattr(fused, "hardware_of", lambda device: hardware)
    half = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    support = FusedCandidate().supports(make_spec(**half | changes))
    assert not support.ok
    assert support.reason == reason
    if hardware == "sm_100":
        assert FusedCandidate().supports(make_spec(**half, split_mode="off")).ok
