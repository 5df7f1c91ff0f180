"""A model's weights for the ``cpu`` runtime: packed once, in the formats of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.tensor import Checkpoint, WeightTensor
from octavo.kernels.linear.packing import PackedLinear, in_packed_order, pack
from octavo.kernels.team import Team
from octavo.models.spec import DecoderSpec
from octavo.models.weights import Weight, layer_weights, outer_weights
from octavo.runtime.candidates import FLOAT_FORMATS

Float32 = NDArray[np.float32]

_RANDOM_NUMBERS = (1 << 16) + 1  # odd, so that rows differ


@dataclass(frozen=True)
class Linear:
    """Matrices that take the same activations, stacked; ``bias`` in packed order, or None."""

    weights: PackedLinear
    bias: Float32 | None


@dataclass(frozen=True)
class LayerWeights:
    """Norms are float32, offset included. ``qkv`` is one product, or one for each run of q, k and v
    in a format of their own."""

    attn_norm: Float32
    qkv: tuple[Linear, ...]
    qk_norm: Float32 | None  # [heads + KV heads, head_dim]
    o: Linear
    attn_post_norm: Float32 | None
    ffn_norm: Float32
    gate_up: Linear
    down: Linear
    ffn_post_norm: Float32 | None


@dataclass(frozen=True)
class DecoderWeights:
    """In a tied model ``head`` is ``embed``."""

    embed: PackedLinear
    layers: tuple[LayerWeights, ...]
    final_norm: Float32
    head: PackedLinear


def load_weights(
    spec: DecoderSpec, checkpoint: Checkpoint | None, crew: Team, *, int8: bool
) -> DecoderWeights:
    """Pack a checkpoint that ``check_weights`` has accepted, or, without one, random weights.
    ``int8`` quantises what is stored as floats."""
    reader = _Reader(spec, checkpoint, crew, int8)
    outer = outer_weights(spec)
    packed = reader.pack(outer["embed"])
    return DecoderWeights(
        embed=packed,
        layers=tuple(_layer(reader, layer_weights(spec, i)) for i in range(spec.num_layers)),
        final_norm=reader.norm(outer["final_norm"]),
        head=packed if spec.tied_embeddings else reader.pack(outer["head"]),
    )


@dataclass(frozen=True)
class _Reader:
    spec: DecoderSpec
    checkpoint: Checkpoint | None
    crew: Team
    int8: bool

    def tensor(self, weight: Weight) -> WeightTensor:
        if self.checkpoint is None:
            return _random(weight)
        return self.checkpoint.tensors[weight.name]

    def norm(self, weight: Weight) -> Float32:
        if self.checkpoint is None:
            return np.ones(weight.shape, np.float32)
        offset = 0.0 if self.checkpoint.norms_include_one else self.spec.norm_offset
        values: Float32 = self.tensor(weight).to_float32() + np.float32(offset)
        return values

    def pack(self, *matrices: Weight, gated: bool = False) -> PackedLinear:
        tensors = [self.tensor(weight) for weight in matrices]
        formats = [tensor.format for tensor in tensors]
        int8 = self.int8 and formats[0] in FLOAT_FORMATS
        return pack(tensors, int8=int8, gated=gated, crew=self.crew)

    def linear(
        self, weights: Mapping[str, Weight], roles: Sequence[str], *, gated: bool = False
    ) -> Linear:
        bias = None
        if f"{roles[0]}_bias" in weights:
            parts = [self.tensor(weights[f"{role}_bias"]).to_float32() for role in roles]
            bias = in_packed_order(parts, gated=gated)
        return Linear(self.pack(*(weights[role] for role in roles), gated=gated), bias)


def _layer(reader: _Reader, weights: Mapping[str, Weight]) -> LayerWeights:
    def optional_norm(role: str) -> Float32 | None:
        return reader.norm(weights[role]) if role in weights else None

    qk_norm = None
    if "q_norm" in weights:
        spec = reader.spec
        q, k = reader.norm(weights["q_norm"]), reader.norm(weights["k_norm"])
        qk_norm = np.repeat([q, k], [spec.num_heads, spec.num_kv_heads], axis=0)
    return LayerWeights(
        attn_norm=reader.norm(weights["attn_norm"]),
        qkv=tuple(reader.linear(weights, roles) for roles in _runs(reader, weights, "q", "k", "v")),
        qk_norm=qk_norm,
        o=reader.linear(weights, ["o"]),
        attn_post_norm=optional_norm("attn_post_norm"),
        ffn_norm=reader.norm(weights["ffn_norm"]),
        gate_up=reader.linear(weights, ["gate", "up"], gated=True),
        down=reader.linear(weights, ["down"]),
        ffn_post_norm=optional_norm("ffn_post_norm"),
    )


def _runs(reader: _Reader, weights: Mapping[str, Weight], *roles: str) -> list[list[str]]:
    """Neighbours of one format together."""
    runs: list[list[str]] = []
    for role in roles:
        format = reader.tensor(weights[role]).format
        if runs and reader.tensor(weights[runs[-1][-1]]).format == format:
            runs[-1].append(role)
        else:
            runs.append([role])
    return runs


def _random(weight: Weight) -> WeightTensor:
    """Small random numbers, for measuring speed: the same few over and over."""
    rng = np.random.default_rng(0)
    few = rng.normal(scale=0.02, size=_RANDOM_NUMBERS).astype(np.float32).view(np.uint32) >> 16
    *rows, columns = weight.shape
    numbers = np.resize(few.astype(np.uint16), (prod(rows), columns))
    return WeightTensor(weight.name, weight.shape, "BF16", numbers.view(np.uint8))


def takes_q8(weights: PackedLinear) -> bool:
    """Whether a product with these weights can read quantised activations."""
    return weights.format not in FLOAT_FORMATS
