"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V; the upper layers may slide."""

from __future__ import annotations

from octavo.models.families.common import decoder_spec, qwen_layers
from octavo.models.families.fields import Fields, Parameters
from octavo.models.spec import DecoderSpec

DEFAULTS: Parameters = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen2_spec(config: Parameters) -> DecoderSpec:
    """``config.json`` of a Qwen2ForCausalLM -> its spec."""
    fields = Fields(config, DEFAULTS)
    fields.require("hidden_act", "silu", "swish")
    layer_types, window = qwen_layers(fields)
    return decoder_spec(fields, "qwen2", layer_types, window, qkv_bias=True)
