"""Compile the fused decode kernels for a GPU that isn't there, as their launching functions would.

python compile_decode.py    # JSON: case -> registers, bytes of stack, whether loads come early
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
from helpers.decode import launch_attention, make_rows
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.embed import triton as embed
from octavo.kernels.linear import triton_products
from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear_add import triton as linear_add
from octavo.kernels.linear_fixed import fused as fixed
from octavo.kernels.linear_fixed import row as fixed_row
from octavo.kernels.norm_gate_up import triton as norm_gate_up
from octavo.kernels.norm_linear import triton as norm_linear
from octavo.kernels.rope_attention import triton as rope_attention

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MODULES = (embed, fixed, fixed_row, linear_add, norm_gate_up, norm_linear, rope_attention)


class NoDevice:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(NoDevice())
    run, compiled = JITFunction.run, []

    def compile_only(kernel, *args, grid, warmup, **constants):
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **constants))

    JITFunction.run = compile_only
    for module in MODULES:
        module.dependent_launches = lambda: True
    triton_products.has_warpgroups = lambda: True
    results: dict[str, dict[str, Any]] = {}
    for name, launch in CASES.items():
        compiled.clear()
        try:
            launch()
            results[name] = inspect(compiled[-1])
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results))


def inspect(binary: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
        code = subprocess.check_output([CUOBJDUMP, "-sass", file.name], text=True)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    before_wait = code.partition("ACQBULK")[0]
    return {
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "waits": "ACQBULK" in code,
        "early": "UTMALDG" in before_wait or "LDGSTS" in before_wait,
        "counts": "ATOMG" in code,
        "empties_l1": "CCTL.IVALL" in code.partition("ATOMG")[2],
    }


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def sums(rows: int, columns: int = 64) -> torch.Tensor:
    return zeros(rows, columns, dtype=torch.float32)


def qkv(rows: int, n: int, k: int, tile: Tile | None = None, **how: Any) -> None:
    out = zeros(rows, n)
    norm_linear.norm_linear(
        zeros(rows, k), sums(rows), zeros(n, k), out, eps=1e-6, tile=tile, **how
    )


def gate_up(rows: int, inner: int, k: int, **how: Any) -> None:
    weight, out = zeros(2 * inner, k), zeros(rows, inner)
    norm_gate_up.norm_gate_up(zeros(rows, k), sums(rows), weight, out, eps=1e-6, **how)


def add(rows: int, n: int, k: int, **how: Any) -> None:
    x, norm, h = sums(rows, n), sums(1, n)[0], zeros(rows, n)
    squares = sums(rows, linear_add.square_columns(n, k, rows))
    linear_add.linear_add(zeros(rows, k), zeros(n, k), x, norm, h, squares, **how)


def fixed_qkv(rows: int, n: int, k: int, **how: Any) -> None:
    out = zeros(rows, n)
    fixed.norm_linear(zeros(rows, k), sums(rows), zeros(n, k), out, eps=1e-6, **how)


def fixed_gate_up(rows: int, inner: int, k: int, **how: Any) -> None:
    weight, out = zeros(2 * inner, k), zeros(rows, inner)
    fixed.norm_gate_up(zeros(rows, k), sums(rows), weight, out, eps=1e-6, **how)


def fixed_add(rows: int, n: int, k: int, **how: Any) -> None:
    x, norm, h = sums(rows, n), sums(1, n)[0], zeros(rows, n)
    squares = sums(rows, fixed.square_columns(n, k, rows))
    fixed.linear_add(zeros(rows, k), zeros(n, k), x, norm, h, squares, **how)


def attention(
    length: int, num_rows: int = 1, *, with_lse: bool = False, share: int = 0, **shape: Any
) -> None:
    llama = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    rows = make_rows([1] * num_rows, **{**llama, **shape})
    spec = replace(rows.spec, split_mode="fixed", split_tokens=share) if share else rows.spec
    cut = rope_attention.choose_cut(spec, num_rows, length)
    launch_attention(
        rows,
        zeros(num_rows, spec.num_heads * spec.head_dim, dtype=rows.qkv.dtype),
        cut,
        rope_attention.make_scratch(rows.spec, num_rows, cut.splits),
        lse=sums(num_rows, spec.num_heads) if with_lse else None,
    )


def fixed_head(n: int, k: int) -> None:
    fixed_row.linear_row(zeros(1, k), zeros(n, k))


def embed_rows() -> None:
    x, norm = sums(3, 1024), sums(1, 1024)[0]
    ids = torch.zeros(3, dtype=torch.int64)
    embed.embed(ids, zeros(9, 1024), norm, x, zeros(3, 1024), sums(3, 1))


CASES: dict[str, Callable[[], None]] = {
    "norm_linear": lambda: qkv(1, 4096, 1024),
    "norm_linear, 4 rows": lambda: qkv(4, 4096, 1024),
    "norm_linear, 16 rows, all features": lambda: qkv(
        16, 4096, 1024, bias=zeros(4096), soft_cap=30.0
    ),
    "norm_linear, odd sides": lambda: qkv(3, 49_155, 576),
    "norm_linear, 8B": lambda: qkv(1, 6144, 4096),
    "norm_gate_up": lambda: gate_up(1, 3072, 1024),
    "norm_gate_up, 5 rows, all features": lambda: gate_up(
        5, 1536, 576, activation="gelu_tanh", bias=zeros(3072)
    ),
    "norm_gate_up, 8B": lambda: gate_up(1, 12_288, 4096),
    "norm_gate_up, 8B, 16 rows": lambda: gate_up(16, 12_288, 4096),
    "linear_add": lambda: add(1, 1024, 3072),
    "linear_add, 16 rows, bias": lambda: add(16, 1024, 3072, bias=zeros(1024)),
    "linear_add, 8B": lambda: add(1, 4096, 12_288),
    "linear_add, 8B, 16 rows": lambda: add(16, 4096, 12_288),
    "attention, 128": lambda: attention(128),
    "attention, 256": lambda: attention(256),
    "attention, 3K": lambda: attention(3072),
    "attention, 4K": lambda: attention(4096),
    "attention, 128K": lambda: attention(131_072),
    "attention, 4 rows of 2K": lambda: attention(2048, 4),
    "attention, window and cap": lambda: attention(8192, window=1000, soft_cap=30.0),
    "attention, 64, groups of 3, no norms": lambda: attention(
        4096, num_heads=9, num_kv_heads=3, head_dim=64, norms=False
    ),
    "attention, 80, half rotated, fp16": lambda: attention(
        1024, head_dim=80, rotary_dim=32, dtype=torch.float16
    ),
    "attention, 256, one KV head": lambda: attention(
        8192, num_heads=4, num_kv_heads=1, head_dim=256, window=512
    ),
    "attention, group of 14": lambda: attention(2048, num_heads=14, num_kv_heads=1),
    "attention, one share, LSE": lambda: attention(128, with_lse=True),
    "attention, many shares, LSE": lambda: attention(8192, with_lse=True),
    "attention, fixed shares, LSE": lambda: attention(8192, 4, with_lse=True, share=256),
    "attention, 64 rows in shares": lambda: attention(1000, 64, share=256, num_heads=16),
    "attention, a fixed share there at once": lambda: attention(256, share=256, num_heads=16),
    "attention, a fixed share there at once, window and cap, 64": lambda: attention(
        900, share=256, num_heads=9, num_kv_heads=3, head_dim=64, window=500, soft_cap=30.0
    ),
    "attention, a fixed share there at once, group of 14": lambda: attention(
        200, share=256, num_heads=14, num_kv_heads=1
    ),
    "attention, a fixed share with a window, 64": lambda: attention(
        100, with_lse=True, share=304, num_heads=9, num_kv_heads=3, head_dim=64, window=100
    ),
    "embed": embed_rows,
    "fixed norm_linear, 2 rows": lambda: fixed_qkv(2, 4096, 1024),
    "fixed norm_linear, 32 rows": lambda: fixed_qkv(32, 4096, 1024),
    "fixed norm_linear, 256 rows, bias": lambda: fixed_qkv(256, 4096, 1024, bias=zeros(4096)),
    "fixed norm_gate_up, 16 rows": lambda: fixed_gate_up(16, 3072, 1024),
    "fixed norm_gate_up, 64 rows": lambda: fixed_gate_up(64, 3072, 1024),
    "fixed norm_gate_up, 256 rows, all features": lambda: fixed_gate_up(
        256, 4864, 896, activation="gelu_tanh", bias=zeros(9728)
    ),
    "fixed linear_add, 8 rows": lambda: fixed_add(8, 1024, 2048),
    "fixed linear_add, 32 rows": lambda: fixed_add(32, 1024, 2048),
    "fixed linear_add, 64 rows": lambda: fixed_add(64, 1024, 3072),
    "fixed linear_add, 256 rows, bias": lambda: fixed_add(256, 576, 1536, bias=zeros(576)),
    "fixed head": lambda: fixed_head(151_936, 1024),
    "fixed head, odd sides": lambda: fixed_head(49_155, 1000),
}


if __name__ == "__main__":
    main()
