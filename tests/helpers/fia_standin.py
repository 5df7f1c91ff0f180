"""A CPU stand-in for ``torch_npu``, with the fused attention operator as its documentation has it.

Paged keys and values, layouts BNSD, BSND and TND, no quantisation. It raises where the operator
does, with the operator's defaults (scale 1, one head, no block size). Where the operator only goes
wrong, it raises too: ids in the block table that are none, tensors that aren't contiguous, lengths
on the device (which would wait for it in every layer). What the documentation leaves undefined is
NaN. Everything else is :class:`NotImplementedError`.

Its rules and where they come from: docs/ascend.md. What it can't show: weights rounded to 16 bits,
the operator's own splitting, speed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

OPERATOR = "npu_fused_infer_attention_score_v2"
INT_MAX = 2147483647


def install(monkeypatch: pytest.MonkeyPatch, cores: int = 24) -> FiaStandIn:
    """Put the stand-in in the place of ``torch_npu``; ``cores`` is what its device says it has."""
    operator = FiaStandIn()
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    properties = SimpleNamespace(name="stand-in", cube_core_num=cores)
    contents = {
        "__version__": "0.0 (stand-in)",
        OPERATOR: operator,
        "npu": SimpleNamespace(
            get_device_properties=lambda device: properties, synchronize=lambda: None
        ),
    }
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return operator


@dataclass
class FiaStandIn:
    """The operator. ``calls`` are its keyword arguments so far, with ``query``, ``key``, ``value``
    by their names; what the caller left out isn't there."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        self.calls.append({"query": query, "key": key, "value": value, **given})
        return attention(query, key, value, **given)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = INT_MAX,
    next_tokens: int = INT_MAX,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """One call, in float32: ``(attention_out, softmax_lse)``."""
    if others or input_layout not in ("BNSD", "BSND", "TND") or block_table is None:
        raise NotImplementedError(f"not in the stand-in: {input_layout}, {sorted(others)}")
    num_key_value_heads = num_key_value_heads or num_query_heads
    tnd = input_layout == "TND"
    rows = query.transpose(1, 2) if input_layout == "BNSD" else query  # [B, S, N, D] or [T, N, D]
    _check_heads(rows, value, key, num_query_heads, num_key_value_heads, tnd)
    _check_pool(query, key, value, block_size, num_key_value_heads, input_layout)
    if tnd:
        ends = _check_query_lens(actual_seq_qlen, len(query))
        one_query = False  # goes to the prompt kernel, whatever the lengths
    else:
        num_rows, num_queries = rows.shape[:2]
        ends = [(row + 1) * num_queries for row in range(num_rows)]
        if actual_seq_qlen is not None and num_queries > 1:
            raise NotImplementedError("not in the stand-in: padded queries")
        one_query = num_queries == 1
    _check_block_size(block_size, input_layout, one_query)
    kv_lens = _check_kv_lens(actual_seq_kvlen, len(ends), tnd)
    _check_block_table(block_table, kv_lens, block_size, len(key))
    if not one_query:  # else mask, mode and tokens are ignored
        _check_mask(sparse_mode, atten_mask, tnd)
    flat = rows if tnd else rows.flatten(0, 1)
    out = flat.new_full((*flat.shape[:2], _value_dim(value, num_key_value_heads)), math.nan)
    lse = torch.full(flat.shape[:2], math.nan)
    for row, (start, stop) in enumerate(pairwise([0, *ends])):
        length = kv_lens[row]
        k, v = (
            _read(pool, block_table[row], length, block_size, num_key_value_heads)
            for pool in (key, value)
        )
        position = torch.arange(start, stop)[:, None] - stop + length  # aligned to the end
        seen = torch.ones(stop - start, length, dtype=torch.bool)
        if not one_query and sparse_mode >= 3:
            seen &= torch.arange(length) <= position + (next_tokens if sparse_mode == 4 else 0)
        if not one_query and sparse_mode == 4:
            seen &= torch.arange(length) >= position - pre_tokens
        out[start:stop], lse[start:stop] = _softmax(flat[start:stop], k, v, seen, softmax_scale)
    if not tnd:
        out, lse = out.view(*rows.shape[:3], -1), lse.view(rows.shape[:3]).transpose(1, 2)
    if input_layout == "BNSD":
        out = out.transpose(1, 2).contiguous()
    return out, lse.contiguous()[..., None] if return_softmax_lse else torch.empty(0)


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out [S, N, Dv]`` and ``lse [S, N]``: +inf, and an undefined out, where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("snd,knd->snk", q.float(), k) * scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~seen[:, None], 0)
    # A key that isn't seen isn't read: its value may be NaN.
    v = v.masked_fill(~seen.any(0)[:, None, None], 0)
    out = torch.einsum("snk,knd->snd", weights, v).to(q.dtype)
    nothing = ~seen.any(1)
    out[nothing], lse[nothing] = math.nan, math.inf
    return out, lse


def _read(pool: Tensor, blocks: Tensor, length: int, block_size: int, heads: int) -> Tensor:
    """The first ``length`` tokens ``[length, heads, D]``, one by one: never a whole block."""
    position = torch.arange(length)
    block, offset = blocks[position // block_size].long(), position % block_size
    if pool.dim() == 3:
        return pool[block, offset].unflatten(-1, (heads, -1))
    return pool[block, :, offset]


def _value_dim(value: Tensor, heads: int) -> int:
    return value.shape[-1] // heads if value.dim() == 3 else value.shape[-1]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_heads(
    rows: Tensor, value: Tensor, key: Tensor, heads: int, kv_heads: int, tnd: bool
) -> None:
    _check(rows.dim() == (3 if tnd else 4), f"query has {rows.dim()} dimensions")
    _check(rows.shape[-2] == heads, f"query has {rows.shape[-2]} heads, num_query_heads is {heads}")
    _check(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} key/value heads")
    _check(heads // kv_heads <= 64, f"{heads // kv_heads} query heads a key/value head, over 64")
    _check(heads <= 256, f"{heads} query heads, over 256")
    dim, v_dim = rows.shape[-1], _value_dim(value, kv_heads)
    _check(_value_dim(key, kv_heads) == dim, f"queryD({dim}) isn't keyD")
    _check(dim % 16 == 0 and dim <= 512, f"D({dim}) must be a multiple of 16 up to 512")
    if tnd:
        known = (dim, v_dim) in {(128, 128), (192, 128), (192, 192)}
        known |= (dim, v_dim) == (64, 64) and heads == kv_heads
        _check(known, f"queryD({dim}), valueD({v_dim}) must be 128, or 192 and 128 or 192")


def _check_pool(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, kv_heads: int, layout: str
) -> None:
    _check(query.dtype in (torch.bfloat16, torch.float16), f"query is {query.dtype}")
    for name, pool in (("key", key), ("value", value)):
        _check(pool.dtype == query.dtype, f"{name} is {pool.dtype}, query {query.dtype}")
        ranks = (3,) if layout == "BSND" else (3, 4)
        _check(pool.dim() in ranks, f"{name} has {pool.dim()} dimensions, {layout} takes {ranks}")
        shape = (block_size,) if pool.dim() == 3 else (kv_heads, block_size)
        _check(pool.shape[1:-1] == shape, f"{name} is {tuple(pool.shape)}, blocks have {shape}")
        _check(pool.dim() == 4 or pool.shape[2] <= 65535, f"{name} has H {pool.shape[2]}")
        _check(pool.numel() < 2**31, f"{name} has {pool.numel()} elements")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check(tensor.is_contiguous(), f"{name} isn't contiguous")


def _check_block_size(block_size: int, layout: str, one_query: bool) -> None:
    if layout == "TND":
        unit, most = 16, 1024
    else:
        unit, most = (16, 512) if one_query else (128, 512)
    _check(
        0 < block_size <= most and block_size % unit == 0,
        f"block_size({block_size}) must be a multiple of {unit} up to {most}",
    )


def _check_query_lens(ends: list[int] | None, num_queries: int) -> list[int]:
    _check(ends is not None, "actual_seq_qlen is mandatory in TND")
    ends = _host_list("actual_seq_qlen", ends)
    _check(ends == sorted(ends) and ends[0] >= 0, f"actual_seq_qlen {ends} isn't cumulative")
    _check(
        ends[-1] == num_queries,
        f"queryT({num_queries}) must be equal to the last element({ends[-1]}) of actual_seq_qlen",
    )
    _check(len(ends) <= 4096, f"actual_seq_qlen has {len(ends)} elements, over 4096")
    return ends


def _check_kv_lens(kv_lens: list[int] | None, num_rows: int, tnd: bool) -> list[int]:
    _check(kv_lens is not None, "actual_seq_kvlen is mandatory with a block table")
    kv_lens = _host_list("actual_seq_kvlen", kv_lens)
    if tnd:
        _check(
            len(kv_lens) == num_rows,
            f"actual_seq_kvlen has {len(kv_lens)} elements, actual_seq_qlen {num_rows}",
        )
        return kv_lens
    _check(
        len(kv_lens) == 1 or len(kv_lens) >= num_rows,
        f"561002: actual_seq_kvlen size is {len(kv_lens)}, should be >= batch size({num_rows}) or "
        "equal 1",
    )
    return kv_lens * num_rows if len(kv_lens) == 1 else kv_lens[:num_rows]


def _check_block_table(table: Tensor, kv_lens: list[int], block_size: int, num_blocks: int) -> None:
    _check(table.dtype == torch.int32, f"block_table is {table.dtype}")
    _check(
        table.dim() == 2 and len(table) == len(kv_lens),
        f"block_table is {tuple(table.shape)} for {len(kv_lens)} rows",
    )
    _check(table.is_contiguous(), "block_table isn't contiguous")
    room = table.shape[1] * block_size
    for length in kv_lens:
        _check(0 <= length <= room, f"actual_seq_kvlen {length} should be in range [0, {room}]")
    inside = (table >= 0) & (table < num_blocks)
    _check(bool(inside.all()), "aicore error: block_table has ids that are no blocks")


def _check_mask(sparse_mode: int, mask: Tensor | None, tnd: bool) -> None:
    modes = (0, 3, 4) if tnd else (0, 1, 2, 3, 4)
    _check(sparse_mode in modes, f"sparse_mode({sparse_mode}) must be one of {modes}")
    if sparse_mode == 0 and mask is None:
        return
    _check(not (tnd and sparse_mode == 0), "atten_mask must be empty with sparse_mode 0 in TND")
    if sparse_mode < 3:
        raise NotImplementedError(f"not in the stand-in: sparse_mode {sparse_mode} with a mask")
    _check(mask is not None, f"sparse_mode {sparse_mode} needs atten_mask")
    assert mask is not None
    _check(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}")
    _check(mask.shape == (2048, 2048), f"atten_mask is {tuple(mask.shape)}, not (2048, 2048)")
    _check(torch.equal(mask.bool(), _after()), "atten_mask isn't the upper triangle")


@cache
def _after() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _host_list(name: str, lens: Any) -> list[int]:
    _check(
        isinstance(lens, list) and all(type(n) is int for n in lens),
        f"{name} isn't a list of the host's integers",
    )
    return list(lens)
