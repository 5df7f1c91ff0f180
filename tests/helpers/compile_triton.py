"""Compile our Triton kernels for a GPU that isn't there, as the launching functions would.

    python -m helpers.compile_triton    # JSON: case -> kernel -> registers, stack bytes; or error

A process of its own: Triton's interpreter, once chosen, stays for the whole process.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from helpers.attention import make_spec
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import octavo.kernels.choose.triton as choose
import octavo.kernels.kv_store.triton as kv_store
import octavo.kernels.linear_batch.triton as linear_batch
import octavo.kernels.linear_fixed.triton as linear_fixed
import octavo.kernels.norm.triton as norm
import octavo.kernels.rope_write.triton as rope_write
import octavo.kernels.split_attention.triton as split_attention
import octavo.kernels.split_attention.triton_warps as split_warps
from octavo.attention import AttentionSpec
from octavo.kernels.linear_batch.tiles import TABLE, Tile
from octavo.kernels.paged_prefill.triton import paged_prefill
from octavo.kernels.step_inputs.layout import make_inputs

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ALL = {"window": 1000, "soft_cap": 20.0, "has_sinks": True}
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}

# Between them, every pair of options that selects other code. Not the spec's: ``fold``, ``rows``,
# ``full``.
DECODE: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, all features": ALL | {"rows": 20},
    "auto, fp32, 64, window": {"dtype": "float32", "head_dim": 64, "window": 1000},
    "auto, fp16, 80, sinks": {"dtype": "float16", "head_dim": 80, "has_sinks": True},
    "auto, 256, soft cap": {"head_dim": 256, "soft_cap": 20.0, "num_heads": 8},
    "auto, 192/128, one KV head": {"head_dim": 192, "v_head_dim": 128, "num_kv_heads": 1},
    "off, fp32, all features": ALL | {"dtype": "float32", "split_mode": "off"},
    "off, group of 64": {"num_heads": 64, "num_kv_heads": 1, "split_mode": "off"},
    "fixed": {"split_tokens": 512},
    "fixed, all features": ALL | {"split_tokens": 256, "rows": 20},
    "fixed, fp32, 64, window": {
        "dtype": "float32",
        "head_dim": 64,
        "window": 3000,
        "split_tokens": 512,
    },
    "fixed, fp16, 80, sinks": {
        "dtype": "float16",
        "head_dim": 80,
        "split_tokens": 1024,
        "has_sinks": True,
    },
    "fixed, 256": {"head_dim": 256, "split_tokens": 3008, "soft_cap": 20.0, "num_heads": 8},
    "auto, 9/3 x 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "fixed, 9/3 x 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "split_tokens": 256},
    "full batch": {"full": True},
    "full batch of few lines": {"full": True, "rows": 64},
    "full batch, all features": ALL | {"full": True},
    "full batch, 9/3 x 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "full": True},
    "full batch, 256": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "full": True},
    "fixed, small tiles, no folds": {"split_tokens": 48, "fold": 1, "window": 1000},
}
PREFILL: dict[str, dict[str, Any]] = {
    "prefill": {},
    "prefill, fp16, 64, window": {"dtype": "float16", "head_dim": 64, "window": 1000},
    "prefill, fp32, 80, all features": ALL | {"dtype": "float32", "head_dim": 80},
    "prefill, 256, all features": ALL | {"head_dim": 256, "num_heads": 8},
}


def main() -> None:
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    modules = (choose, split_attention, split_warps, kv_store, linear_batch, linear_fixed, norm)
    for module in (*modules, rope_write):
        module.dependent_launches = lambda: True
    results = {}
    for name, (launch, changes) in CASES.items():
        compiled.clear()
        try:
            launch(**changes)
            results[name] = {kernel: usage(binary) for kernel, binary in compiled.items()}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results))


class NoDevice:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: dict[str, Any] = {}
run = JITFunction.run


def compile_only(kernel, *args, grid, warmup, **constants):
    compiled[kernel.__name__] = run(kernel, *args, grid=grid, warmup=True, **constants)


def usage(binary) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        listing = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", listing))
    return {
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "shared": binary.metadata.shared,
    }


def spec_and_caches(phase: str, changes: dict[str, Any]) -> tuple[AttentionSpec, list[Any]]:
    changes = LLAMA | changes
    spec = make_spec(phase, kv_dtype=changes["dtype"], **changes)
    dtype = getattr(torch, spec.dtype)
    sides = (spec.head_dim, spec.v_head_dim)
    return spec, [torch.empty(1, 16, spec.num_kv_heads, side, dtype=dtype) for side in sides]


def decode(rows: int | None = None, fold: int = 4, full: bool = False, **changes) -> None:
    mode = {"split_mode": "fixed"} if "split_tokens" in changes else {}
    spec, caches = spec_and_caches("decode", mode | changes)
    tuning = None if full else replace(split_attention.default_tuning(spec), fold=fold)
    rows = rows or (256 if full else 1)
    ints = torch.zeros(rows, 64, dtype=torch.int32)
    split_attention.split_decode(
        spec,
        torch.empty(rows, spec.num_heads, spec.head_dim, dtype=caches[0].dtype),
        *caches,
        ints,
        ints[:, 0].contiguous(),
        num_slots=264,
        scratch=split_attention.make_scratch(spec, rows, 1, 264, tuning),
        sinks=torch.zeros(spec.num_heads) if spec.has_sinks else None,
        tuning=tuning,
    )


def prefill(**changes) -> None:
    spec, caches = spec_and_caches("prefill", changes)
    ints = torch.zeros(3, 64, dtype=torch.int32)
    paged_prefill(
        spec,
        torch.empty(100, spec.num_heads, spec.head_dim, dtype=caches[0].dtype),
        *caches,
        ints[:2],
        ints[:2, 0].contiguous(),
        ints[:, 0].contiguous(),
        sinks=torch.zeros(spec.num_heads) if spec.has_sinks else None,
    )


def store() -> None:
    _, caches = spec_and_caches("decode", {})
    kv_store.store_kv(*(cache[0] for cache in caches), *caches, torch.zeros(16, dtype=torch.int32))


def product(num_tokens: int, kind: Any, n: int = 4096, dtype: Any = torch.bfloat16) -> None:
    x, weight = torch.empty(num_tokens, 1024, dtype=dtype), torch.empty(n, 1024, dtype=dtype)
    counters = linear_fixed.make_counters(x.device)
    linear_fixed.linear_fixed(x, weight, weight[:, 0].contiguous(), counters, kind)


def of_rows(n: int, k: int, gated: bool, rows: int, activation: str = "silu") -> None:
    tile = TABLE[n, k, gated][rows]
    x, weight = torch.empty(rows, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    if gated:
        linear_batch.gated_batch(x, weight, activation, tile)
    else:
        linear_batch.linear_batch(x, weight, tile)


def chosen(dtype: Any, filtered: bool, advances: bool) -> None:
    rows, vocab_size = 4, 151_936
    settings = torch.zeros(len(choose.SETTINGS), rows, dtype=torch.int32)
    choose.choose(
        torch.empty(rows, vocab_size, dtype=dtype),
        settings,
        rows,
        choose.make_scratch(rows, vocab_size, "cpu"),
        settings,
        settings[0],
        filtered=filtered,
        inputs=make_inputs(rows, rows, 1, 4, "cpu") if advances else None,
    )


def normed(hidden: int, parts: int) -> None:
    x, delta = torch.empty(3, hidden), torch.empty(parts, 3, hidden, dtype=torch.bfloat16)
    norm.add_rms_norm(x, x[0], 1e-6, delta=delta, dtype=delta.dtype)


def rotated(num_tokens: int) -> None:
    spec, caches = spec_and_caches("decode", {})
    ints, turns = torch.zeros(num_tokens, dtype=torch.int32), torch.empty(64, spec.head_dim // 2)
    heads = spec.num_heads + spec.num_kv_heads
    qkv = caches[0].new_empty(num_tokens, (heads + spec.num_kv_heads) * spec.head_dim)
    weights = torch.empty(heads, spec.head_dim)
    rope_write.rope_write(
        qkv, ints, turns, turns, *caches, ints, num_heads=spec.num_heads, qk_norm=weights
    )


CASES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    **{name: (decode, changes) for name, changes in DECODE.items()},
    **{name: (prefill, changes) for name, changes in PREFILL.items()},
    "store": (store, {}),
    "norm, 1024": (normed, {"hidden": 1024, "parts": 4}),
    "norm, 4096": (normed, {"hidden": 4096, "parts": 4}),
    "rope and write": (rotated, {"num_tokens": 256}),
    "rope and write, many": (rotated, {"num_tokens": rope_write.MANY}),
    "product, decode, 1": (product, {"num_tokens": 1, "kind": "decode"}),
    "product, decode, 256": (product, {"num_tokens": 256, "kind": "decode", "n": 32768}),
    "product, prefill": (product, {"num_tokens": 4096, "kind": "prefill"}),
    **{
        f"product of {n} x {k}, {rows}": (of_rows, {"n": n, "k": k, "gated": gated, "rows": rows})
        for (n, k, gated), tiles in TABLE.items()
        for rows, tile in tiles.items()
        if isinstance(tile, Tile)
    },
    "product, gelu": (
        of_rows,
        {"n": 6144, "k": 1024, "gated": True, "rows": 64, "activation": "gelu_tanh"},
    ),
    "choose": (chosen, {"dtype": torch.bfloat16, "filtered": False, "advances": False}),
    "choose, filtered": (chosen, {"dtype": torch.float32, "filtered": True, "advances": False}),
    "choose, advancing": (chosen, {"dtype": torch.bfloat16, "filtered": False, "advances": True}),
    "choose, filtered, advancing": (
        chosen,
        {"dtype": torch.bfloat16, "filtered": True, "advances": True},
    ),
    "product, fp32": (product, {"num_tokens": 9, "kind": "decode", "dtype": torch.float32}),
}


if __name__ == "__main__":
    main()
