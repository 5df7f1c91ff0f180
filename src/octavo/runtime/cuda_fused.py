"""Decode steps in five launches a layer, for the ``cuda`` runtime.

A step of few rows is bound by the number of kernels that wait for one another, not by their bytes.
Each kernel here covers several stages and begins before the one in front has ended. The residual
stream is float32. A norm is done in two halves: whoever writes ``x`` also writes ``h``, x times the
weight of the norm that comes next, and its sums of squares; whoever reads ``h`` scales the product.

There are two sets of products. Those of few rows are best up to 16. Those in fixed sums, on Hopper,
take any number of rows: deterministic, every step goes by them, else steps of up to
:func:`most_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.embed.triton import embed
from octavo.kernels.embed.triton import square_columns as embed_squares
from octavo.kernels.linear.tiles import MAX_ROWS, MOST_ROWS
from octavo.kernels.linear_add import triton as add
from octavo.kernels.linear_fixed import fused as fixed
from octavo.kernels.norm_gate_up import triton as gate_up
from octavo.kernels.norm_linear import triton as linear
from octavo.kernels.rope_attention import triton as attention
from octavo.kernels.step_inputs.layout import StepInputs
from octavo.kernels.triton_launch import has_warpgroups
from octavo.models.spec import DecoderSpec, RopeSpec
from octavo.runtime.eager import Layer
from octavo.runtime.fused_limits import refusal
from octavo.runtime.torch_weights import DecoderTensors

Cuts = tuple[attention.Cut, ...]  # of each KV group

SHARE = 256  # keys; with 128 deterministic steps were slower


@dataclass(frozen=True)
class Products:
    """The kernels that multiply."""

    norm_linear: Callable[..., None]
    norm_gate_up: Callable[..., None]
    linear_add: Callable[..., None]
    square_columns: Callable[[int, int, int], int]


FEW_ROWS = Products(linear.norm_linear, gate_up.norm_gate_up, add.linear_add, add.square_columns)
FIXED = Products(fixed.norm_linear, fixed.norm_gate_up, fixed.linear_add, fixed.square_columns)


@dataclass(frozen=True)
class Way:
    """How steps of up to ``max_rows`` rows are fused; ``attention_specs`` are of each KV group."""

    max_rows: int
    products: Products
    attention_specs: Sequence[AttentionSpec]


@dataclass(frozen=True)
class _Buffers:
    """What the kernels of a step of M rows hand on."""

    x: Tensor  # [M, hidden] float32
    h: Tensor  # [M, hidden]
    embedded: Tensor  # sums of squares of x, by its writer: [M, any] float32
    added: Tensor
    downed: Tensor
    qkv: Tensor  # [M, q + 2 kv]
    attention: Tensor  # [M, heads * head_dim]
    ffn: Tensor  # [M, intermediate]


def fused_ways(
    spec: DecoderSpec,
    dtype: torch.dtype,
    attention_specs: Sequence[AttentionSpec],
    max_rows: int,
    *,
    deterministic: bool,
) -> list[Way]:
    """How a model's decode steps of up to ``max_rows`` rows can be fused: a step goes the first way
    that has room for its rows, or unfused where none has. Deterministic, all go one way or none
    does; attention must be in ``fixed`` splits."""
    split_mode = "auto" if deterministic else attention_specs[0].split_mode
    if refusal(spec, str(dtype).removeprefix("torch."), split_mode):
        return []
    if not all(attention.supports(one).ok for one in attention_specs):
        return []
    if deterministic:
        return [] if _fixed_refusal(spec) else [Way(max_rows, FIXED, attention_specs)]
    # At 16 rows of Qwen3-8B the library's four products take 112 us a layer, ours 141.
    few_rows = MAX_ROWS if spec.hidden_size < 4096 else MAX_ROWS // 2
    ways = [Way(few_rows, FEW_ROWS, attention_specs)]
    if max_rows > few_rows and most_rows(spec) and not _fixed_refusal(spec):
        ways.append(Way(most_rows(spec), FIXED, [_in_shares(one) for one in attention_specs]))
    return ways


def most_rows(spec: DecoderSpec) -> int:
    """Up to how many rows fixed products are taken where they needn't be. A step beside the
    library's (``bench/gpu_engine.py steps``), by the kernels of 2026-11-30: Qwen3-0.6B 0.71 to 0.83
    at 17 rows, 0.79 to 0.95 at 32, 1.00 at 48; 1.7B 0.91 at 17, 0.97 at 32, 1.35 at 64; 4B 1.19 at
    17. Today's are faster, and so are the others: up to where they pay isn't measured again."""
    return MOST_ROWS if spec.hidden_size <= 2048 else 0


def _in_shares(spec: AttentionSpec) -> AttentionSpec:
    """For many rows: cut after every few keys, a long row has more blocks than a short one, where
    ``auto`` would give each the same number."""
    if spec.split_mode == "off":
        return spec
    return replace(spec, split_mode="fixed", split_tokens=SHARE)


def _fixed_refusal(spec: DecoderSpec) -> str:
    """Why a model's fixed steps are better not fused, as a phrase, or nothing."""
    if not has_warpgroups():
        return "the products of more than one row are made by instructions of Hopper"
    if spec.hidden_size >= 4096:
        return "steps of many rows of large weights are faster by other instructions"
    return ""


class FusedDecode:
    """Decode steps that go one way; see the module."""

    def __init__(
        self,
        way: Way,
        spec: DecoderSpec,
        weights: DecoderTensors,
        layers: Sequence[Layer],
        inputs: StepInputs,
        rope: Mapping[RopeSpec, tuple[Tensor, Tensor]],
    ) -> None:
        self.max_rows = way.max_rows
        # The head of more rows is faster by other products.
        self.has_head = way.products is FEW_ROWS
        self._products = way.products
        self._spec = spec
        self._weights = weights
        self._layers = layers
        self._attention_specs = way.attention_specs
        self._inputs = inputs
        self._rope = rope
        self._num_sms = 132
        if weights.embed.is_cuda:
            gpu = torch.cuda.get_device_properties(weights.embed.device)
            self._num_sms = gpu.multi_processor_count
        self._scratch = [
            attention.make_scratch(one, way.max_rows, attention.most_splits(one, self._num_sms))
            for one in way.attention_specs
        ]
        self._buffers: dict[int, _Buffers] = {}

    def cuts(self, num_rows: int, longest: int) -> Cuts:
        """How attention cuts the histories of a step whose longest row has so many tokens; a graph
        is captured for one."""
        return tuple(
            attention.choose_cut(one, num_rows, longest, self._num_sms)
            for one in self._attention_specs
        )

    def launch(self, num_rows: int, cuts: Cuts, logits: Tensor) -> None:
        """Carry out a step that is laid out in the inputs; ``logits`` [M, vocab] get all rows'.
        Only where this :attr:`has_head`."""
        spec = self._spec
        b = self._launch_layers(num_rows, cuts)
        self._products.norm_linear(
            b.h,
            b.downed,
            self._weights.head,
            logits,
            eps=spec.norm_eps,
            soft_cap=spec.logit_soft_cap,
        )

    def launch_layers(self, num_rows: int, cuts: Cuts) -> Tensor:
        """Of a step's first rows, all but the last norm and the head: the residual stream [M,
        hidden], float32, which stays until the next launch."""
        return self._launch_layers(num_rows, cuts).x

    def _launch_layers(self, num_rows: int, cuts: Cuts) -> _Buffers:
        spec, weights, inputs, products = self._spec, self._weights, self._inputs, self._products
        eps = spec.norm_eps
        b = self.buffers_of(num_rows)
        first = self._layers[0].weights.attn_norm
        embed(
            inputs.ids[:num_rows],
            weights.embed,
            first,
            b.x,
            b.h,
            b.embedded,
            scale=spec.embed_scale,
        )
        squares = b.embedded
        norms = [layer.weights.attn_norm for layer in self._layers[1:]] + [weights.final_norm]
        for layer, next_norm in zip(self._layers, norms, strict=True):
            own, group = layer.weights, layer.group
            products.norm_linear(b.h, squares, own.qkv, b.qkv, eps=eps, bias=own.qkv_bias)
            qk_norm = own.qk_norm
            attention.rope_attention(
                self._attention_specs[group],
                b.qkv,
                layer.k_cache,
                layer.v_cache,
                inputs.tables[group, :num_rows],
                inputs.seq_lens[:num_rows],
                inputs.slots[group, :num_rows],
                *self._rope[layer.rope],
                b.attention,
                cut=cuts[group],
                scratch=self._scratch[group],
                q_norm=None if qk_norm is None else qk_norm[0],
                k_norm=None if qk_norm is None else qk_norm[-1],
                eps=eps,
            )
            products.linear_add(
                b.attention, own.o, b.x, own.ffn_norm, b.h, b.added, bias=own.o_bias
            )
            products.norm_gate_up(
                b.h,
                b.added,
                own.gate_up,
                b.ffn,
                eps=eps,
                activation=spec.activation,
                bias=own.gate_up_bias,
            )
            products.linear_add(b.ffn, own.down, b.x, next_norm, b.h, b.downed, bias=own.down_bias)
            squares = b.downed
        return b

    def buffers_of(self, num_rows: int) -> _Buffers:
        """Those of steps of so many rows. Steps by fixed products, whose sums of squares are as
        many for any number of rows, share theirs."""
        held = self.max_rows if self._products is FIXED else num_rows
        if held not in self._buffers:
            self._buffers[held] = self._make_buffers(held)
        b = self._buffers[held]
        if held == num_rows:
            return b
        return _Buffers(**{name: buffer[:num_rows] for name, buffer in vars(b).items()})

    def _make_buffers(self, num_rows: int) -> _Buffers:
        spec, device = self._spec, self._weights.embed.device

        def floats(columns: int) -> Tensor:
            return torch.empty(num_rows, columns, dtype=torch.float32, device=device)

        def halves(columns: int) -> Tensor:
            return torch.empty(num_rows, columns, dtype=torch.bfloat16, device=device)

        hidden, inner = spec.hidden_size, spec.intermediate_size
        return _Buffers(
            x=floats(hidden),
            h=halves(hidden),
            embedded=floats(embed_squares(hidden)),
            added=floats(self._products.square_columns(hidden, spec.q_size, num_rows)),
            downed=floats(self._products.square_columns(hidden, inner, num_rows)),
            qkv=halves(spec.q_size + 2 * spec.kv_size),
            attention=halves(spec.q_size),
            ffn=halves(inner),
        )
