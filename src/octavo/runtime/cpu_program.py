"""A model's stages bound to ops: a step's buffers, and the calls that work on them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.attention.cpu_step import (
    CpuPlan,
    decode_calls,
    prefill_call,
    restore_calls,
    rope_write_call,
)
from octavo.attention.spec import AttentionSpec
from octavo.kernels.linear.cpu import embed, linear
from octavo.kernels.linear.cpu_q8 import q8_rows
from octavo.kernels.logits.cpu import finish_logits
from octavo.kernels.norm.cpu import add_norm
from octavo.kernels.program import Call, Program, buffer
from octavo.kernels.quantize.cpu import quantize
from octavo.models.decoder import StageName, cover, lower
from octavo.models.spec import DecoderSpec, RopeSpec
from octavo.runtime.cpu_weights import DecoderWeights, LayerWeights, Linear, takes_q8

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

Rows = Literal["all", "decode", "prefill"]  # which rows of a step a call works for


@dataclass(frozen=True)
class Activation:
    """Rows that a product reads: as float32, and quantised too where a product wants them so."""

    floats: Float32  # [T, width]
    q8: Array | None  # [T, row bytes], see octavo.kernels.linear

    @property
    def width(self) -> int:
        return int(self.floats.shape[1])


class Buffers:
    """What a step of up to ``tokens`` tokens reads and writes, in pages that cost memory once they
    are written. The host writes the first five before a program runs."""

    def __init__(self, spec: DecoderSpec, tokens: int, *, quantised: bool) -> None:
        self.num_tokens: Int64 = np.zeros(1, np.int64)
        self.num_logits: Int64 = np.zeros(1, np.int64)
        self.ids: Int32 = np.empty(tokens, np.int32)
        self.logits_indices: Int32 = np.empty(tokens, np.int32)
        self.ropes: dict[RopeSpec, tuple[Float32, Float32]] = {
            rope: (
                floats(tokens, rope.rotary_dim // 2),
                floats(tokens, rope.rotary_dim // 2),
            )
            for rope in {layer.rope for layer in spec.layers}
        }
        self.x = floats(tokens, spec.hidden_size)  # the residual stream
        # What is normed before it is added.
        self.sublayer = floats(tokens, spec.hidden_size)
        self.qkv = floats(tokens, spec.q_size + 2 * spec.kv_size)
        self.q = floats(tokens, spec.num_heads, spec.head_dim)

        def activation(width: int) -> Activation:
            return Activation(floats(tokens, width), q8_rows(tokens, width) if quantised else None)

        self.normed = activation(spec.hidden_size)
        self.attended = activation(spec.q_size)
        self.ffn = activation(spec.intermediate_size)


@dataclass(frozen=True)
class Attention:
    """One KV group's attention, and its plan for the step."""

    spec: AttentionSpec
    plan: CpuPlan


class Programs:
    """The programs of a model: one for each mix of rows that a step may have.

    ``logits`` [capacity, vocab] float32 and ``best`` [capacity] int32, the index of each row's
    largest, are what a step leaves.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        buffers: Buffers,
        attention: Sequence[Attention],  # of each layer
        pools: Sequence[tuple[Array, Array]],  # of each layer, keys and values
        *,
        exact: bool,
    ) -> None:
        self._spec, self._weights, self._buffers = spec, weights, buffers
        self._attention, self._pools, self._exact = attention, pools, exact
        self._calls: list[tuple[Call, Rows]] = []
        self._pending: dict[str, Array | int] = _NOTHING_TO_ADD
        self._bind()
        self.logits: Float32 = floats(0, spec.vocab_size)
        self.best: Int32 = np.empty(0, np.int32)
        self.make_room(1)

    def make_room(self, num_logits: int) -> None:
        """See to it that ``logits`` has at least so many rows."""
        if num_logits <= len(self.best):
            return
        self.logits = floats(num_logits, self._spec.vocab_size)
        self.best = np.empty(num_logits, np.int32)
        calls: list[tuple[Call, Rows]] = [*self._calls, *((c, "all") for c in self._head())]
        self._programs = {
            (decode, prefill): Program(
                [
                    call
                    for call, rows in calls
                    if rows == "all" or (decode if rows == "decode" else prefill)
                ]
            )
            for decode, prefill in ((True, False), (False, True), (True, True))
        }
        self._several: dict[int, Program] = {}

    def program(self, *, decode: bool, prefill: bool) -> Program:
        """The program for a step with rows of one token, with longer ones, or with both."""
        return self._programs[decode, prefill]

    def several(self, steps: int, between: Call) -> Program:
        """So many decode steps in one program, with a call behind each: always the same one."""
        if steps not in self._several:
            self._several[steps] = Program([*self._programs[True, False].calls, between] * steps)
        return self._several[steps]

    # ---- the stages

    def _bind(self) -> None:
        ops: dict[tuple[StageName, ...], Callable[..., None]] = {
            ("embed",): self._embed,
            ("norm_qkv",): self._norm_qkv,
            ("rope_write",): self._rope_write,
            ("attend_split", "attend_merge"): self._attend,
            ("out_proj", "reduce_add"): self._out_proj,
            ("norm_ffn_up",): self._norm_ffn_up,
            ("ffn_down", "reduce_add"): self._ffn_down,
        }
        stages = [s for s in lower(self._spec) if s.name not in ("norm_head", "sample")]
        for bind, layer in cover(stages, ops):
            if layer is None:
                bind()
            else:
                bind(layer, self._weights.layers[layer])

    def _embed(self) -> None:
        self._add(
            embed(
                self._weights.embed,
                num_tokens=self._buffers.num_tokens,
                input_ids=self._buffers.ids,
                out=self._buffers.x,
                out_stride=self._buffers.x.strides[0],
                factor=self._spec.embed_scale,
            )
        )

    def _norm_qkv(self, layer: int, weights: LayerWeights) -> None:
        buffers, start = self._buffers, 0
        self._add(self._norm(weights.attn_norm, weights.qkv))
        for part in weights.qkv:
            rows = part.weights.rows
            self._add(self._linear(part, buffers.normed, buffers.qkv[:, start : start + rows]))
            start += rows

    def _rope_write(self, layer: int, weights: LayerWeights) -> None:
        buffers, attention, rope = (
            self._buffers,
            self._attention[layer],
            self._spec.layers[layer].rope,
        )
        cos, sin = buffers.ropes[rope]
        k_cache, v_cache = self._pools[layer]
        self._add(
            rope_write_call(
                attention.spec,
                attention.plan,
                qkv=buffers.qkv,
                q=buffers.q,
                cos=cos,
                sin=sin,
                k_cache=k_cache,
                v_cache=v_cache,
                rotary_dim=rope.rotary_dim,
                qk_norm=weights.qk_norm,
                norm_eps=self._spec.norm_eps,
            )
        )

    def _attend(self, layer: int, weights: LayerWeights) -> None:
        attention = self._attention[layer]
        k_cache, v_cache = self._pools[layer]
        out = self._buffers.attended.floats
        places: dict[str, Array] = {
            "q": self._buffers.q,
            "out": out.reshape(len(out), self._spec.num_heads, self._spec.head_dim),
            "k_cache": k_cache,
            "v_cache": v_cache,
        }
        for call in decode_calls(attention.spec, attention.plan, **places):
            self._add(call, "decode")
        # 8-bit activations err more than bfloat16 queries and weights do.
        rounds = all(self._mode(part) == "q8" for part in weights.qkv)
        spec = replace(attention.spec, dtype="bfloat16") if rounds else attention.spec
        self._add(prefill_call(spec, attention.plan, **places), "prefill")
        for call in restore_calls(attention.spec, count=self._buffers.num_tokens, out=out):
            self._add(call)

    def _out_proj(self, layer: int, weights: LayerWeights) -> None:
        source = self._buffers.attended
        if self._mode(weights.o) == "q8":
            assert source.q8 is not None
            self._add(
                quantize.bind(
                    count=self._buffers.num_tokens,
                    x=source.floats,
                    columns=source.width,
                    out=source.q8,
                    out_stride=source.q8.strides[0],
                )
            )
        self._add_to_residual(weights.o, source, weights.attn_post_norm)

    def _norm_ffn_up(self, layer: int, weights: LayerWeights) -> None:
        buffers = self._buffers
        self._add(self._norm(weights.ffn_norm, [weights.gate_up]))
        q8 = buffers.ffn.q8 if self._mode(weights.down) == "q8" else None
        self._add(
            self._linear(
                weights.gate_up,
                buffers.normed,
                buffers.ffn.floats if q8 is None else 0,
                activation=self._spec.activation,
                out_q8=0 if q8 is None else q8,
                out_q8_stride=0 if q8 is None else q8.strides[0],
            )
        )

    def _ffn_down(self, layer: int, weights: LayerWeights) -> None:
        self._add_to_residual(weights.down, self._buffers.ffn, weights.ffn_post_norm)

    def _head(self) -> list[Call]:
        """Of the wanted rows only."""
        buffers, spec = self._buffers, self._spec
        head = Linear(self._weights.head, None)
        norm = self._norm(
            self._weights.final_norm, [head], count=buffers.num_logits, rows=buffers.logits_indices
        )
        finish = finish_logits.bind(
            count=buffers.num_logits,
            logits=self.logits,
            width=spec.vocab_size,
            cap=spec.logit_soft_cap or 0.0,
            best=self.best,
        )
        count = buffers.num_logits
        return [norm, self._linear(head, buffers.normed, self.logits, count=count), finish]

    # ---- what stages have in common

    def _add(self, call: Call, rows: Rows = "all") -> None:
        self._calls.append((call, rows))

    def _mode(self, part: Linear) -> str:
        return "q8" if takes_q8(part.weights) and not self._exact else "exact"

    def _norm(
        self,
        weight: Float32,
        readers: Sequence[Linear],
        *,
        count: Array | None = None,
        rows: Array | int = 0,
    ) -> Call:
        """The norm in front of a product, behind what is still to be added to the residual."""
        buffers = self._buffers
        q8 = buffers.normed.q8 if any(self._mode(each) == "q8" for each in readers) else None
        return add_norm.bind(
            count=buffers.num_tokens if count is None else count,
            rows=rows,
            x=buffers.x,
            **self._pending,
            weight=weight,
            width=self._spec.hidden_size,
            eps=self._spec.norm_eps,
            out=buffers.normed.floats,
            out_q8=0 if q8 is None else q8,
            q8_stride=0 if q8 is None else q8.strides[0],
        )

    def _add_to_residual(self, part: Linear, source: Activation, post_norm: Float32 | None) -> None:
        """A sublayer's last product: added as it is made, or, where it is normed first, by the next
        norm."""
        if post_norm is None:
            self._pending = _NOTHING_TO_ADD
            self._add(self._linear(part, source, self._buffers.x, accumulate=True))
        else:
            self._pending = {"y": self._buffers.sublayer, "post_weight": post_norm}
            self._add(self._linear(part, source, self._buffers.sublayer))

    def _linear(
        self,
        part: Linear,
        source: Activation,
        out: Float32 | int,
        *,
        count: Array | None = None,
        **options: Any,
    ) -> Call:
        mode = self._mode(part)
        rows = source.q8 if mode == "q8" else source.floats
        assert rows is not None
        return linear(
            part.weights,
            num_tokens=self._buffers.num_tokens if count is None else count,
            mode=mode,
            x=rows,
            x_stride=rows.strides[0],
            out=out,
            out_stride=0 if isinstance(out, int) else out.strides[0],
            bias=0 if part.bias is None else part.bias,
            **options,
        )


_NOTHING_TO_ADD: dict[str, Array | int] = {"y": 0, "post_weight": 0}


def floats(*shape: int) -> Float32:
    """Zeros of a shape, in a buffer of their own."""
    return buffer(4 * prod(shape)).view(np.float32).reshape(shape)
