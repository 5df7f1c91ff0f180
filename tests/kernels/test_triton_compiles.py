"""The Triton kernels compiled for Hopper, on a machine without a GPU.

The interpreter runs what the compiler refuses: a layout pass of Triton 3.6 once failed on the merge
of ``fixed`` mode with a window, and only a GPU would have told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from helpers.compile_triton import CASES

TESTS = Path(__file__).parents[1]
# Bytes of a thread's stack, in which registers are spilled.
KNOWN_STACK = {
    ("auto, fp32, 64, window", "split_kernel"): 8,
    ("auto, 192/128, one KV head", "split_kernel"): 24,
    ("fixed", "split_kernel"): 8,
    ("fixed, all features", "split_kernel"): 8,
    ("fixed, 9/3 x 64", "split_kernel"): 40,
    ("prefill", "_prefill_kernel"): 32,
    ("choose, filtered", "long_list_kernel"): 96,
    ("choose, filtered, advancing", "long_list_kernel"): 96,
}


@cache
def compiled() -> dict[str, dict]:
    """All cases from one process, without the interpreter that conftest.py asks for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    script = [sys.executable, "-m", "helpers.compile_triton"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_spills_no_more_than_is_known(case):
    kernels = compiled()[case]
    assert "error" not in kernels
    for kernel, used in kernels.items():
        assert used["stack"] <= KNOWN_STACK.get((case, kernel), 0), kernel


@pytest.mark.parametrize(
    ("case", "blocks", "merge_warps"),
    [("auto", 2, 4), ("fixed", 2, 2), ("auto, 9/3 x 64", 4, 4), ("fixed, 9/3 x 64", 4, 2)],
)
def test_a_block_of_the_merge_fits_beside_those_of_the_split_kernel(case, blocks, merge_warps):
    """So that it is there when the last of them ends: an SM has 65,536 registers, and ``blocks``
    of the split kernel lie in it, of four warps each."""
    kernels = compiled()[case]
    split, merge = (kernels[f"{name}_kernel"]["registers"] for name in ("split", "merge"))
    assert blocks * split * 128 + merge * merge_warps * 32 <= 65536


@pytest.mark.parametrize("size", [1024, 4096])
def test_a_row_of_a_norm_fits_beside_a_product(size):
    """So that it is there when the product ends, and the next one's weights are on their way before
    the norm has ended: a product leaves 2 KB, of which the device takes one for any block."""
    assert compiled()[f"norm, {size}"]["_norm_kernel"]["shared"] <= 1024
