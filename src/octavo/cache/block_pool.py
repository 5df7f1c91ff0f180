"""The blocks of one KV group: how many hold each, and what the free ones still contain."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.prefix import BlockContents


class BlockPool:
    """Ids 0 to ``num_blocks - 1`` with reference counts.

    A block without references is free: it may be handed out, blocks of unknown contents first,
    then known ones, the least recently released first. Until then a known block keeps its
    contents, and can be found and held again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, contents unknown; a stack
        self._reusable: dict[int, None] = {}  # free, contents known; the oldest release first
        self._contents: list[BlockContents | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._reusable)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, at most ``num_free``, with one reference each."""
        blocks = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, block: int) -> None:
        """One more reference to a block that :meth:`find` returned."""
        if self.ref_counts[block] == 0:
            del self._reusable[block]
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one reference from each, in the order in which they may be handed out again."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self._contents[block] is None:
                    self._blank.append(block)
                else:
                    self._reusable[block] = None

    def store(self, block: int, contents: BlockContents) -> None:
        """Say what a held block holds from now on. Where another block holds the same already,
        that one stays the one to be found."""
        if contents.key not in self._by_key:
            self._by_key[contents.key] = block
            self._contents[block] = contents

    def find(self, contents: BlockContents) -> int | None:
        """The block that holds ``contents``: compared token by token, not by key alone."""
        block = self._by_key.get(contents.key)
        return block if block is not None and self._contents[block] == contents else None

    def _evict(self) -> int:
        block = next(iter(self._reusable))
        del self._reusable[block]
        contents = self._contents[block]
        if contents is not None:
            del self._by_key[contents.key]
            self._contents[block] = None
        return block
