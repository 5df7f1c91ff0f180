"""The decoder's weights: their names and shapes, and a checkpoint held against them.

All families share Hugging Face's names for the one decoder; the spec says which of them a model
has. Roles are this project's names for them, the same in every family.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from octavo.checkpoint.tensor import Checkpoint, WeightTensor
from octavo.errors import CheckpointError
from octavo.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"

_NAMED_AT_MOST = 8  # of each kind of problem


class Weight(NamedTuple):
    """A tensor as the checkpoint must have it; matrices are ``[out, in]``."""

    name: str
    shape: tuple[int, ...]


def outer_weights(spec: DecoderSpec) -> dict[str, Weight]:
    """Role -> weight of what stands outside the layers; a tied model has no ``head``."""
    weights = {
        "embed": Weight(EMBED, (spec.vocab_size, spec.hidden_size)),
        "final_norm": Weight("model.norm.weight", (spec.hidden_size,)),
    }
    if not spec.tied_embeddings:
        weights["head"] = Weight(HEAD, (spec.vocab_size, spec.hidden_size))
    return weights


def layer_weights(spec: DecoderSpec, layer: int) -> dict[str, Weight]:
    """Role -> weight of one layer."""
    hidden, ffn, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    # Where sublayer outputs are normed too, "post_attention" is that norm and not the FFN's.
    ffn_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    vectors = {"attn_norm": ("input_layernorm", hidden), "ffn_norm": (ffn_norm, hidden)}
    if spec.post_norms:
        vectors["attn_post_norm"] = ("post_attention_layernorm", hidden)
        vectors["ffn_post_norm"] = ("post_feedforward_layernorm", hidden)
    if spec.qk_norm:
        vectors["q_norm"] = ("self_attn.q_norm", spec.head_dim)
        vectors["k_norm"] = ("self_attn.k_norm", spec.head_dim)
    linears = {
        "q": ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        "k": ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        "v": ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        "o": ("self_attn.o_proj", hidden, q, spec.o_bias),
        "gate": ("mlp.gate_proj", ffn, hidden, spec.ffn_bias),
        "up": ("mlp.up_proj", ffn, hidden, spec.ffn_bias),
        "down": ("mlp.down_proj", hidden, ffn, spec.ffn_bias),
    }
    prefix = f"model.layers.{layer}"
    weights = {role: Weight(f"{prefix}.{n}.weight", (size,)) for role, (n, size) in vectors.items()}
    for role, (name, rows, columns, has_bias) in linears.items():
        weights[role] = Weight(f"{prefix}.{name}.weight", (rows, columns))
        if has_bias:
            weights[f"{role}_bias"] = Weight(f"{prefix}.{name}.bias", (rows,))
    return weights


def num_parameters(spec: DecoderSpec) -> int:
    """Weights of the model; a tied embedding counts once."""
    return sum(prod(weight.shape) for weight in _all_weights(spec))


def check_weights(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """Hold a checkpoint against its spec before anything is loaded; returns the spec to run.

    Every tensor is either used or named in a :class:`CheckpointError`, and so is every missing and
    wrongly shaped one. A tied model with a head of its own that differs from the embedding is run
    with that head, untied, as transformers does, and a warning says so. Only the frequencies of
    rotary embeddings, which old checkpoints hold, are passed over: they follow from the config.
    """
    tensors = checkpoint.tensors
    if spec.tied_embeddings and HEAD in tensors and EMBED in tensors:
        spec = _resolve_tie(spec, tensors[EMBED], tensors[HEAD])
    expected = dict(_all_weights(spec))
    spare = set(tensors) - set(expected) - ({HEAD} if spec.tied_embeddings else set())
    missing = [_hint_head(name) for name in expected if name not in tensors]
    wrong = [
        f"{name} {tensors[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    unused = [name for name in sorted(spare) if not name.endswith("rotary_emb.inv_freq")]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (("missing", missing), ("wrong shape", wrong), ("unknown", unused))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint.name} doesn't hold the tensors of its config.json ({spec.family}, "
            f"{spec.num_layers} layers); " + "; ".join(problems)
        )
    return spec


def _all_weights(spec: DecoderSpec) -> Iterator[Weight]:
    yield from outer_weights(spec).values()
    for layer in range(spec.num_layers):
        yield from layer_weights(spec, layer).values()


def _resolve_tie(spec: DecoderSpec, embed: WeightTensor, head: WeightTensor) -> DecoderSpec:
    same_bytes = embed.format == head.format and np.array_equal(embed.stored, head.stored)
    if same_bytes or (
        embed.shape == head.shape and np.array_equal(embed.to_float32(), head.to_float32())
    ):
        return spec
    logger.warning(
        "config.json ties the output head to the embedding, but the checkpoint has a different "
        "%s: that one is used",
        HEAD,
    )
    return replace(spec, tied_embeddings=False)


def _hint_head(name: str) -> str:
    return f"{name} (the config doesn't tie it to the embedding)" if name == HEAD else name


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")
