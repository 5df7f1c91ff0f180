"""Blocks of requests: handed out, shared, left behind by a window, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache import KVCache, KVGroup, RequestBlocks
from octavo.cache.block_pool import BlockPool
from octavo.cache.prefix import block_contents, prefix_root

FULL = KVGroup((0,), None)


def new_cache(
    groups: list[KVGroup], num_blocks: list[int], block_size: int = 4, caching: bool = True
) -> KVCache:
    return KVCache(groups, num_blocks, block_size, caching)


def admitted(kv: KVCache, tokens: list[int]) -> tuple[RequestBlocks, int]:
    blocks = kv.open(None)
    num_hits = kv.find_prefix(blocks, tokens)
    assert kv.admit(blocks, len(tokens), num_hits, [])
    return blocks, num_hits * kv.block_size


def run(kv: KVCache, tokens: list[int]) -> int:
    """Compute ``tokens`` in one go and leave; returns how many were cached."""
    blocks, cached = admitted(kv, tokens)
    assert kv.extend(blocks, len(tokens))
    kv.store(blocks, tokens, len(tokens))
    kv.release(blocks)
    return cached


def live(blocks: RequestBlocks, group: int) -> list[bool]:
    table = blocks.tables[group]
    return (table.entries[: table.length] >= 0).tolist()


def num_free(kv: KVCache) -> list[int]:
    return [pool.num_free for pool in kv.pools]


def test_unknown_blocks_are_handed_out_before_known_ones_and_old_before_new() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    root = prefix_root()
    pool.store(first, block_contents(root, [1]))
    pool.store(second, block_contents(root, [2]))
    pool.release([second])
    pool.release([third, first])
    assert pool.num_free == 4
    assert pool.find(block_contents(root, [2])) == second
    assert set(pool.allocate(2)) == {third, 3}
    assert pool.allocate(1) == [second]
    assert pool.find(block_contents(root, [2])) is None
    assert pool.find(block_contents(root, [1])) == first


def test_a_found_block_is_not_handed_out_while_it_is_held() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    contents = block_contents(prefix_root(), [1])
    pool.store(block, contents)
    pool.release([block])
    pool.hold(block)
    pool.hold(block)
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    assert pool.find(contents) == block


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)]
)
def test_a_repeated_prompt_is_cached_but_for_one_token_at_least(length: int, cached: int) -> None:
    kv = new_cache([FULL], [8])
    tokens = list(range(length))
    assert [run(kv, tokens) for _ in range(3)] == [0, cached, cached]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = new_cache([FULL], [4])
    tokens = list(range(16))
    run(kv, tokens)
    run(kv, [99])  # every block is known, so one is forgotten
    assert run(kv, tokens) == 12


def test_admission_changes_nothing_where_there_is_no_room() -> None:
    kv = new_cache([FULL], [4])
    run(kv, list(range(8)))
    blocks = kv.open(None)
    assert kv.find_prefix(blocks, list(range(17))) == 2
    assert not kv.admit(blocks, 17, 2, [])
    assert not kv.admit(blocks, 16, 2, [kv.open(None)])  # one to spare
    assert num_free(kv) == [4]
    assert kv.admit(blocks, 16, 2, [])
    assert num_free(kv) == [0]


def test_cached_blocks_do_not_count_twice_as_room() -> None:
    kv = new_cache([FULL], [4])
    run(kv, list(range(9)))  # 2 known blocks
    other, _ = admitted(kv, [7] * 8)  # takes 2 of the 4
    blocks = kv.open(None)
    assert kv.find_prefix(blocks, list(range(9))) == 2
    assert not kv.admit(blocks, 9, 2, [])  # 2 to revive, 1 more
    kv.release(other)
    assert kv.admit(blocks, 9, 2, [])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = new_cache([FULL], [8], caching=False)
    assert [run(kv, list(range(9))) for _ in range(2)] == [0, 0]


@given(
    window=st.integers(1, 20),
    block_size=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_a_window_keeps_what_its_next_query_reads_and_no_block_more(
    window: int, block_size: int, chunks: list[int]
) -> None:
    group = KVGroup((0,), window)
    kv = new_cache([FULL, group], [80, 80], block_size)
    tokens = list(range(sum(chunks)))
    blocks, _ = admitted(kv, tokens)
    reserved = len(live(blocks, 1))
    assert reserved == min(-(-len(tokens) // block_size), 1 + -(-(window - 1) // block_size))
    position = 0
    for chunk in chunks:
        kv.drop_behind(blocks, position)
        assert kv.extend(blocks, position + chunk)
        kept = live(blocks, 1)
        assert kept == [(i + 1) * block_size > group.first_key(position) for i in range(len(kept))]
        assert len(kept) == max(reserved, -(-(position + chunk) // block_size))
        assert all(live(blocks, 0))
        position += chunk
    kv.release(blocks)
    assert num_free(kv) == [80, 80]


@pytest.mark.parametrize(("num_blocks", "limit"), [(2, 8), (3, None)])
def test_a_window_group_holds_any_length_once_its_window_fits(
    num_blocks: int, limit: int | None
) -> None:
    kv = new_cache([KVGroup((0,), 8)], [num_blocks])  # 8 keys may lie in 3 blocks of 4
    assert kv.max_tokens == limit
    assert new_cache([FULL, KVGroup((1,), 8)], [6, num_blocks]).max_tokens == (limit or 24)


def test_a_hit_needs_one_window_of_live_blocks() -> None:
    kv = new_cache([FULL, KVGroup((1,), 6)], [16, 16])
    tokens = list(range(24))
    blocks, _ = admitted(kv, tokens)
    for start in range(0, 24, 4):
        kv.drop_behind(blocks, start)
        assert kv.extend(blocks, start + 4)
        kv.store(blocks, tokens, start + 4)
    kv.release(blocks)

    hit, cached = admitted(kv, [*tokens, 0])
    assert cached == 24
    assert live(hit, 0) == [True] * 7
    assert live(hit, 1) == [False] * 4 + [True] * 3  # keys 19 to 24: blocks 4 to 6
    kv.release(hit)

    # Forget block 4 of the window group: 24 and 20 tokens are out, 16 are not.
    del kv.pools[1]._by_key[blocks.contents[4].key]
    hit, cached = admitted(kv, [*tokens, 0])
    assert cached == 16
    assert live(hit, 1) == [False, False, True, True, True]


def test_a_hit_suits_all_windows_at_once() -> None:
    kv = new_cache([KVGroup((0,), 4), KVGroup((1,), 4)], [16, 16])
    tokens = list(range(17))
    blocks, _ = admitted(kv, tokens)
    assert kv.extend(blocks, 17)
    kv.store(blocks, tokens, 16)
    kv.release(blocks)
    assert kv.find_prefix(blocks, tokens) == 4
    del kv.pools[1]._by_key[blocks.contents[3].key]  # the second group can go on from block 3 only,
    del kv.pools[0]._by_key[blocks.contents[2].key]  # from which the first can't
    assert kv.find_prefix(blocks, tokens) == 2


def test_a_full_attention_miss_cuts_the_windows_hit_short() -> None:
    kv = new_cache([FULL, KVGroup((1,), 6)], [8, 16])
    tokens = list(range(20))
    run(kv, tokens)
    blocks, _ = admitted(kv, [50] * 20)  # 5 of 8: takes the last 2 of the first prompt's 5
    kv.release(blocks)
    assert run(kv, [*tokens, 0]) == 12


def test_blocks_return_after_the_steps_in_flight() -> None:
    kv = new_cache([FULL, KVGroup((1,), 4)], [8, 8])
    blocks, _ = admitted(kv, list(range(16)))
    assert kv.extend(blocks, 16)
    kv.step_launched()
    kv.drop_behind(blocks, 16)
    kv.step_launched()
    kv.release(blocks)
    assert (num_free(kv), kv.blocks_are_returning) == ([4, 4], True)
    kv.step_done()
    assert (num_free(kv), kv.blocks_are_returning) == ([4, 7], True)
    kv.step_done()
    assert (num_free(kv), kv.blocks_are_returning) == ([8, 8], False)
    again, _ = admitted(kv, list(range(8)))
    kv.release(again)  # nothing in flight: at once
    assert num_free(kv) == [8, 8]


def test_cancelled_steps_keep_no_blocks() -> None:
    kv = new_cache([FULL], [8])
    blocks, _ = admitted(kv, list(range(16)))
    kv.step_launched()
    kv.step_launched()
    kv.release(blocks)
    kv.cancel_steps()
    assert num_free(kv) == [8]
    assert not kv.blocks_are_returning


def test_usage_is_that_of_the_fullest_group() -> None:
    kv = new_cache([FULL, KVGroup((1,), 4)], [8, 2])
    assert kv.usage == 0
    admitted(kv, [1, 2])
    assert kv.usage == 0.5


def test_a_pool_of_one_window_each_admits_every_request() -> None:
    kv = new_cache([KVGroup((0,), 8)], [9])  # three requests, three blocks each
    others: list[RequestBlocks] = []
    for _ in range(3):
        blocks = kv.open(None)
        assert kv.admit(blocks, 30, 0, others)
        others.append(blocks)
    assert not kv.admit(kv.open(None), 1, 0, others)


def test_a_block_that_another_computes_is_recognised() -> None:
    kv = new_cache([FULL], [16])
    tokens = list(range(12))
    first, _ = admitted(kv, tokens)
    second = kv.open(None)
    same_start = [*tokens[:8], 90, 91, 92, 93, 94]
    assert kv.find_prefix(second, same_start) == 0
    assert kv.is_being_computed(second, 0, [first])
    kv.store(first, tokens, 4)
    assert kv.find_prefix(second, same_start) == 1
    assert not kv.is_being_computed(second, 0, [first])
    assert kv.is_being_computed(second, 1, [first])
    kv.store(first, tokens, 8)
    assert kv.find_prefix(second, same_start) == 2
    assert not kv.is_being_computed(second, 2, [first])  # here they part
