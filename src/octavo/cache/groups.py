"""Which layers share a block table."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.spec import DecoderSpec


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV lives equally long, and so under one block table. ``window`` counts the keys
    that a query sees, its own included; None is the whole history."""

    layers: tuple[int, ...]
    window: int | None

    def first_key(self, position: int) -> int:
        """The oldest position that a query at ``position`` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def kv_groups(spec: DecoderSpec) -> tuple[KVGroup, ...]:
    """Layers of equal window share a group: full attention first, then from the widest down."""
    members: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        members.setdefault(layer.window, []).append(index)
    windows = sorted(members, key=lambda w: (w is not None, -(w or 0)))
    return tuple(KVGroup(tuple(members[window]), window) for window in windows)
