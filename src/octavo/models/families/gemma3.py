"""Gemma 3, text: four norms a layer, QK-norm, scaled embeddings, and two kinds of layers in turn,
sliding and full, each with a rotary base of its own."""

from __future__ import annotations

from octavo.models.families.common import FULL, SLIDING, decoder_spec, listed_layer_types
from octavo.models.families.fields import Fields, Parameters
from octavo.models.spec import DecoderSpec

DEFAULTS: Parameters = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def gemma3_spec(config: Parameters) -> DecoderSpec:
    """``config.json`` of a Gemma3ForCausalLM -> its spec."""
    fields = Fields(config, DEFAULTS)
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    every = fields.integer("sliding_window_pattern")
    num_layers = fields.integer("num_hidden_layers")
    pattern = [FULL if layer % every == every - 1 else SLIDING for layer in range(num_layers)]
    bias = fields.flag("attention_bias")
    return decoder_spec(
        fields,
        "gemma3",
        layer_types=listed_layer_types(fields) or pattern,
        window=fields.integer_or_none("sliding_window"),
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        attention_soft_cap=fields.positive_or_none("attn_logit_softcapping"),
        logit_soft_cap=fields.positive_or_none("final_logit_softcapping"),
        embed_scale=fields.integer("hidden_size") ** 0.5,
    )
