"""The cpu runtime's products against what the machine can do: memory's read speed for one token,
the rate of its int8 dot product for more.

    python bench/cpu_linear.py [--formats Q4_1,Q8_0] [--tokens 1,12,64,512] [--threads 2]

A run goes through many copies of a matrix, 128 MB or more, as a step goes through layers, so that
weights come from memory; with many tokens it goes through fewer. Each repetition times the product,
a sum of the same memory by the same threads, and a loop of dot products in registers one after
another; a cell shows medians, and shares are the medians of the repetitions' ratios. Weights are
one repeated byte: the time doesn't depend on them. F32, F16 and BF16 have no int8 product and show
what they compute. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np

from octavo.host import granted_cores
from octavo.kernels.dot.cpu import dot_operations, dot_program
from octavo.kernels.levels import level as best_level
from octavo.kernels.linear.cpu import linear
from octavo.kernels.linear.cpu_formats import FLOAT_BYTES
from octavo.kernels.linear.cpu_q8 import q8_rows, quantize_row
from octavo.kernels.linear.packing import PackedLinear, aligned_zeros, block_bytes
from octavo.kernels.program import Call, Program
from octavo.kernels.read.cpu import add_up
from octavo.kernels.team import Team

# N, K, format: SmolLM2-135M's, and one of Qwen3-0.6B (gate and up)
SHAPES: dict[str, tuple[int, int, str | None]] = {
    "qkv": (960, 576, None),
    "out": (576, 576, None),
    "gate_up": (3072, 576, None),
    "down": (576, 1536, None),
    "head": (49152, 576, "Q8_0"),
    "qwen3": (6144, 1024, None),
}
WORKING_SET = 128 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--formats", default="Q4_1,Q8_0")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,12,64,512")
    parser.add_argument("--threads", type=int, default=granted_cores())
    parser.add_argument("--level", default=best_level())
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    crew = Team(arguments.threads)
    print(f"level {arguments.level}, {arguments.threads} threads")
    print(f"{'format':8}{'shape':9}{'T':>5}{'us':>10}", end="")
    print(f"{'GB/s':>8}{'of read':>9}{'GOPS':>8}{'of dot':>8}")
    cells = []
    for name in arguments.shapes.split(","):
        rows, columns, own = SHAPES[name]
        for format in [own] if own else arguments.formats.split(","):
            memory = aligned_zeros(WORKING_SET + rows * columns * 5)
            memory[:] = 0x11
            for num_tokens in map(int, arguments.tokens.split(",")):
                cell = measure(
                    crew, memory, format, rows, columns, num_tokens, arguments.level,
                    arguments.repetitions,
                )  # fmt: skip
                cells.append({"format": format, "shape": name, "tokens": num_tokens, **cell})
                print(
                    f"{format:8}{name:9}{num_tokens:5}{cell['us']:10.1f}{cell['gb_s']:8.1f}"
                    f"{cell['of_read']:9.0%}{cell['gops']:8.0f}{cell['of_dot']:8.0%}",
                    flush=True,
                )
    print(json.dumps({"level": arguments.level, "threads": arguments.threads, "cells": cells}))


def measure(
    crew: Team,
    memory: Any,
    format: str,
    rows: int,
    columns: int,
    num_tokens: int,
    level: str,
    repetitions: int,
) -> dict[str, float]:
    nbytes = -(-rows // 16) * block_bytes(format, columns)
    copies = -(-WORKING_SET // nbytes)
    operations = 2 * rows * columns * num_tokens
    used = max(1, min(copies, int(2e10 / operations)))
    matrices = [
        PackedLinear(format, rows, columns, memory[i * nbytes : (i + 1) * nbytes])
        for i in range(copies)
    ]
    product = Program(product_calls(matrices[:used], num_tokens, level))
    total = np.zeros(1, np.int64)
    read = Program([add_up.bind(numbers=memory, count=copies * nbytes // 8, total=total)])
    dot = dot_program(level, crew)
    times = []
    for _ in range(repetitions + 1):
        times.append([seconds(crew, program) for program in (product, read, dot)])
    times = times[1:]  # the first is to touch everything
    speeds = [
        (
            t / used,
            used * nbytes / t,
            copies * nbytes / r,
            used * operations / t,
            dot_operations(level, crew) / d,
        )
        for t, r, d in times
    ]
    return {
        "us": 1e6 * median(s[0] for s in speeds),
        "gb_s": 1e-9 * median(s[1] for s in speeds),
        "of_read": median(s[1] / s[2] for s in speeds),
        "gops": 1e-9 * median(s[3] for s in speeds),
        "of_dot": median(s[3] / s[4] for s in speeds),
        "read_gb_s": 1e-9 * median(s[2] for s in speeds),
        "dot_gops": 1e-9 * median(s[4] for s in speeds),
    }


def product_calls(matrices: list[PackedLinear], num_tokens: int, level: str) -> list[Call]:
    rows, columns = matrices[0].rows, matrices[0].columns
    x: Any = np.random.default_rng(0).normal(0, 1, (num_tokens, columns)).astype(np.float32)
    is_float = matrices[0].format in FLOAT_BYTES
    if not is_float:
        quantised = q8_rows(num_tokens, columns)
        for i in range(num_tokens):
            quantize_row(x[i].ctypes.data, columns, quantised[i].ctypes.data)
        x = quantised
    out = np.zeros((num_tokens, rows), np.float32)
    return [
        linear(
            weights,
            num_tokens=np.array([num_tokens]),
            x=x,
            x_stride=x.strides[0],
            out=out,
            out_stride=out.strides[0],
            mode="exact" if is_float else "q8",
            level=level,
        )
        for weights in matrices
    ]


def seconds(crew: Team, program: Program) -> float:
    start = time.perf_counter()
    crew.run(program)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
