"""The ``ascend_fia`` candidate: Huawei's fused operator on an Ascend NPU.

``torch_npu.npu_fused_infer_attention_score_v2`` reads a paged pool and returns the log-sum-exp, so
what is left is to translate: names, shapes, lengths, masks, the sign of an empty segment; and to
cut long histories where the operator doesn't. No NPU has run this yet; docs/ascend.md tells how to
accept it on one.

``OCTAVO_ASCEND_FIA_LAYOUT`` sets the operator's layout, on which its limits depend and whether it
splits by itself:

- ``BNSD`` (default) and ``BSND``: any head size; decode goes to the operator's incremental kernel,
  which cuts long histories by itself; no sliding window.
- ``TND``: sliding windows, prefill of all rows in one call; head size 128 (or 64 without GQA).
  Decode goes to the prompt kernel, which doesn't cut, so the plan's segments are rows of their own.

Facts and their sources: docs/ascend.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.attention.merge import merge_lse, merge_sinks, natural_lse
from octavo.attention.spec import AttentionBatch, AttentionSpec, KVLayout, Support, placed
from octavo.attention.splits import SplitCost, SplitPlan, plan_splits
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["BNSD", "BSND", "TND"]
LAYOUT_VARIABLE = "OCTAVO_ASCEND_FIA_LAYOUT"

DTYPES = ("bfloat16", "float16")
MAX_HEADS = 256
MAX_GROUP = 64
MAX_HEAD_DIM = 512
TND_HEAD_DIMS = ((128, 128), (192, 128), (192, 192))  # of keys and of values
MAX_TOKEN_ELEMENTS = 65535  # of one token's keys in BSND, whose pool has three dimensions
MAX_POOL_ELEMENTS = 2**31 - 1  # of a layer's keys, which the operator counts in int32
MAX_ROWS = 4096  # of one call in TND; the other layouts take more
MAX_DECODE_TOKENS = 262_144  # of one row in BNSD and BSND
OWN_SPLIT_TOKENS = 1024  # a row that is no longer the operator never cuts
MASK_SIZE = 2048  # the side of the mask that stands for causality at any length

# Not measured, as nobody had an NPU. The length is that from which the operator's own splitting
# starts; no block is longer, so that a cut is always a block's beginning.
COST = SplitCost(min_tokens=1024, merge_tokens=512)
CORES = 20  # of the smallest Atlas A2, where torch_npu doesn't tell


class AscendFiaCandidate:
    """``layout`` is that of the environment variable unless given."""

    name = "ascend_fia"

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or _layout_setting()

    def supports(self, spec: AttentionSpec) -> Support:
        reason = next(_refusals(spec, self.layout), "")
        return Support(not reason, reason)

    def kv_layout(self, spec: AttentionSpec, num_blocks: int) -> KVLayout:
        """Raises ConfigError for a pool that the operator can't address."""
        heads, block_size = spec.num_kv_heads, spec.block_size
        block_elements = heads * block_size * max(spec.head_dim, spec.v_head_dim)
        if num_blocks * block_elements > MAX_POOL_ELEMENTS:
            raise ConfigError(
                f"ascend_fia can't address {num_blocks:,} blocks of {block_size} tokens: a layer's "
                f"keys may have at most {MAX_POOL_ELEMENTS:,} elements; set "
                f"num_gpu_blocks_override to at most {MAX_POOL_ELEMENTS // block_elements:,}"
            )

        def shape(head_dim: int) -> tuple[int, ...]:
            if self.layout == "BSND":
                return num_blocks, block_size, heads * head_dim
            return num_blocks, heads, block_size, head_dim

        order = "NHD" if self.layout == "BSND" else "HND"
        return KVLayout(shape(spec.head_dim), shape(spec.v_head_dim), order, order, spec.kv_dtype)

    def open(self, spec: AttentionSpec) -> AscendFiaBackend:
        """Raises ConfigError where torch_npu is too old to have the operator."""
        return AscendFiaBackend(spec, self.layout)


def _layout_setting() -> Layout:
    value = os.environ.get(LAYOUT_VARIABLE, "BNSD")
    if value not in get_args(Layout):
        raise ConfigError(
            f"{LAYOUT_VARIABLE} is {value!r}; the layouts are {', '.join(get_args(Layout))}"
        )
    return cast(Layout, value)


def _refusals(spec: AttentionSpec, layout: Layout) -> Iterator[str]:
    """What of the spec the operator can't do in this layout, as phrases for people."""
    group, rest = divmod(spec.num_heads, spec.num_kv_heads)
    head_dims = spec.head_dim, spec.v_head_dim
    if spec.device.partition(":")[0] != "npu":
        yield f"runs on Ascend NPUs, not on {spec.device}"
    if find_spec("torch_npu") is None:
        yield "the package torch_npu isn't installed"
    if spec.graph:
        yield "takes lengths from the host, so a captured call would keep the old ones"
    if spec.dtype not in DTYPES:
        yield f"computes in {' or '.join(DTYPES)}, not in {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        yield f"keys and values in {spec.kv_dtype} don't go with queries in {spec.dtype}"
    if spec.soft_cap is not None:
        yield "has no soft cap"
    if rest:
        yield f"{spec.num_heads} query heads aren't a multiple of {spec.num_kv_heads}"
    if spec.num_heads > MAX_HEADS:
        yield f"{spec.num_heads} query heads are more than {MAX_HEADS}"
    if group > MAX_GROUP:
        yield f"{group} query heads a KV head are more than {MAX_GROUP}"
    if layout == "TND":
        if head_dims not in TND_HEAD_DIMS and not (head_dims == (64, 64) and group == 1):
            yield (
                f"layout TND takes head_dim 128, or 64 without GQA, not {spec.head_dim}; "
                f"{LAYOUT_VARIABLE}=BNSD takes others"
            )
    else:
        if spec.head_dim != spec.v_head_dim:
            yield f"v_head_dim {spec.v_head_dim} isn't head_dim {spec.head_dim}"
        if spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM:
            yield f"head_dim {spec.head_dim} isn't a multiple of 16 up to {MAX_HEAD_DIM}"
        if spec.window is not None:
            yield (
                f"layout {layout} ignores sliding windows in decode; {LAYOUT_VARIABLE}=TND has them"
            )
        if spec.split_mode == "off":
            yield (
                f"in layout {layout} the operator decides about splitting; {LAYOUT_VARIABLE}=TND "
                "takes --split-kv off"
            )
    if layout == "BSND" and spec.num_kv_heads * spec.head_dim > MAX_TOKEN_ELEMENTS:
        yield f"a token's keys have more than {MAX_TOKEN_ELEMENTS} elements"
    unit, most = _block_sizes(spec, layout)
    if spec.block_size % unit or spec.block_size > most:
        yield (
            f"block_size {spec.block_size} isn't a multiple of {unit} up to {most}, as layout "
            f"{layout} needs for {spec.phase}; --block-size 128 always is"
        )
    if spec.split_mode == "fixed":
        if spec.split_tokens % spec.block_size:
            yield (
                f"segments of {spec.split_tokens} tokens don't begin with a block of "
                f"{spec.block_size}; set --split-kv-tokens to a multiple of the block size"
            )
        if spec.split_tokens > OWN_SPLIT_TOKENS:
            yield (
                f"the operator may itself cut segments of {spec.split_tokens} tokens, differently "
                f"in another batch; set --split-kv-tokens to at most {OWN_SPLIT_TOKENS}"
            )


def _block_sizes(spec: AttentionSpec, layout: Layout) -> tuple[int, int]:
    """What a block size must be a multiple of, and the largest."""
    if layout == "TND":
        return 16, 1024
    return (128, 512) if spec.phase == "prefill" else (16, 512)


@dataclass(frozen=True)
class FiaCall:
    """One call of the operator. Its B rows are rows of the step or segments of them, with T queries
    in all; in BNSD and BSND each row has as many. Lengths are lists of the host's, as the operator
    wants them."""

    tokens: Tensor  # [T]: which of the step's queries
    block_table: Tensor  # [B, blocks], int32; a row begins with its first key's block
    query_ends: list[int]  # [B]: where a row's queries end among the T
    kv_lens: list[int]  # [B]: each row's own, counted from its first block


@dataclass(frozen=True)
class FiaPlan:
    """A step's calls. Their outputs, one after the other, are partials that count from 1; ``parts``
    [P, T] names those of each query, 0 for none. None: just one each, in order."""

    calls: list[FiaCall]
    parts: Tensor | None
    splits: SplitPlan | None  # decode's; the operator may cut finer


class AscendFiaBackend:
    """See :class:`octavo.attention.spec.Backend`. ``out`` is rounded to the queries' dtype by the
    operator, so a split row's partials are too, before they are merged in float32."""

    def __init__(self, spec: AttentionSpec, layout: Layout) -> None:
        torch_npu = import_module("torch_npu")
        name = "npu_fused_infer_attention_score_v2"
        operator: Callable[..., tuple[Tensor, Tensor]] | None = getattr(torch_npu, name, None)
        if operator is None:
            raise ConfigError(
                f"torch_npu {torch_npu.__version__} has no {name}; install a newer one, or "
                "--disable-attention-backend ascend_fia"
            )
        self.spec = spec
        self.layout = layout
        self._operator = operator
        device = torch_npu.npu.get_device_properties(spec.device)
        self._num_cores: int = getattr(device, "cube_core_num", CORES)
        self._masking = self._mask_arguments()

    def _mask_arguments(self) -> dict[str, Any]:
        """How queries see keys. A row's last query is aligned with its last key."""
        window = self.spec.window
        if self.spec.phase == "decode" and self.layout != "TND":
            return {}  # one query, which sees all; masks are ignored here
        # In TND one query could do without a mask too, but that was seen to fail.
        causal = {"sparse_mode": 3, "atten_mask": _causal_mask(self.spec.device)}
        if window is None:
            return causal
        return causal | {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}

    def plan(self, batch: AttentionBatch, splits: SplitPlan | None = None) -> FiaPlan:
        """``splits`` cuts a decode step elsewhere than its spec's mode would: at blocks, and not
        at all with a window (else ConfigError)."""
        if self.spec.phase == "prefill":
            return FiaPlan(self._prefill_calls(batch), None, None)
        return self._decode_plan(batch, splits or self._splits(batch.seq_lens))

    def _splits(self, seq_lens: NDArray[np.int32]) -> SplitPlan:
        """Where to cut what the operator doesn't cut itself."""
        spec = self.spec
        mode, split_tokens = spec.split_mode, spec.split_tokens
        if spec.window is not None:
            mode = "off"  # a segment that begins within a block would need a mask of its own
        elif mode == "auto" and self.layout != "TND":
            # All that is left to us is a row longer than the operator takes.
            mode, split_tokens = "fixed", MAX_DECODE_TOKENS // spec.block_size * spec.block_size
        return plan_splits(
            seq_lens,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            num_cores=self._num_cores,
            mode=mode,
            split_tokens=split_tokens,
            window=spec.window,
            cost=COST,
        )

    def _decode_plan(self, batch: AttentionBatch, splits: SplitPlan) -> FiaPlan:
        """The segments as rows, in as few calls as may be. Empty ones aren't passed on."""
        import torch

        if self.spec.window is None:
            if (splits.starts % self.spec.block_size).any():
                raise ConfigError(
                    f"ascend_fia cuts at multiples of block_size {self.spec.block_size} only"
                )
        elif splits.num_splits.max(initial=0) > 1:
            raise ConfigError("ascend_fia doesn't split the history of a sliding window")
        live = splits.stops > splits.starts
        row = np.repeat(np.arange(len(splits.seq_lens)), splits.num_splits)[live]
        calls = self._calls(batch, row, splits.starts[live], splits.stops[live], MAX_ROWS)
        counts = np.bincount(row, minlength=len(splits.seq_lens))
        if (counts == 1).all():
            return FiaPlan(calls, None, splits)
        nth = np.arange(max(counts.max(initial=0), 1))[:, None]
        parts = np.where(nth < counts, 1 + np.cumsum(counts) - counts + nth, 0)
        return FiaPlan(calls, torch.as_tensor(parts, device=self.spec.device), splits)

    def _prefill_calls(self, batch: AttentionBatch) -> list[FiaCall]:
        """All rows in one call, or in BNSD and BSND each in its own: padding them to one length
        would cost more."""
        query_lens = np.diff(batch.query_start_loc)
        rows = np.flatnonzero(query_lens)
        stops = batch.seq_lens[rows]
        starts = np.zeros_like(stops)
        if self.spec.window is not None:
            starts = np.maximum(stops - query_lens[rows] - self.spec.window + 1, 0)
        return self._calls(batch, rows, starts, stops, MAX_ROWS if self.layout == "TND" else 1)

    def _calls(
        self,
        batch: AttentionBatch,
        rows: NDArray[np.integer],
        starts: NDArray[np.integer],
        stops: NDArray[np.integer],
        most: int,
    ) -> list[FiaCall]:
        """Calls of at most ``most`` rows."""
        cuts = [slice(i, i + most) for i in range(0, len(rows), most)]
        return [self._call(batch, rows[cut], starts[cut], stops[cut]) for cut in cuts]

    def _call(
        self,
        batch: AttentionBatch,
        rows: NDArray[np.integer],
        starts: NDArray[np.integer],
        stops: NDArray[np.integer],
    ) -> FiaCall:
        """The call in which the queries of row ``rows[i]`` read the keys ``starts[i] : stops[i]``,
        and those before them in the same block."""
        import torch

        block_size = self.spec.block_size
        first_blocks = starts // block_size
        kv_lens = stops - first_blocks * block_size
        num_blocks = -(-kv_lens // block_size)
        column = np.arange(num_blocks.max())
        used = column < num_blocks[:, None]
        last = batch.block_table.shape[1] - 1
        table = batch.block_table[rows[:, None], np.minimum(first_blocks[:, None] + column, last)]
        if (table[used] < 0).any():
            raise ValueError("a block that has to be read isn't in the block table")
        # The operator doesn't say what it does with ids that are none, so the rest gets a real one.
        table[~used] = 0
        edges = batch.query_start_loc
        tokens = np.concatenate([np.arange(edges[row], edges[row + 1]) for row in rows])
        return FiaCall(
            torch.as_tensor(tokens, device=self.spec.device),
            torch.as_tensor(table, device=self.spec.device),
            np.cumsum(edges[rows + 1] - edges[rows]).tolist(),
            kv_lens.tolist(),
        )

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slots = slot_mapping.long()
        blocks, offsets = slots // self.spec.block_size, slots % self.spec.block_size
        for new, pool in ((k, k_cache), (v, v_cache)):
            if self.layout == "BSND":
                pool[blocks, offsets] = new.flatten(1).to(pool.dtype)
            else:
                pool[blocks, :, offsets] = new.to(pool.dtype)

    def gather(
        self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        used = block_table[: -(-length // self.spec.block_size)].long()

        def rows(pool: Tensor) -> Tensor:
            blocks = pool[used]
            if self.layout == "BSND":
                blocks = blocks.view(*blocks.shape[:2], self.spec.num_kv_heads, -1)
            else:
                blocks = blocks.transpose(1, 2)
            return blocks.flatten(0, 1)[:length]

        return rows(k_cache), rows(v_cache)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: FiaPlan,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        spec = self.spec
        partials = [self.attend(q, k_cache, v_cache, call) for call in plan.calls]
        if plan.parts is not None:
            empty = q.new_zeros(1, spec.num_heads, spec.v_head_dim)
            partials.insert(0, (empty, empty[..., 0].float() - math.inf))
        result, lse = partials[0]
        if len(partials) > 1:
            result, lse = (torch.cat(tensors) for tensors in zip(*partials, strict=True))
        if plan.parts is not None:
            result, lse = merge_lse(result[plan.parts].float(), lse[plan.parts])
        if sinks is not None:
            # Ours rather than the operator's, whose log-sum-exp doesn't say if it counts the sink.
            result, lse = merge_sinks(result.float(), lse, sinks)
        return placed(result.to(q.dtype), out), lse

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, call: FiaCall
    ) -> tuple[Tensor, Tensor]:
        """One call of the operator: ``out [T, H, Dv]`` and ``lse [T, H]`` of the call's queries."""
        spec, layout = self.spec, self.layout
        query = q[call.tokens]
        lengths: dict[str, list[int]] = {"actual_seq_kvlen": call.kv_lens}
        if layout == "TND":
            lengths["actual_seq_qlen"] = call.query_ends
        else:
            query = query.view(len(call.kv_lens), -1, spec.num_heads, spec.head_dim)
        if layout == "BNSD":
            query = query.transpose(1, 2).contiguous()
        out, lse = self._operator(
            query,
            k_cache,
            v_cache,
            block_table=call.block_table,
            block_size=spec.block_size,
            num_query_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            softmax_scale=spec.scale,
            input_layout=layout,
            return_softmax_lse=True,
            **lengths,
            **self._masking,
        )
        lse = natural_lse(lse.squeeze(-1))
        if layout == "BNSD":
            out = out.transpose(1, 2)
        if layout != "TND":
            out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        return out.masked_fill((lse == -math.inf)[..., None], 0), lse


@cache
def _causal_mask(device: str) -> Tensor:
    """What is 1 isn't seen: keys after a query. One for all layers and lengths: the operator knows
    by ``sparse_mode`` what it stands for."""
    import torch

    ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device)
    return ones.triu(diagonal=1)
