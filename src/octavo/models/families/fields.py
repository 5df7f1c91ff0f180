"""Reading ``config.json``: typed fields over an architecture's defaults, and what is refused.

A wrong value is a :class:`CheckpointError`, a sound one that Octavo can't compute an
:class:`UnsupportedModelError`; both name the field.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

Parameters = Mapping[str, Any]

# In every config, beside the fields that a family's table of defaults names. The checkpoint has
# brought the heads and rotary settings into one form, and checked them.
_SHARED = {
    "model_type",
    "architectures",
    "head_dim",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "rope_parameters",
}

# Fields of other models that change the result. A family reads its own before this is consulted.
_REFUSED = {
    "quantization_config",
    "add_cross_attention",
    "alibi",
    "attention_bias",
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "first_k_dense_replace",
    "interleaved_sliding_window",
    "is_encoder_decoder",
    "kv_lora_rank",
    "llama_4_scaling",
    "logit_scale",
    "logits_scaling",
    "mlp_bias",
    "moe_intermediate_size",
    "n_routed_experts",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "per_layer_config",
    "pretraining_tp",
    "q_lora_rank",
    "qk_layernorm",
    "qk_norm",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_interleaved",
    "sliding_window",
    "text_config",
    "use_bidirectional_attention",
    "use_parallel_residual",
    "use_qk_norm",
    "use_sliding_window",
    "vision_config",
}

# Fields that say nothing about the logits.
_HARMLESS = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_sliding_window_pattern",  # written beside layer_types, which say the same
    "attention_dropout",
    "attn_implementation",
    "auto_map",  # remote code is never run; the architecture's own rules are followed
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",  # read by Qwen, where it has a meaning
    "pad_token_id",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}


class Fields:
    """A config over its architecture's defaults; a field that is null counts as given.

    Raises on construction where the config has a field that would change the result and that
    the architecture doesn't know.
    """

    def __init__(self, config: Parameters, defaults: Parameters) -> None:
        _refuse_foreign(config, set(defaults))
        self._values = {**defaults, **config}

    def get(self, name: str) -> Any:
        """The value as it is, None where absent."""
        return self._values.get(name)

    def integer(self, name: str, low: int = 1) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise wrong(name, value, f"a whole number of at least {low}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def positive(self, name: str) -> float:
        value = self.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise wrong(name, value, "a number above 0")
        return float(value)

    def positive_or_none(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def require(self, name: str, *supported: object) -> None:
        """Refuse the model unless the field has one of these values."""
        value = self.get(name)
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json has {name} {value!r}, which isn't supported yet "
                f"(known: {', '.join(str(choice) for choice in supported)})"
            )


def wrong(name: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"config.json has {name} {value!r}, it must be {wanted}")


def _refuse_foreign(config: Parameters, own: set[str]) -> None:
    """Refuse fields of other models that change the result; warn of those nobody knows."""
    unknown = []
    for name in sorted(set(config) - own - _SHARED):
        value = config[name]
        if not value or (name == "pretraining_tp" and value == 1):
            continue  # switched off
        if name in _REFUSED:
            raise UnsupportedModelError(
                f"config.json has {name} {value!r}, which changes the result and isn't supported "
                f"yet for model_type {config.get('model_type')!r}"
            )
        if name not in _HARMLESS:
            unknown.append(name)
    if unknown:
        logger.warning("config.json has fields that Octavo doesn't know: %s", ", ".join(unknown))
