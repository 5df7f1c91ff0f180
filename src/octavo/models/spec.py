"""What varies between decoder-only transformers, as plain data.

A family file turns a checkpoint's ``config.json`` into a :class:`DecoderSpec`; ``decoder.py``
lowers the spec to stages; a runtime carries them out. Nothing here knows of files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first ``rotary_dim`` elements of a head, half-split (Hugging Face)
    layout: element ``i`` is rotated with element ``i + rotary_dim / 2``.

    ``models/rope.py`` turns it into cos/sin tables; ``attention_factor`` scales both (yarn).
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: the length that the model was trained at
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, already derived from mscale or 0.1 ln(factor) + 1


@dataclass(frozen=True)
class LayerSpec:
    """What varies from layer to layer: ``window`` counts keys including the query's own."""

    rope: RopeSpec
    window: int | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder: ``x += attention(norm(x)); x += ffn(norm(x))``, layer by layer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    attention_scale: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: float = 0.0  # Gemma multiplies by (1 + weight)
    post_norms: bool = False  # Gemma norms each sublayer's output before the residual is added
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    tied_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
