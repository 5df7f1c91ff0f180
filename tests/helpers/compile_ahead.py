"""Compile kernels ahead for a GPU that isn't there, and see whether launches find them.

    TRITON_CACHE_DIR=... python -m helpers.compile_ahead    # JSON, see main

A process of its own: Triton's interpreter, once chosen, stays for the whole process.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import torch
from helpers.compile_triton import HOPPER, NoDevice
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import octavo.kernels.linear_fixed.fused as fixed
import octavo.kernels.norm_linear.triton as norm_linear
from octavo.kernels.gated.triton import gated
from octavo.runtime.cuda_compile import compile_kernels, note_kernels


def main() -> None:
    driver.set_active(NoDevice())
    norm_linear.dependent_launches = fixed.dependent_launches = lambda: True
    found: dict[str, Any] = {}
    kernels = note_kernels(launch)
    found["noted"] = [(kernel.module.split(".")[-2], kernel.name) for kernel in kernels]
    kernels.insert(0, replace(kernels[0], name="no_such_kernel"))
    found["processes"] = compile_kernels(kernels, HOPPER, 2)
    started = count_processes()
    found["processes of the second time"] = compile_kernels(kernels, HOPPER, 2) + len(started)

    run = JITFunction.run
    JITFunction.run = lambda kernel, *args, grid, warmup, **constants: run(
        kernel, *args, grid=grid, warmup=True, **constants
    )
    hits: list[bool] = []
    knobs.compilation.listener = lambda **compiled: hits.append(compiled["cache_hit"])
    launch()
    found["in the cache"] = hits
    print(json.dumps(found))


def launch() -> None:
    """One kernel of Triton's twice and two of Gluon's, whose constants have tuples and layouts."""
    half = torch.bfloat16
    gated(torch.empty(3, 64, dtype=half), "silu")
    gated(torch.empty(5, 64, dtype=half), "silu")
    squares = torch.empty(2, 4, dtype=torch.float32)
    rows, weight, out = (torch.empty(n, 64, dtype=half) for n in (2, 64, 2))
    norm_linear.norm_linear(rows, squares, weight, out, eps=1e-6)
    fixed.norm_linear(rows, squares, weight, out, eps=1e-6)


def count_processes() -> list[Any]:
    """A list that grows with every process that is started."""
    started: list[Any] = []
    start = subprocess.Popen

    def counted(*args: Any, **options: Any) -> Any:
        started.append(args)
        return start(*args, **options)

    subprocess.Popen = counted
    return started


if __name__ == "__main__":
    main()
