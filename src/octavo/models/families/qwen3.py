"""Qwen3, dense: Q and K are normed head by head, and a head's size is its own."""

from __future__ import annotations

from octavo.models.families.common import decoder_spec, qwen_layers
from octavo.models.families.fields import Fields, Parameters
from octavo.models.families.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from octavo.models.spec import DecoderSpec

DEFAULTS: Parameters = {**QWEN2_DEFAULTS, "attention_bias": False}


def qwen3_spec(config: Parameters) -> DecoderSpec:
    """``config.json`` of a Qwen3ForCausalLM -> its spec."""
    fields = Fields(config, DEFAULTS)
    fields.require("hidden_act", "silu", "swish")
    layer_types, window = qwen_layers(fields)
    bias = fields.flag("attention_bias")
    return decoder_spec(
        fields, "qwen3", layer_types, window, qk_norm=True, qkv_bias=bias, o_bias=bias
    )
