"""What all families read alike: sizes, heads, the kinds of attention layers, rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.families.fields import Fields, Parameters, wrong
from octavo.models.rope import yarn_attention_factor
from octavo.models.spec import DecoderSpec, LayerSpec, RopeSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_spec(
    fields: Fields, family: str, layer_types: Sequence[str], window: int | None, **own: Any
) -> DecoderSpec:
    """A spec from the fields that all families share, with the family's ``own`` set on top.

    ``window`` is that of the sliding layers; None lets them see the whole history.
    """
    head_dim = fields.integer("head_dim")
    ropes = fields.get("rope_parameters")
    layers = {
        FULL: LayerSpec(_rope(ropes[FULL], head_dim)),
        SLIDING: LayerSpec(_rope(ropes.get(SLIDING, ropes[FULL]), head_dim), window),
    }
    shared = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "layers": tuple(layers[kind] for kind in layer_types),
        "max_position": fields.integer("max_position_embeddings"),
        "norm_eps": fields.positive("rms_norm_eps"),
        "attention_scale": head_dim**-0.5,
        "tied_embeddings": fields.flag("tie_word_embeddings"),
    }
    return DecoderSpec(family=family, **{**shared, **own})


def listed_layer_types(fields: Fields) -> list[str] | None:
    """The config's ``layer_types``, None where it has no list."""
    types, num_layers = fields.get("layer_types"), fields.integer("num_hidden_layers")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise wrong("layer_types", types, f"a list of {num_layers}, one for each layer")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"config.json has layer type {kind!r}, which isn't supported yet "
                f"(known: {FULL}, {SLIDING})"
            )
    return types


def uniform_layer_types(fields: Fields, kind: str) -> list[str]:
    """All layers of one kind: what an architecture without alternation must list, if it lists."""
    types = [kind] * fields.integer("num_hidden_layers")
    listed = listed_layer_types(fields)
    if listed not in (None, types):
        raise UnsupportedModelError(
            f"config.json has layer_types {listed}, but here all layers are {kind}: "
            f"{fields.get('model_type')} models that alternate aren't supported yet"
        )
    return types


def qwen_layers(fields: Fields) -> tuple[list[str], int | None]:
    """Layer types and window by Qwen's rule: with ``use_sliding_window`` the layers from
    ``max_window_layers`` on slide, unless ``layer_types`` lists them."""
    sliding = fields.flag("use_sliding_window")
    window = fields.integer_or_none("sliding_window") if sliding else None
    num_layers = fields.integer("num_hidden_layers")
    first = num_layers if window is None else fields.integer("max_window_layers", low=0)
    types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return listed_layer_types(fields) or types, window


def _rope(parameters: Parameters, head_dim: int) -> RopeSpec:
    """From one entry of the normalised ``rope_parameters``, whose keys and values are checked."""
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or rotary_dim == 0:
        raise CheckpointError(
            f"config.json rotates {rotary_dim} elements of a head of {head_dim}; they must be pairs"
        )
    given = dict(parameters)
    given.pop("partial_rotary_factor", None)
    mscale, mscale_all_dim = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if given["rope_type"] == "yarn" and "attention_factor" not in given:
        given["attention_factor"] = yarn_attention_factor(given["factor"], mscale, mscale_all_dim)
    if "original_max_position_embeddings" in given:
        given["original_max_position"] = int(given.pop("original_max_position_embeddings"))
    return RopeSpec(
        theta=given.pop("rope_theta"), rotary_dim=rotary_dim, kind=given.pop("rope_type"), **given
    )
