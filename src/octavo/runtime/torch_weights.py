"""A model's weights as torch tensors of one dtype: widened at load, fused as they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.checkpoint.quants import dequantize
from octavo.checkpoint.tensor import Checkpoint, WeightTensor
from octavo.models.spec import DecoderSpec
from octavo.models.weights import Weight, layer_weights, outer_weights

_TASK_WEIGHTS = 1 << 22  # a thread's portion: large matrices are shared between threads
_DUMMY_STD = 0.02


@dataclass(frozen=True)
class LayerTensors:
    """Matrices ``[out, in]`` and biases in the compute dtype; norms float32, offset included."""

    attn_norm: Tensor
    qkv: Tensor  # rows of q, then k, then v
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + KV heads, head_dim]
    o: Tensor
    o_bias: Tensor | None
    attn_post_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor  # rows of gate, then up
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    ffn_post_norm: Tensor | None


@dataclass(frozen=True)
class DecoderTensors:
    """``embed`` and ``head`` are ``[vocab, hidden]``; in a tied model they are the same tensor."""

    embed: Tensor
    layers: tuple[LayerTensors, ...]
    final_norm: Tensor
    head: Tensor


def load_weights(
    spec: DecoderSpec, checkpoint: Checkpoint, *, device: str, dtype: torch.dtype, num_threads: int
) -> DecoderTensors:
    """Read a checkpoint that ``check_weights`` has accepted, several tensors at once."""
    offset = 0.0 if checkpoint.norms_include_one else spec.norm_offset
    with ThreadPoolExecutor(num_threads) as pool:
        pending = []

        def fill(target: Tensor, weight: Weight) -> None:
            for task in _widening_tasks(checkpoint.tensors[weight.name], target):
                pending.append(pool.submit(task))

        def norm(weight: Weight) -> Tensor:
            values = checkpoint.tensors[weight.name].to_float32() + offset
            return torch.from_numpy(values).to(device)

        tensors = _build(spec, device, dtype, fill, norm)
        for task in pending:
            task.result()
    return tensors


def random_weights(
    spec: DecoderSpec, *, device: str, dtype: torch.dtype, seed: int
) -> DecoderTensors:
    """Small random weights in the model's real shapes, for measuring speed."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(target: Tensor, weight: Weight) -> None:
        target.normal_(std=_DUMMY_STD, generator=generator)

    def norm(weight: Weight) -> Tensor:
        return torch.ones(weight.shape, device=device)

    return _build(spec, device, dtype, fill, norm)


def _build(
    spec: DecoderSpec,
    device: str,
    dtype: torch.dtype,
    fill: Callable[[Tensor, Weight], None],
    norm: Callable[[Weight], Tensor],
) -> DecoderTensors:
    """Allocate everything; ``fill`` writes a matrix or bias, ``norm`` makes a norm's weight."""

    def stacked(weights: Mapping[str, Weight], *roles: str) -> Tensor:
        """The roles' rows, one below the other."""
        parts = [weights[role] for role in roles]
        rows = sum(part.shape[0] for part in parts)
        whole = torch.empty(rows, *parts[0].shape[1:], device=device, dtype=dtype)
        start = 0
        for part in parts:
            fill(whole[start : start + part.shape[0]], part)
            start += part.shape[0]
        return whole

    def optional(weights: Mapping[str, Weight], *roles: str) -> Tensor | None:
        return stacked(weights, *roles) if roles[0] in weights else None

    def optional_norm(weights: Mapping[str, Weight], role: str) -> Tensor | None:
        return norm(weights[role]) if role in weights else None

    def qk_norm(weights: Mapping[str, Weight]) -> Tensor | None:
        if "q_norm" not in weights:
            return None
        q, k = norm(weights["q_norm"]), norm(weights["k_norm"])
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def layer(weights: Mapping[str, Weight]) -> LayerTensors:
        return LayerTensors(
            attn_norm=norm(weights["attn_norm"]),
            qkv=stacked(weights, "q", "k", "v"),
            qkv_bias=optional(weights, "q_bias", "k_bias", "v_bias"),
            qk_norm=qk_norm(weights),
            o=stacked(weights, "o"),
            o_bias=optional(weights, "o_bias"),
            attn_post_norm=optional_norm(weights, "attn_post_norm"),
            ffn_norm=norm(weights["ffn_norm"]),
            gate_up=stacked(weights, "gate", "up"),
            gate_up_bias=optional(weights, "gate_bias", "up_bias"),
            down=stacked(weights, "down"),
            down_bias=optional(weights, "down_bias"),
            ffn_post_norm=optional_norm(weights, "ffn_post_norm"),
        )

    outer = outer_weights(spec)
    embed = stacked(outer, "embed")
    return DecoderTensors(
        embed=embed,
        layers=tuple(layer(layer_weights(spec, i)) for i in range(spec.num_layers)),
        final_norm=norm(outer["final_norm"]),
        head=embed if spec.tied_embeddings else stacked(outer, "head"),
    )


def _widening_tasks(tensor: WeightTensor, target: Tensor) -> list[Callable[[], object]]:
    if len(tensor.shape) == 1:
        return [lambda: target.copy_(torch.from_numpy(tensor.to_float32()))]
    step = max(1, _TASK_WEIGHTS // tensor.shape[1])
    starts = range(0, tensor.shape[0], step)
    return [partial(_widen, tensor, slice(i, i + step), target[i : i + step]) for i in starts]


def _widen(tensor: WeightTensor, rows: slice, target: Tensor) -> None:
    """Rows of a stored matrix into their place; a CPU's float32 needs no copy in between."""
    stored, order = tensor.stored, tensor.row_order
    if order is None:
        stored = stored[rows]
    else:
        order = order[rows]
    if target.dtype == torch.float32 and target.device.type == "cpu":
        dequantize(stored, tensor.format, out=target.numpy(), row_order=order)
    else:
        target.copy_(torch.from_numpy(dequantize(stored, tensor.format, row_order=order)))
