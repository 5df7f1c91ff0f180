"""Llama 2, 3 and 3.x, and the models that share the architecture: SmolLM2, TinyLlama, Yi ..."""

from __future__ import annotations

from octavo.models.families.common import FULL, decoder_spec, uniform_layer_types
from octavo.models.families.fields import Fields, Parameters
from octavo.models.spec import DecoderSpec

DEFAULTS: Parameters = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_types": None,
}


def llama_spec(config: Parameters) -> DecoderSpec:
    """``config.json`` of a LlamaForCausalLM -> its spec."""
    fields = Fields(config, DEFAULTS)
    fields.require("hidden_act", "silu", "swish")
    bias = fields.flag("attention_bias")
    return decoder_spec(
        fields,
        "llama",
        layer_types=uniform_layer_types(fields, FULL),
        window=None,
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=fields.flag("mlp_bias"),
    )
