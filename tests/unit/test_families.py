"""config.json -> spec: defaults, what is honoured, what is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.checkpoint.config import normalize_config
from octavo.errors import CheckpointError, OctavoError, UnsupportedModelError
from octavo.models.families import spec_from_config
from octavo.models.spec import DecoderSpec

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def spec_of(model_type: str | None, **config: Any) -> DecoderSpec:
    named = {} if model_type is None else {"model_type": model_type}
    return spec_from_config(normalize_config({**SIZES, **named, **config}))


def windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


ALL = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize(
    ("model_type", "head_dim", "max_position", "tied", "window"),
    [
        ("llama", 16, 2048, False, [None] * 4),
        ("mistral", 16, 131072, False, [4096] * 4),
        ("qwen2", 16, 32768, False, [None] * 4),
        ("qwen3", 128, 32768, False, [None] * 4),
        ("gemma3_text", 256, 131072, True, [4096] * 4),
    ],
)
def test_absent_fields_take_the_architectures_defaults(
    model_type: str, head_dim: int, max_position: int, tied: bool, window: list[int | None]
) -> None:
    spec = spec_of(model_type)
    assert spec.head_dim == head_dim
    assert spec.max_position == max_position
    assert spec.tied_embeddings == tied
    assert windows(spec) == window
    assert spec.norm_eps == 1e-6
    assert spec.num_kv_heads == 2


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("config", [{"head_dim": None}, {}])
def test_head_dim_of_the_hidden_size(model_type: str, config: dict[str, Any]) -> None:
    """O30: null or absent is hidden / heads; 1 / sqrt(head_dim) scales the scores."""
    spec = spec_of(model_type, **config)
    assert spec.head_dim == 16
    assert spec.attention_scale == 0.25


def test_stated_head_dim_wins() -> None:
    spec = spec_of("llama", head_dim=32)
    assert spec.head_dim == 32
    assert spec.q_size == 128
    assert spec.attention_scale == 32**-0.5


@pytest.mark.parametrize("config", [{"num_key_value_heads": None}, {}])
def test_kv_heads_are_the_heads(config: dict[str, Any]) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    spec = spec_from_config(normalize_config({**sizes, "model_type": "llama", **config}))
    assert spec.num_kv_heads == 4


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_old_configs_name_only_the_architecture(model_type: str, architecture: str) -> None:
    config = {"head_dim": 16}  # its default hangs on model_type
    assert (
        spec_of(None, architectures=[architecture], **config).family
        == spec_of(model_type, **config).family
    )


def test_qwen_slides_in_its_upper_layers() -> None:
    config = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(spec_of("qwen2", **config, max_window_layers=3)) == [None, None, None, 8]
    assert windows(spec_of("qwen2", **config, max_window_layers=0)) == [8] * 4
    off = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}
    assert windows(spec_of("qwen3", **off)) == [None] * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(spec_of("qwen3", **config, layer_types=types)) == [8, None, 8, None]


def test_mistral_without_a_window() -> None:
    assert windows(spec_of("mistral", sliding_window=None)) == [None] * 4


def test_a_list_that_says_what_is_so_is_fine() -> None:
    assert spec_of("llama", layer_types=["full_attention"] * 4) == spec_of("llama")
    assert spec_of("mistral", layer_types=["sliding_attention"] * 4) == spec_of("mistral")


def test_gemma3_alternates_and_has_two_rotary_bases() -> None:
    spec = spec_of("gemma3_text", sliding_window=8, sliding_window_pattern=3)
    assert windows(spec) == [8, 8, None, 8]
    assert [layer.rope.theta for layer in spec.layers] == [1e4, 1e4, 1e6, 1e4]
    assert spec.embed_scale == 8.0
    assert spec.attention_scale == 1 / 16  # query_pre_attn_scalar 256
    types = ["full_attention", *["sliding_attention"] * 3]
    assert windows(spec_of("gemma3_text", sliding_window=8, layer_types=types)) == [None, 8, 8, 8]


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 8),
        ("num_local_experts", 4),
        ("quantization_config", {"quant_method": "gptq"}),
        ("pretraining_tp", 2),
        ("logit_scale", 0.5),
        ("use_bidirectional_attention", True),
        ("no_rope_layers", [1, 0]),
        ("vision_config", {"hidden_size": 4}),
    ],
)
def test_foreign_fields_are_refused_by_name(model_type: str, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        spec_of(model_type, **{field: value})


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "relu"),
        ("mistral", "hidden_act", "gelu"),
        ("gemma3_text", "hidden_activation", "gelu"),
        ("llama", "sliding_window", 128),
        ("llama", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("qwen2", "layer_types", ["chunked_attention"] * 4),
        ("llama", "final_logit_softcapping", 30.0),
        ("mistral", "attention_bias", True),
        ("qwen2", "mlp_bias", True),
        ("gemma3_text", "mlp_bias", True),
    ],
)
def test_what_a_family_cant_compute_is_refused_by_name(
    model_type: str, field: str, value: Any
) -> None:
    with pytest.raises(UnsupportedModelError, match=field.rstrip("s").replace("_", ".")):
        spec_of(model_type, **{field: value})


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "foo"])
def test_rope_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rope_type):
        spec_of("llama", rope_scaling={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize("field", ["num_experts", "pretraining_tp", "quantization_config"])
@pytest.mark.parametrize("value", [None, 0, False, {}])
def test_switched_off_fields_are_harmless(field: str, value: Any) -> None:
    assert spec_of("llama", **{field: value}) == spec_of("llama")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "gemma3"}, "'gemma3'"),  # with a vision tower
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "Sequence"),
        ({}, "None"),
    ],
)
def test_unknown_architectures_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as error:
        spec_from_config(normalize_config({**SIZES, **config}))
    assert "LlamaForCausalLM" in str(error.value)


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -64),
        ("num_hidden_layers", "4"),
        ("intermediate_size", 96.5),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", float("nan")),
        ("max_position_embeddings", None),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 0),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(
    model_type: str, field: str, value: Any
) -> None:
    with pytest.raises(OctavoError, match=field):
        spec_of(model_type, **{field: value})


def test_odd_rotary_size() -> None:
    with pytest.raises(CheckpointError, match="pairs"):
        spec_of("llama", head_dim=17)


def test_too_few_layer_types() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        spec_of("qwen2", layer_types=["full_attention"])


def test_fields_that_nobody_knows_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec_of("llama", some_invention=3, use_cache=True, transformers_version="5.0")
    assert "some_invention" in caplog.text
    assert "use_cache" not in caplog.text
