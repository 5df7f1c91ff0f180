"""One shape for every config.json (cases O25 and O30, the loader's half)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from octavo.checkpoint.config import normalize_config
from octavo.errors import CheckpointError, UnsupportedModelError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
GEMMA = BASE | {"model_type": "gemma3_text", "head_dim": 16}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def ropes(config: dict[str, Any], base: dict[str, Any] = BASE) -> dict[str, Any]:
    given = base | config
    before = copy.deepcopy(given)
    normal = normalize_config(given)
    assert given == before, "the caller's config is left alone"
    left = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}
    assert not left & normal.keys()
    again = normalize_config(normal)
    assert again == normal, "normalising twice changes nothing"
    return dict(normal["rope_parameters"])


def default(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


@pytest.mark.parametrize(
    "variant",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1000000}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default", "rope_type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_theta": 1e6, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_one_meaning_many_spellings(variant: dict[str, Any]) -> None:
    assert ropes(variant) == {"full_attention": default(1e6)}


def test_nothing_said_is_ten_thousand() -> None:
    assert ropes({}) == {"full_attention": default(1e4)}


@pytest.mark.parametrize(
    "variant",
    [
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}},
        {"rope_parameters": {"type": "linear", "factor": 4}, "rope_theta": 1e4},
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4},
            "rope_scaling": {"type": "linear", "factor": 4},
        },
    ],
)
def test_linear(variant: dict[str, Any]) -> None:
    assert ropes(variant) == {
        "full_attention": {"rope_type": "linear", "factor": 4, "rope_theta": 1e4}
    }


def test_per_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert ropes({"rope_parameters": nested}) == nested
    assert ropes({"rope_parameters": nested}, GEMMA) == nested
    # A top-level theta is the default of both.
    shared = {"full_attention": {}, "sliding_attention": {"rope_type": "default"}}
    assert ropes({"rope_parameters": shared, "rope_theta": 5e5}) == {
        "full_attention": default(5e5),
        "sliding_attention": default(5e5),
    }


@pytest.mark.parametrize(
    ("variant", "full", "sliding"),
    [
        ({}, default(1e6), default(1e4)),
        ({"rope_theta": 2e6, "rope_local_base_freq": 3e4}, default(2e6), default(3e4)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            default(1e4),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": None}},
            default(5e5),
            default(1e4),
        ),
    ],
)
def test_gemma3(variant: dict[str, Any], full: dict[str, Any], sliding: dict[str, Any]) -> None:
    assert ropes(variant, GEMMA) == {"full_attention": full, "sliding_attention": sliding}


@pytest.mark.parametrize(
    "variant",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotary_factor(variant: dict[str, Any]) -> None:
    assert ropes(variant) == {"full_attention": default(1e4) | {"partial_rotary_factor": 0.5}}


def test_llama3_and_yarn() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3}
    assert ropes({"rope_theta": 5e5, "rope_scaling": scaling}) == {
        "full_attention": scaling | {"rope_theta": 5e5}
    }
    yarn = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "truncate": False}
    rope = ropes({"rope_scaling": yarn})["full_attention"]
    assert rope["original_max_position_embeddings"] == 2048  # of the config, as transformers
    assert rope["truncate"] is False
    derived = {"type": "yarn", "original_max_position_embeddings": 512}
    assert ropes({"rope_scaling": derived})["full_attention"]["factor"] == 4.0


@pytest.mark.parametrize("rope_type", ["foo", "dynamic", "longrope", "su", "proportional"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_unknown_types_are_refused_by_name(rope_type: str, place: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{rope_type}' is not supported.*yarn"):
        ropes({place: {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast"),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}}, "'chunked_attention'"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ropes(variant)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_theta is 1000000.0, but rope_theta is 10000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
            r"rope_scaling.rope_type is 'yarn', but rope_type is 'linear'",
        ),
        (
            {
                "rope_parameters": {"type": "linear", "factor": 2},
                "rope_scaling": {"type": "linear", "factor": 4},
            },
            r"rope_scaling.factor is 4, but factor is 2",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            r"partial_rotary_factor is 0.5, but partial_rotary_factor is 0.25",
        ),
        (
            {
                "rope_local_base_freq": 2e4,
                "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}},
            },
            r"rope_local_base_freq is 20000.0, but rope_theta is 10000.0",
        ),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "torch_dtype is 'float16', but dtype"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "needs high_freq_factor, low_freq_factor",
        ),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'; a positive number"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"\['yarn'\]"),
        ({"partial_rotary_factor": 1.5}, "the limit is 1"),
    ],
)
def test_contradictions_and_nonsense(variant: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        ropes(variant)


# ---- O30: head sizes


@pytest.mark.parametrize(
    ("config", "head_dim", "kv_heads"),
    [
        ({}, 16, 2),
        ({"head_dim": 32}, 32, 2),
        ({"head_dim": None}, 16, 2),
        ({"head_dim": 80}, 80, 2),
        ({"num_key_value_heads": None}, 16, 4),
        ({"num_key_value_heads": 1}, 16, 1),
        ({"num_key_value_heads": 4}, 16, 4),
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, 16, 3),
        ({"hidden_size": 65, "head_dim": 16}, 16, 2),
        ({"model_type": "qwen3"}, 128, 2),  # the class's default, not hidden / heads
        ({"model_type": "qwen3", "head_dim": 32}, 32, 2),
    ],
)
def test_head_sizes(config: dict[str, Any], head_dim: int, kv_heads: int) -> None:
    normal = normalize_config(BASE | config)
    assert (normal["head_dim"], normal["num_key_value_heads"]) == (head_dim, kv_heads)


def test_absent_kv_heads() -> None:
    config = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert normalize_config(config)["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 65}, "65 isn't a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "4 isn't a multiple of num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_impossible_head_sizes(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        normalize_config(BASE | config)


def test_dtype_has_one_name() -> None:
    normal = normalize_config(BASE | {"torch_dtype": "bfloat16"})
    assert normal["dtype"] == "bfloat16"
    assert "torch_dtype" not in normal
