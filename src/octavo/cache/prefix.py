"""Names for what full blocks contain: a chain of hashes over token ids.

A block's KV depends on every token before it, so its key covers its parent's key. The first parent
is a root made of everything besides tokens that changes the KV or who may share it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_SIZE = 32


@dataclass(frozen=True)
class BlockContents:
    """``tokens`` (int32 bytes) that follow the prefix named by ``parent``; ``key`` names both."""

    key: bytes
    parent: bytes
    tokens: bytes


def prefix_root(*extra: str | None) -> bytes:
    """The parent of first blocks. ``extra`` are the keys that set equal tokens apart (cache salt,
    adapter name), by place: None differs from ``""``, and ``("ab", "c")`` from ``("a", "bc")``."""
    digest = blake2b(digest_size=DIGEST_SIZE)
    for key in extra:
        data = (key or "").encode("utf-8", "surrogatepass")
        digest.update(b"\0" if key is None else b"\1" + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_contents(parent: bytes, token_ids: Sequence[int]) -> BlockContents:
    """Name a full block: 256 bits of BLAKE2b over its parent's key and all bits of its ids."""
    tokens = array("i", token_ids).tobytes()
    return BlockContents(blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest(), parent, tokens)
