"""How many KV blocks a model gets, from made-up machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.spec import KVLayout
from octavo.cache.groups import kv_groups
from octavo.errors import InsufficientMemoryError
from octavo.models.spec import DecoderSpec, LayerSpec, RopeSpec
from octavo.runtime.memory import activation_bytes, plan_kv, weight_bytes

ROPE = RopeSpec(theta=1e4, rotary_dim=64)
DENSE = DecoderSpec(
    family="llama",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    layers=(LayerSpec(ROPE),) * 4,
    max_position=4096,
    norm_eps=1e-5,
    attention_scale=0.125,
)
SLIDING = replace(DENSE, layers=(LayerSpec(ROPE, 100),) * 3 + (LayerSpec(ROPE),))
LAYER_BLOCK = 2 * 16 * 2 * 64 * 4  # K and V of 16 tokens in one layer, in bytes


def plan(spec: DecoderSpec = DENSE, *, kv_bytes: int = 10**9, **changes: Any) -> tuple[int, ...]:
    """A plan on a machine with ``kv_bytes`` left when weights and activations have theirs."""
    groups = kv_groups(spec)
    shape = (1, 16, 2, 64)
    settings = {
        "block_size": 16,
        "weights": weight_bytes(spec, "float32"),
        "dtype": "float32",
        "utilization": 1.0,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "prefix_caching": False,
        "fill": False,
        **changes,
    }
    free = kv_bytes + weight_bytes(spec, "float32") + activation_bytes(spec, "float32", 256, 8)
    layouts = [KVLayout(shape, shape, "NHD", "NHD", "float32")] * len(groups)
    return plan_kv(spec, groups, layouts, **{"free_bytes": free, **settings})


def test_enough_memory() -> None:
    """Every request at its longest, and no more."""
    assert plan() == (8 * 64,)


def test_fill() -> None:
    assert plan(fill=True) == (10**9 // (4 * LAYER_BLOCK),)


def test_little_memory() -> None:
    assert plan(kv_bytes=100 * 4 * LAYER_BLOCK) == (100,)


def test_one_request_just_fits() -> None:
    assert plan(kv_bytes=64 * 4 * LAYER_BLOCK) == (64,)
    with pytest.raises(InsufficientMemoryError, match="at most 1008") as error:
        plan(kv_bytes=64 * 4 * LAYER_BLOCK - 1)
    assert error.value.fitting_model_len == 1008


def test_nothing_fits() -> None:
    with pytest.raises(InsufficientMemoryError) as error:
        plan(free_bytes=10**6, utilization=0.5)
    assert error.value.fitting_model_len == 0
    message = str(error.value)
    assert "0.5 of 0.00 GB" in message
    assert "smaller model" in message


def test_utilization_is_a_share_of_free_memory() -> None:
    free = 2 * (weight_bytes(DENSE, "float32") + activation_bytes(DENSE, "float32", 256, 8))
    free += 2 * 70 * 4 * LAYER_BLOCK
    assert plan(free_bytes=free, utilization=0.5) == (70,)


def test_sliding_layers_keep_a_window_each() -> None:
    """Blocks of a window that starts in mid-block, and of a step's new tokens once."""
    full, sliding = plan(SLIDING)
    assert full == 8 * 64
    assert sliding == 8 * (7 + 1) + 256 // 16
    assert plan(SLIDING, prefix_caching=True)[1] == 8 * 2 * (7 + 1) + 256 // 16


def test_a_wide_window_is_no_more_than_the_context() -> None:
    wide = replace(DENSE, layers=(LayerSpec(ROPE, 100_000),) * 4)
    assert plan(wide) == (8 * 64 + 16,)


@given(
    kv_bytes=st.integers(2 * 10**7, 10**9),
    max_model_len=st.integers(1, 2048),
    max_num_seqs=st.integers(1, 64),
    fill=st.booleans(),
    prefix_caching=st.booleans(),
    sliding=st.booleans(),
)
@settings(deadline=None)
def test_a_plan_fits_and_serves(
    kv_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    fill: bool,
    prefix_caching: bool,
    sliding: bool,
) -> None:
    spec = SLIDING if sliding else DENSE
    groups = kv_groups(spec)
    try:
        blocks = plan(
            spec,
            kv_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            fill=fill,
            prefix_caching=prefix_caching,
        )
    except InsufficientMemoryError:
        assert (
            kv_bytes < 2 * 4 * LAYER_BLOCK * (-(-max_model_len // 16) + 16) + 10**6 * max_num_seqs
        )
        return
    assert blocks[0] >= -(-max_model_len // 16)
    used = sum(LAYER_BLOCK * len(g.layers) * n for g, n in zip(groups, blocks, strict=True))
    grown = activation_bytes(spec, "float32", 256, max_num_seqs) - activation_bytes(
        spec, "float32", 256, 8
    )
    assert used <= kv_bytes - grown
