"""The ``eager`` runtime: torch, op by op, for any spec and device.

It is what the other runtimes are compared with, so a stage stands here as the formula that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.candidates import Selection, open_pair
from octavo.attention.spec import AttentionBatch
from octavo.cache.groups import KVGroup
from octavo.checkpoint.tensor import Checkpoint
from octavo.engine.batch import StepBatch
from octavo.engine.sampling import SampleOutput, SamplingBatch, sample
from octavo.models.decoder import StageName, cover, lower
from octavo.models.rope import cos_sin
from octavo.models.spec import DecoderSpec, RopeSpec
from octavo.runtime.torch_weights import (
    DecoderTensors,
    LayerTensors,
    load_weights,
    random_weights,
)

Op = Callable[..., None]  # op(runtime, step) outside the layers, and layer=... in them


@dataclass(frozen=True)
class Layer:
    """What a layer's stages need beside the step. ``group`` is the number of its KV group."""

    weights: LayerTensors
    rope: RopeSpec
    group: int
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True)
class GroupStep:
    """A KV group's part of a step; a phase without rows has no plan."""

    slot_mapping: Tensor  # [T]
    decode_plan: Any | None
    prefill_plan: Any | None


@dataclass
class Step:
    """What the stages of one step read, and what they hand on.

    Of the T tokens the first ``num_decodes`` are rows of a single one: decode attention's part.
    """

    ids: Tensor  # [T]
    num_decodes: int
    rope_rows: Mapping[RopeSpec, tuple[Tensor, Tensor]]  # cos and sin, see _rope_rows
    groups: Sequence[GroupStep]
    logits_indices: Tensor  # [L]
    x: Tensor = field(init=False)  # [T, hidden], the residual stream
    qkv: Tensor = field(init=False)  # [T, q + 2 kv]
    q: Tensor = field(init=False)  # [T, heads, head_dim]
    attention: Tensor = field(init=False)  # [T, heads, head_dim]
    ffn: Tensor = field(init=False)  # [T, intermediate]
    sublayer: Tensor = field(init=False)  # [T, hidden], what is added to x next
    post_norm: Tensor | None = field(init=False)  # that sublayer's post-norm
    logits: Tensor = field(init=False)  # [L, vocab], float32


def load_eager(
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    groups: Sequence[KVGroup],
    selections: Sequence[Selection],
    num_blocks: Sequence[int],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    num_threads: int,
    seed: int = 0,
) -> EagerRuntime:
    """Load a checkpoint that ``check_weights`` has accepted with this spec; without one, make
    random weights (``seed``) in the spec's shapes.

    Weights are widened or rounded to ``dtype``. In float32 products are exact float32 products,
    on every device: no TF32. On a CPU torch then uses ``num_threads`` threads.
    """
    kind = getattr(torch, dtype)
    if kind is torch.float32:
        torch.set_float32_matmul_precision("highest")
    if device == "cpu":
        torch.set_num_threads(num_threads)
    if checkpoint is None:
        weights = random_weights(spec, device=device, dtype=kind, seed=seed)
    else:
        weights = load_weights(spec, checkpoint, device=device, dtype=kind, num_threads=num_threads)
    return EagerRuntime(spec, weights, groups, selections, num_blocks)


def free_device_memory(device: str) -> int:
    """Bytes that a GPU has free now; of the host :func:`octavo.host.free_memory` tells."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


class EagerRuntime:
    """A model on a device: its weights, its KV pools, and the ops for its stages.

    ``groups`` says which layers share a block table; ``selections`` and ``num_blocks`` give the
    attention candidates and the number of blocks of each group. Pools are allocated but not
    touched: on a CPU a block costs memory once it is written.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderTensors,
        groups: Sequence[KVGroup],
        selections: Sequence[Selection],
        num_blocks: Sequence[int],
    ) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.logits = torch.empty(0, spec.vocab_size, device=self.device)  # [L, vocab], float32
        self.num_splits: NDArray[np.int32] | None = None
        self._weights = weights
        self.layers = make_layers(spec, weights, groups, selections, num_blocks)
        self._backends = [open_pair(selection) for selection in selections]
        self._program = self._bind()
        self._ropes = {layer.rope for layer in spec.layers}
        self._embed_scale = torch.tensor(spec.embed_scale, device=self.device, dtype=self.dtype)
        self._row_ids = torch.empty(0, dtype=torch.int64, device=self.device)  # [R]: last sample's

    # ---- the two launches of a step

    def forward(self, batch: StepBatch) -> None:
        """See :class:`octavo.runtime.Runtime`; leaves the step's logits in ``logits``."""
        with torch.inference_mode():
            step = self._begin(batch)
            for op in self._program:
                op(self, step)
            self.logits = step.logits
        self._batch = batch
        splits = getattr(step.groups[0].decode_plan, "splits", None)
        self.num_splits = None if splits is None else splits.num_splits

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        """See :class:`octavo.runtime.Runtime`; the host chooses: the output is its own handle."""
        output = sample(self.logits.cpu().numpy(), batch)
        # An id that couldn't be chosen is -1; its row is about to fail, any id will do for it.
        ids = torch.from_numpy(output.token_ids.clip(min=0)).to(self.device, torch.int64)
        self._row_ids = ids.new_zeros(self._batch.num_rows)
        self._row_ids[self._upload(self._batch.sample_rows)] = ids
        return output

    def wait(self, handle: SampleOutput) -> SampleOutput:
        return handle

    # ---- what a step's stages share

    def _begin(self, batch: StepBatch) -> Step:
        ids = self._upload(batch.input_ids)
        if (batch.input_ids < 0).any():  # still on the device
            rows = self._upload(batch.id_rows)
            ids = torch.where(rows < 0, ids, self._row_ids[rows.clamp(min=0)])
        return Step(
            ids=ids,
            num_decodes=batch.num_decodes,
            rope_rows={rope: self._rope_rows(rope, batch.positions) for rope in self._ropes},
            groups=[self._plan(group, batch) for group in range(len(self._backends))],
            logits_indices=self._upload(batch.logits_indices),
        )

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device, torch.int64)

    def _rope_rows(self, rope: RopeSpec, positions: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, 1, rotary_dim]``, float32; the sine of the first half is negated, so
        that a rotation is ``x * cos + swap_halves(x) * sin``."""
        cos, sin = (torch.from_numpy(rows).to(self.device) for rows in cos_sin(rope, positions))
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def _plan(self, group: int, batch: StepBatch) -> GroupStep:
        prefill, decode = self._backends[group]
        first, rows = batch.num_decodes, batch.num_rows  # decode rows have one token each
        starts, lens, table = batch.query_start_loc, batch.seq_lens, batch.block_table[group]
        decode_plan = prefill_plan = None
        if first > 0:
            decode_plan = decode.plan(
                AttentionBatch(starts[: first + 1], lens[:first], table[:first])
            )
        if first < rows:
            prefill_plan = prefill.plan(
                AttentionBatch(starts[first:] - first, lens[first:], table[first:])
            )
        return GroupStep(self._upload(batch.slot_mapping[group]), decode_plan, prefill_plan)

    # ---- the stages

    def _bind(self) -> list[Op]:
        """The model's stages as a list of calls. An attention candidate splits and merges in one
        call; ``sample`` is a launch of its own. The calls take the runtime as their first argument:
        a list that holds it would keep its memory until Python looks for cycles."""
        ops: dict[tuple[StageName, ...], Op] = {
            ("embed",): EagerRuntime._embed,
            ("norm_qkv",): EagerRuntime._norm_qkv,
            ("rope_write",): EagerRuntime._rope_write,
            ("attend_split", "attend_merge"): EagerRuntime._attend,
            ("out_proj",): EagerRuntime._out_proj,
            ("reduce_add",): EagerRuntime._reduce_add,
            ("norm_ffn_up",): EagerRuntime._norm_ffn_up,
            ("ffn_down",): EagerRuntime._ffn_down,
            ("norm_head",): EagerRuntime._norm_head,
        }
        stages = [stage for stage in lower(self.spec) if stage.name != "sample"]
        return [
            op if layer is None else partial(op, layer=self.layers[layer])
            for op, layer in cover(stages, ops)
        ]

    def _embed(self, step: Step) -> None:
        step.x = F.embedding(step.ids, self._weights.embed) * self._embed_scale

    def _norm_qkv(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        step.qkv = F.linear(self._norm(step.x, weights.attn_norm), weights.qkv, weights.qkv_bias)

    def _rope_write(self, step: Step, layer: Layer) -> None:
        spec = self.spec
        heads = step.qkv.view(len(step.qkv), -1, spec.head_dim)
        qk, v = heads[:, : -spec.num_kv_heads], heads[:, -spec.num_kv_heads :]
        if layer.weights.qk_norm is not None:
            qk = self._norm(qk, layer.weights.qk_norm)
        qk = _rotate(qk, *step.rope_rows[layer.rope])
        step.q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        group = step.groups[layer.group]
        _, backend = self._backends[layer.group]  # either one: they share the pool
        backend.write(k, v, layer.k_cache, layer.v_cache, group.slot_mapping)

    def _attend(self, step: Step, layer: Layer) -> None:
        prefill, decode = self._backends[layer.group]
        group = step.groups[layer.group]
        caches = layer.k_cache, layer.v_cache
        parts = []
        if group.decode_plan is not None:
            parts.append(decode.run(step.q[: step.num_decodes], *caches, group.decode_plan)[0])
        if group.prefill_plan is not None:
            parts.append(prefill.run(step.q[step.num_decodes :], *caches, group.prefill_plan)[0])
        step.attention = parts[0] if len(parts) == 1 else torch.cat(parts)

    def _out_proj(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        step.sublayer = F.linear(step.attention.flatten(1), weights.o, weights.o_bias)
        step.post_norm = weights.attn_post_norm

    def _reduce_add(self, step: Step, layer: Layer) -> None:
        if step.post_norm is not None:
            step.sublayer = self._norm(step.sublayer, step.post_norm)
        step.x = step.x + step.sublayer

    def _norm_ffn_up(self, step: Step, layer: Layer) -> None:
        weights = layer.weights
        gate, up = F.linear(
            self._norm(step.x, weights.ffn_norm), weights.gate_up, weights.gate_up_bias
        ).chunk(2, dim=-1)
        if self.spec.activation == "silu":
            step.ffn = F.silu(gate) * up
        else:
            step.ffn = F.gelu(gate, approximate="tanh") * up

    def _ffn_down(self, step: Step, layer: Layer) -> None:
        step.sublayer = F.linear(step.ffn, layer.weights.down, layer.weights.down_bias)
        step.post_norm = layer.weights.ffn_post_norm

    def _norm_head(self, step: Step) -> None:
        x = self._norm(step.x[step.logits_indices], self._weights.final_norm)
        logits = F.linear(x, self._weights.head).float()
        cap = self.spec.logit_soft_cap
        step.logits = logits if cap is None else cap * torch.tanh(logits / cap)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension, computed in float32."""
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.spec.norm_eps)
        return (normed * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head of ``x [T, heads, head_dim]``."""
    rotary_dim = cos.shape[-1]
    turning = x[..., :rotary_dim]
    turned = (turning * cos + turning.roll(rotary_dim // 2, dims=-1) * sin).to(x.dtype)
    if rotary_dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def make_layers(
    spec: DecoderSpec,
    weights: DecoderTensors,
    groups: Sequence[KVGroup],
    selections: Sequence[Selection],
    num_blocks: Sequence[int],
) -> list[Layer]:
    """Every layer with its pool, in the layout that its group's candidates share."""
    device = weights.embed.device
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}

    def layer(index: int) -> Layer:
        group = group_of[index]
        layout = selections[group].kv_layout(num_blocks[group])
        dtype = getattr(torch, layout.dtype)
        return Layer(
            weights.layers[index],
            spec.layers[index].rope,
            group,
            torch.empty(layout.k_shape, dtype=dtype, device=device),
            torch.empty(layout.v_shape, dtype=dtype, device=device),
        )

    return [layer(index) for index in range(spec.num_layers)]
