"""A model's stages on a GPU, launched op by op.

Elementwise stages are Triton's kernels, products are the library's, attention is the candidates'.
A residual isn't added where it comes from but by the next norm, in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.spec import AttentionSpec, Backend
from octavo.kernels.norm.triton import add_rms_norm
from octavo.kernels.rope_write.triton import rope_write
from octavo.kernels.triton_launch import with_room
from octavo.models.decoder import StageName, cover, lower
from octavo.models.rope import inverse_frequencies
from octavo.models.spec import DecoderSpec, RopeSpec
from octavo.runtime.cuda_linears import Linears
from octavo.runtime.cuda_step import Step
from octavo.runtime.eager import Layer
from octavo.runtime.torch_weights import DecoderTensors

Op = Callable[..., None]  # op(stages, step) outside the layers, and layer=... in them


class GraphBackend(Backend, Protocol):
    """A candidate that can be captured: it reads its rows on the device whenever it runs."""

    spec: AttentionSpec

    def plan_on_device(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> Any: ...


@dataclass(frozen=True)
class Attention:
    """A KV group's candidates. ``short_prefill`` takes prefill steps whose rows are short, where
    another candidate than the chosen one can."""

    decode: GraphBackend
    prefill: Backend
    short_prefill: GraphBackend | None


class Stages:
    """The stages of a model, over its weights and pools; ``rope`` has the tables of each kind."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderTensors,
        layers: Sequence[Layer],
        attention: Sequence[Attention],
        linears: Linears,
        *,
        max_model_len: int,
    ) -> None:
        self.rope = {
            rope: rope_tables(rope, max_model_len, weights.embed.device)
            for rope in {layer.rope for layer in spec.layers}
        }
        self._spec = spec
        self._dtype = weights.embed.dtype
        self._weights = weights
        self._layers = layers
        self._attention = attention
        self._linears = linears
        self._embed_scale = torch.tensor(
            spec.embed_scale, device=weights.embed.device, dtype=self._dtype
        )
        self._program = self._bind()

    def run(self, step: Step) -> Tensor:
        """All stages between the embedding and the head, whose input this returns: [L, hidden]."""
        for op in self._program:
            op(self, step)
        return step.hidden

    def _bind(self) -> list[Op]:
        """The stages as a list of calls, which take this as their first argument: a list that holds
        it would keep its memory until Python looks for cycles."""
        ops: dict[tuple[StageName, ...], Op] = {
            ("norm_qkv",): Stages._norm_qkv,
            ("rope_write",): Stages._rope_write,
            ("attend_split", "attend_merge"): Stages._attend,
            ("out_proj", "reduce_add"): Stages._out_proj,
            ("norm_ffn_up",): Stages._norm_ffn_up,
            ("ffn_down", "reduce_add"): Stages._ffn_down,
            ("norm_head",): Stages._norm_head,
        }
        stages = [stage for stage in lower(self._spec) if stage.name not in ("embed", "sample")]
        return [
            op if layer is None else partial(op, layer=self._layers[layer])
            for op, layer in cover(stages, ops)
        ]

    def embedded(self, ids: Tensor) -> Tensor:
        """[T, hidden] of ids [T]."""
        x = F.embedding(ids, self._weights.embed)
        return x if self._spec.embed_scale == 1.0 else x * self._embed_scale

    def _norm_qkv(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        x = self._normed(step, weights.attn_norm)
        step.qkv = step.products.qkv(x, weights.qkv, weights.qkv_bias)

    def _rope_write(self, step: Step, layer: Layer) -> None:
        step.q = rope_write(
            step.qkv,
            step.positions,
            *self.rope[layer.rope],
            layer.k_cache,
            layer.v_cache,
            step.groups[layer.group].slots,
            num_heads=self._spec.num_heads,
            qk_norm=layer.weights.qk_norm,
            eps=self._spec.norm_eps,
        )

    def _attend(self, step: Step, layer: Layer) -> None:
        group, caches = step.groups[layer.group], (layer.k_cache, layer.v_cache)
        runs: list[tuple[Backend, Any, slice]] = []
        if group.decode_plan is not None:
            decode = self._attention[layer.group].decode
            runs.append((decode, group.decode_plan, slice(step.num_decodes)))
        if group.prefill is not None:
            runs.append((group.prefill, group.prefill_plan, slice(step.num_decodes, None)))
        if len(runs) == 1:  # a candidate that can't write into what it is given needn't copy
            [(backend, plan, _)] = runs
            step.attention, _ = backend.run(step.q, *caches, plan)
        else:
            step.attention = with_room(step.q, *step.q.shape)
            for backend, plan, part in runs:
                backend.run(step.q[part], *caches, plan, out=step.attention[part])
        if layer is self._layers[-1]:
            step.keep_wanted(self._linears.wanted)

    def _out_proj(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        step.delta = step.products.added(step.attention.flatten(1), weights.o, weights.o_bias)
        step.post_norm = weights.attn_post_norm

    def _norm_ffn_up(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        x = self._normed(step, weights.ffn_norm)
        activation = self._spec.activation
        step.ffn = step.products.gated(x, weights.gate_up, weights.gate_up_bias, activation)

    def _ffn_down(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        step.delta = step.products.added(step.ffn, weights.down, weights.down_bias)
        step.post_norm = weights.ffn_post_norm

    def _norm_head(self, step: Step) -> None:
        step.hidden = self._normed(step, self._weights.final_norm)

    def _normed(self, step: Step, weight: Tensor) -> Tensor:
        """The norm of x, with what is to be added to it added first."""
        normed = add_rms_norm(
            step.x,
            weight,
            self._spec.norm_eps,
            delta=step.delta,
            post_weight=step.post_norm,
            dtype=self._dtype,
        )
        step.delta = step.post_norm = None
        assert normed is not None
        return normed

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [n, vocab] of normed rows, float32 where they are capped."""
        cap, head = self._spec.logit_soft_cap, self._weights.head
        product = out if cap is None else None
        logits = self._linears.head(hidden, head, out=product)
        if cap is None:
            return logits
        capped = cap * torch.tanh(logits.float() / cap)
        return capped if out is None else out.copy_(capped)


def rope_tables(rope: RopeSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [length, rotary_dim / 2], as ``models/rope.py`` has them."""
    frequencies = torch.from_numpy(inverse_frequencies(rope).copy()).to(device)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
