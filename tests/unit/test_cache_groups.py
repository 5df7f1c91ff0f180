"""Which layers share a block table, and which keys a window keeps."""

from __future__ import annotations

import pytest

from octavo.cache import KVGroup, kv_groups
from octavo.models.spec import DecoderSpec, LayerSpec, RopeSpec


def spec_with(windows: list[int | None]) -> DecoderSpec:
    rope = RopeSpec(theta=10000.0, rotary_dim=16)
    return DecoderSpec(
        family="test",
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        layers=tuple(LayerSpec(rope, window) for window in windows),
        max_position=128,
        norm_eps=1e-6,
        attention_scale=0.25,
    )


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None, None], [((0, 1), None)]),
        ([8, 8], [((0, 1), 8)]),
        ([8, 8, None, 8], [((2,), None), ((0, 1, 3), 8)]),
        ([4, 8, None, 4], [((2,), None), ((1,), 8), ((0, 3), 4)]),
    ],
)
def test_layers_of_equal_window_share_a_group(
    windows: list[int | None], groups: list[tuple[tuple[int, ...], int | None]]
) -> None:
    assert kv_groups(spec_with(windows)) == tuple(KVGroup(*group) for group in groups)


def test_a_window_counts_the_query_itself() -> None:
    group = KVGroup((0,), 8)  # case O24: query i reads keys j with i - 8 < j <= i
    assert [group.first_key(i) for i in (0, 7, 8, 39)] == [0, 0, 1, 32]
    assert KVGroup((0,), None).first_key(39) == 0
