"""Every request's blocks in every KV group, and the prefixes that requests share."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.cache.block_pool import BlockPool
from octavo.cache.groups import KVGroup
from octavo.cache.prefix import BlockContents, block_contents, prefix_root


class BlockTable:
    """One request's blocks in one group: ``entries[i]`` holds positions ``i * block_size`` on.

    The first ``length`` entries are in use; those before ``first_live`` were given back and are -1.
    """

    __slots__ = ("entries", "first_live", "length")

    def __init__(self) -> None:
        self.entries: NDArray[np.int32] = np.full(8, -1, np.int32)
        self.length = 0
        self.first_live = 0

    @property
    def num_live(self) -> int:
        return self.length - self.first_live

    def extend(self, blocks: Sequence[int]) -> None:
        end = self.length + len(blocks)
        if end > len(self.entries):
            grown = np.full(max(end, 2 * len(self.entries)), -1, np.int32)
            grown[: self.length] = self.entries[: self.length]
            self.entries = grown
        self.entries[self.length : end] = blocks
        self.length = end

    def drop_before(self, index: int) -> list[int]:
        """Forget the live blocks before entry ``index`` and return them, oldest first."""
        if index <= self.first_live:
            return []
        dropped: list[int] = self.entries[self.first_live : index].tolist()
        self.entries[self.first_live : index] = -1
        self.first_live = index
        return dropped


class RequestBlocks:
    """What one request holds (nothing while it waits), and the names of its full blocks, which
    outlive a preemption."""

    __slots__ = ("contents", "num_slots", "num_stored", "root", "tables")

    def __init__(self, num_groups: int, root: bytes) -> None:
        self.root = root
        self.contents: list[BlockContents] = []
        self.tables = [BlockTable() for _ in range(num_groups)]
        self.num_slots = 0  # tokens that have a place in every group
        self.num_stored = 0  # leading blocks whose contents the pools know


class KVCache:
    """Hands out blocks, shares known prefixes, and takes blocks back when no step uses them.

    Steps run on the device in the order of :meth:`step_launched`, and end in the order of
    :meth:`step_done`. A block that is given back while steps are in flight returns to its pool when
    the last of them is done: until then it may still be read or written.

    A request that is admitted gets the blocks of all its known tokens in the full-attention groups,
    so that a prompt once begun lacks none there, and of one window in the others, which are then
    extended chunk by chunk and give back what the window has left behind.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [BlockPool(count) for count in num_blocks]
        # The most blocks that a decoding request holds at once: those that a window straddles.
        self._most_blocks = [
            sys.maxsize if group.window is None else 1 + self._num_blocks(group.window - 1)
            for group in self.groups
        ]
        self._windowed = [i for i, group in enumerate(self.groups) if group.window is not None]
        self._launched = 0
        self._done = 0
        self._returning: deque[tuple[int, BlockPool, list[int]]] = deque()  # with the step awaited
        self.num_returns = 0  # counts the times that blocks came back

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence that the pools can hold; None where windows are the only limit."""
        sizes = [
            pool.num_blocks * self.block_size
            for pool, most in zip(self.pools, self._most_blocks, strict=True)
            if pool.num_blocks < most
        ]
        return min(sizes, default=None)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1, in the fullest group."""
        return max(1 - pool.num_free / pool.num_blocks for pool in self.pools)

    @property
    def blocks_are_returning(self) -> bool:
        """Whether blocks will come back once the steps in flight are done."""
        return bool(self._returning)

    def open(self, cache_salt: str | None) -> RequestBlocks:
        """The empty holdings of a new request; only requests of equal salt share a prefix."""
        return RequestBlocks(len(self.groups), prefix_root(cache_salt))

    def find_prefix(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> int:
        """The most leading blocks of these tokens that are cached in every group, as far as the
        next query reads them. Never all tokens: one at least is left to compute."""
        if not self.enable_prefix_caching:
            return 0
        num_hits = (len(token_ids) - 1) // self.block_size
        self._name_blocks(blocks, token_ids, num_hits)
        shorter = True
        while shorter:  # until all groups agree: one group's miss may break another's window
            before = num_hits
            for group, pool in zip(self.groups, self.pools, strict=True):
                num_hits = self._find_prefix_in(group, pool, blocks.contents, num_hits)
            shorter = num_hits < before
        return num_hits

    def is_being_computed(
        self, blocks: RequestBlocks, index: int, others: Iterable[RequestBlocks]
    ) -> bool:
        """Whether one of ``others`` is about to store the same block ``index`` as this request,
        whose blocks :meth:`find_prefix` has named."""
        return index < len(blocks.contents) and any(
            other.num_stored <= index < len(other.contents)
            and other.contents[index] == blocks.contents[index]
            for other in others
        )

    def admit(
        self,
        blocks: RequestBlocks,
        num_tokens: int,
        num_hits: int,
        others: Sequence[RequestBlocks],
    ) -> bool:
        """Give a request of ``num_tokens`` its first blocks, or change nothing and return False.

        The first ``num_hits`` are shared, as :meth:`find_prefix` found them. A spare block is left
        for each of the ``others`` that may need one more, so that letting this request in doesn't
        push another out at its next block boundary.
        """
        shared: list[list[int]] = []
        wanted: list[int] = []
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = group.first_key(num_hits * self.block_size) // self.block_size
            hits = [pool.find(contents) for contents in blocks.contents[first:num_hits]]
            found = [block for block in hits if block is not None]
            end = min(self._num_blocks(num_tokens), first + self._most_blocks[index])
            spare = sum(other.tables[index].num_live < self._most_blocks[index] for other in others)
            revived = sum(pool.ref_counts[block] == 0 for block in found)
            if end - num_hits + spare > pool.num_free - revived:
                return False
            shared.append(found)
            wanted.append(end - num_hits)
        for pool, table, found, count in zip(
            self.pools, blocks.tables, shared, wanted, strict=True
        ):
            for block in found:
                pool.hold(block)
            table.first_live = num_hits - len(found)
            table.extend([-1] * table.first_live + found + pool.allocate(count))
        blocks.num_stored = num_hits
        blocks.num_slots = self._covered(blocks)
        return True

    def reach(self, blocks: RequestBlocks) -> int:
        """How many tokens the request could have places for with the blocks that are free now."""
        return self.block_size * min(
            table.length + pool.num_free
            for table, pool in zip(blocks.tables, self.pools, strict=True)
        )

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Make places for ``num_tokens`` in every group, or change nothing and return False."""
        if num_tokens <= blocks.num_slots:
            return True
        wanted = self._num_blocks(num_tokens)
        pairs = list(zip(blocks.tables, self.pools, strict=True))
        if any(wanted - table.length > pool.num_free for table, pool in pairs):
            return False
        for table, pool in pairs:
            table.extend(pool.allocate(wanted - table.length))
        blocks.num_slots = self._covered(blocks)
        return True

    def drop_behind(self, blocks: RequestBlocks, position: int) -> None:
        """Give back the blocks that no query at ``position`` or later reads."""
        for index in self._windowed:
            first = self.groups[index].first_key(position) // self.block_size
            table = blocks.tables[index]
            if first > table.first_live:
                self._give_back(self.pools[index], table.drop_before(first))

    def store(self, blocks: RequestBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Make the full blocks among the first ``num_computed`` tokens findable: their ids are
        known and their KV is written."""
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= blocks.num_stored:
            return
        self._name_blocks(blocks, token_ids, num_full)
        for table, pool in zip(blocks.tables, self.pools, strict=True):
            for index in range(max(blocks.num_stored, table.first_live), num_full):
                pool.store(int(table.entries[index]), blocks.contents[index])
        blocks.num_stored = num_full

    def release(self, blocks: RequestBlocks) -> None:
        """Give everything back, last block first: the start of a prefix is evicted last."""
        for index, pool in enumerate(self.pools):
            table = blocks.tables[index]
            self._give_back(pool, table.drop_before(table.length)[::-1])
            blocks.tables[index] = BlockTable()
        blocks.num_slots = blocks.num_stored = 0

    def step_launched(self) -> None:
        """One more step is in flight: what is given back from now on waits for it."""
        self._launched += 1

    def step_done(self) -> None:
        """The oldest step in flight is done: blocks that waited for it return to their pools."""
        self._done += 1
        while self._returning and self._returning[0][0] <= self._done:
            _, pool, blocks = self._returning.popleft()
            self._return(pool, blocks)

    def cancel_steps(self) -> None:
        """No step is in flight any more, and none will be reported done."""
        while self._done < self._launched:
            self.step_done()

    def _give_back(self, pool: BlockPool, blocks: list[int]) -> None:
        if self._done == self._launched:
            self._return(pool, blocks)
        elif blocks:
            self._returning.append((self._launched, pool, blocks))

    def _return(self, pool: BlockPool, blocks: list[int]) -> None:
        pool.release(blocks)
        self.num_returns += 1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _covered(self, blocks: RequestBlocks) -> int:
        return self.block_size * min(table.length for table in blocks.tables)

    def _name_blocks(self, blocks: RequestBlocks, token_ids: Sequence[int], count: int) -> None:
        """Name the first ``count`` blocks, as far as that isn't done."""
        size = self.block_size
        for index in range(len(blocks.contents), count):
            parent = blocks.contents[-1].key if blocks.contents else blocks.root
            ids = token_ids[index * size : (index + 1) * size]
            blocks.contents.append(block_contents(parent, ids))

    def _find_prefix_in(
        self, group: KVGroup, pool: BlockPool, contents: list[BlockContents], limit: int
    ) -> int:
        """:meth:`find_prefix` in one group, up to ``limit`` blocks."""
        if group.window is None:
            for index in range(limit):
                if pool.find(contents[index]) is None:
                    return index
            return limit
        end = limit
        while end > 0:
            first = group.first_key(end * self.block_size) // self.block_size
            missing = (i for i in range(end - 1, first - 1, -1) if pool.find(contents[i]) is None)
            miss = next(missing, None)
            if miss is None:
                break
            end = miss
        return end
