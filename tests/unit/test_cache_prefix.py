"""Names of blocks: different contents never meet under one name (case O23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cache import KVCache, KVGroup
from octavo.cache import kv_cache as kv_cache_module
from octavo.cache.prefix import BlockContents, block_contents, prefix_root

BLOCK = 16
A = list(range(1, 33))
VARIANTS = {
    "other high bits": [i + 256 for i in A],
    "two ids swapped": [*A[:15], A[16], A[15], *A[17:]],
    "second block first": A[16:] + A[:16],
    "reversed": A[::-1],
}


def cached_tokens(kv: KVCache, prompt: list[int], salt: str | None = None) -> int:
    """Run a prompt through the cache: what was found, then everything is stored and released."""
    blocks = kv.open(salt)
    num_hits = kv.find_prefix(blocks, prompt)
    assert kv.admit(blocks, len(prompt), num_hits, [])
    kv.store(blocks, prompt, len(prompt))
    kv.release(blocks)
    return num_hits * BLOCK


def new_cache() -> KVCache:
    return KVCache([KVGroup((0,), None)], [64], BLOCK, enable_prefix_caching=True)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("weak_hash", [False, True])
def test_different_prompts_share_nothing(
    variant: list[int], weak_hash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weak_hash:  # every block has the same name: only the exact comparison is left

        def collide(parent: bytes, token_ids: list[int]) -> BlockContents:
            return BlockContents(b"same", parent, block_contents(parent, token_ids).tokens)

        monkeypatch.setattr(kv_cache_module, "block_contents", collide)
    kv = new_cache()
    assert cached_tokens(kv, A) == 0
    assert cached_tokens(kv, variant) == 0
    if not weak_hash:
        assert cached_tokens(kv, A) == cached_tokens(kv, variant) == BLOCK  # all but the last token


def test_equal_prompts_share_only_under_equal_salt() -> None:
    kv = new_cache()
    assert [cached_tokens(kv, A, salt) for salt in (None, "", "a", "b", None, "a")] == [
        *(0, 0, 0, 0),
        *(BLOCK, BLOCK),
    ]


def test_roots_keep_their_parts_apart() -> None:
    parts = [(), (None,), ("",), ("a",), (None, None), ("a", None), (None, "a"), ("ab", "c")]
    parts += [("a", "bc"), ("a", "b", "c"), ("\ud800",), ("\0",), ("\1",)]
    assert len({prefix_root(*extra) for extra in parts}) == len(parts)


def test_names_do_not_depend_on_the_process() -> None:
    first = block_contents(prefix_root("salt", None), A[:16])
    second = block_contents(first.key, A[16:])
    assert second.key.hex() == ("cb9c2c656d9bcdf9a20c1e88c4b6041aa06f3ea4675c2a02261ee647d292b3da")
    assert second.parent == first.key


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
)
def test_a_name_covers_every_bit_of_every_id(one: list[int], other: list[int]) -> None:
    root = prefix_root()
    same = block_contents(root, one) == block_contents(root, other)
    assert same == (one == other)
    flipped = [*one[:3], one[3] ^ (1 << 30)]
    assert block_contents(root, one).key != block_contents(root, flipped).key
