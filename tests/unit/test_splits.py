"""The planner: exact covers, fixed cuts, whole waves, balance, and reasons that are true."""

import heapq
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import SplitCost, plan_splits
from octavo.errors import ConfigError

CORES = [1, 7, 76, 132, 264, 396]


def plan(seq_lens, cores=132, heads=8, block_size=16, **options):
    return plan_splits(
        seq_lens, num_kv_heads=heads, block_size=block_size, num_cores=cores, **options
    )


def slot_loads(split, heads, cores):
    """Tokens that each core reads if it takes the longest item left whenever it is free."""
    items = sorted((b - a for row in split.boundaries for a, b in row), reverse=True)
    loads = [0] * cores
    for item in items:
        for _ in range(heads):
            heapq.heappush(loads, heapq.heappop(loads) + item)
    return loads


@given(
    lens=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    heads=st.integers(1, 12),
    block_size=st.sampled_from([1, 7, 16, 48, 256, 544]),
    cores=st.sampled_from(CORES),
    mode=st.sampled_from(["off", "auto", "fixed"]),
    split_tokens=st.sampled_from([1, 33, 256, 512, 4096]),
    window=st.one_of(st.none(), st.integers(1, 6000)),
)
@settings(deadline=None, max_examples=300)
def test_segments_cover_the_keys_exactly(
    lens, heads, block_size, cores, mode, split_tokens, window
):
    split = plan_splits(
        lens,
        num_kv_heads=heads,
        block_size=block_size,
        num_cores=cores,
        mode=mode,
        split_tokens=split_tokens,
        window=window,
    )
    assert len(split.boundaries) == len(split.reasons) == len(lens)
    for n, row, reason in zip(lens, split.boundaries, split.reasons, strict=True):
        first = 0 if window is None else max(0, n - window)
        assert all(a < b for a, b in row)
        assert [x for a, b in row for x in range(a, b)] == list(range(first, n))
        assert reason.startswith(f"{len(row)}: ")
        if mode == "off":
            assert len(row) == (n > 0)
        if mode == "fixed":
            assert all(a % split_tokens == 0 for a, _ in row[1:])
            assert all(b - a <= split_tokens for a, b in row)
        if mode == "auto":
            assert n - first >= 2 * SplitCost().min_tokens or len(row) <= 1
            if block_size <= SplitCost().min_tokens:
                assert all(a % block_size == 0 for a, _ in row[1:])


@given(
    row=st.integers(1, 20000),
    others=st.lists(st.integers(0, 100000), max_size=6),
    cores=st.sampled_from(CORES),
    heads=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 30000)),
)
@settings(deadline=None, max_examples=100)
def test_t26_fixed_depends_on_nothing_but_the_row(row, others, cores, heads, window):
    alone = plan([row], 1, 1, 16, mode="fixed", window=window)
    together = plan([*others, row], cores, heads, 48, mode="fixed", window=window)
    assert together.boundaries[-1] == alone.boundaries[0]
    assert together.reasons[-1] == alone.reasons[0]


def test_fixed_cuts_at_absolute_multiples_behind_a_window_too():
    split = plan([1300, 100], mode="fixed", split_tokens=512, window=1000)
    assert split.boundaries == [[(300, 512), (512, 1024), (1024, 1300)], [(0, 100)]]


@pytest.mark.parametrize("cores", CORES)
def test_short_sequences_are_never_split(cores):
    split = plan([0, 1, 15, 64, 127], cores)
    assert [len(row) for row in split.boundaries] == [0, 1, 1, 1, 1]
    assert split.reasons[0] == "0: no tokens"
    if cores > 1:
        assert split.reasons[-1] == "1: 127 tokens are too few to split"


def test_reasons_are_the_designs():
    assert plan([32768]).reasons == ["16: 32,768 tokens, 124 idle cores"]
    assert set(plan([4096] * 64).reasons) == {"1: 8 heads x 64 sequences already fill 132 cores"}
    assert plan([8192], mode="fixed").reasons == ["32: 8,192 tokens in fixed segments of 256"]
    assert plan([8192], mode="off").reasons == ["1: splitting is off"]
    assert plan([8192], 1, 1).reasons == ["1: 1 head x 1 sequence already fill 1 core"]


@pytest.mark.parametrize("cores", [76, 132, 264, 396])
def test_one_long_sequence_fills_whole_waves(cores):
    """t29: a split count that could never exceed one; and no straggling part wave."""
    split = plan([131072], cores)
    items = 8 * len(split.boundaries[0])
    waves = -(-items // cores)
    assert items > 8
    assert items / (waves * cores) > 0.9
    assert max(slot_loads(split, 8, cores)) < 1.1 * 8 * 131072 / cores


@pytest.mark.parametrize("cores", CORES)
def test_skewed_batch_is_balanced_by_tokens(cores):
    split = plan([131072] + [4096] * 31, cores)
    mean = 8 * (131072 + 31 * 4096) / cores
    assert max(slot_loads(split, 8, cores)) < 1.15 * mean
    if cores >= 76:
        assert len(split.boundaries[0]) > 1


@given(
    lens=st.lists(st.integers(1, 100000), min_size=1, max_size=40),
    heads=st.sampled_from([1, 3, 8]),
    cores=st.sampled_from(CORES),
)
@settings(deadline=None, max_examples=100)
def test_auto_never_ends_later_than_unsplit(lens, heads, cores):
    """Counting what each segment of a split row costs over its tokens."""
    auto, off = plan(lens, cores, heads), plan(lens, cores, heads, mode="off")
    cost = SplitCost().merge_tokens if (auto.num_splits > 1).any() else 0
    longest = max(b - a for row in auto.boundaries for a, b in row)
    slack = cost * (1 + heads * len(auto.starts) / cores)
    assert (
        max(slot_loads(auto, heads, cores))
        <= max(slot_loads(off, heads, cores)) + slack + longest / 2
    )


def test_t5_odd_numbers_of_cores():
    for cores in (1, 7, 76, 132):
        split = plan([1, 2, 300, 4097], cores)
        assert [sum(b - a for a, b in row) for row in split.boundaries] == [1, 2, 300, 4097]


def test_t23_a_window_is_planned_by_its_keys_not_the_history():
    split = plan([220_000], window=128, block_size=128)
    assert split.boundaries == [[(219_872, 220_000)]] or split.boundaries == [
        [(219_872, 219_904), (219_904, 220_000)]
    ]
    assert plan([3, 4096], window=128).boundaries[0] == [(0, 3)]


def test_t25_blocks_longer_than_a_segment_are_cut_inside():
    split = plan([4096], block_size=1568)
    assert len(split.boundaries[0]) > 8
    assert all(a % 32 == 0 for a, _ in split.boundaries[0])  # 32 divides 1568 and the minimum


def test_t18_t28_counts_are_of_the_live_segments():
    """42 rows of 200K in fixed segments of 256: the scratch of T18, by its true size."""
    split = plan([202_752] * 42, mode="fixed", split_tokens=256)
    assert split.row_start[-1] == 42 * 792
    assert split.num_splits.tolist() == [792] * 42


def test_t29_long_contexts_are_split_in_a_batch_too():
    """No cliff at some number of sequences: what counts is tokens."""
    for sequences in (1, 2, 4, 8, 16):
        split = plan([131072] * sequences)
        assert max(slot_loads(split, 8, 132)) < 1.15 * 8 * 131072 * sequences / 132


def test_numbers_are_checked():
    for options in (
        {"cores": 0},
        {"heads": 0},
        {"block_size": 0},
        {"mode": "fixed", "split_tokens": 0},
        {"window": 0},
    ):
        with pytest.raises(ConfigError, match="at least 1"):
            plan([10], **options)
    with pytest.raises(ConfigError, match="off, auto and fixed"):
        plan([10], mode="always")


def test_costs_are_the_callers():
    assert len(plan([1024], cost=SplitCost(min_tokens=512, merge_tokens=0)).boundaries[0]) == 2
    assert len(plan([1024], cost=SplitCost(min_tokens=64, merge_tokens=2000)).boundaries[0]) == 1


@pytest.mark.alone
def test_planning_is_cheap():
    lens = np.random.default_rng(0).integers(1, 8192, 256)
    plan(lens)
    best = min(timed(lambda: plan(lens)) for _ in range(50))
    assert best < 1e-3  # 0.2 ms on a quiet core


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
