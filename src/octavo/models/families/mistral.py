"""Mistral: Llama without biases, and one sliding window for all layers (or none)."""

from __future__ import annotations

from octavo.models.families.common import FULL, SLIDING, decoder_spec, uniform_layer_types
from octavo.models.families.fields import Fields, Parameters
from octavo.models.spec import DecoderSpec

DEFAULTS: Parameters = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "layer_types": None,
}


def mistral_spec(config: Parameters) -> DecoderSpec:
    """``config.json`` of a MistralForCausalLM -> its spec."""
    fields = Fields(config, DEFAULTS)
    fields.require("hidden_act", "silu", "swish")
    window = fields.integer_or_none("sliding_window")
    layer_types = uniform_layer_types(fields, SLIDING if window else FULL)
    return decoder_spec(fields, "mistral", layer_types, window)
