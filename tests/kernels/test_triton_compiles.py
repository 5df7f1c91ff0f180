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

HELPERS = Path(__file__).parents[1] / "helpers"
# Bytes of a thread's stack, in which registers are spilled.
KNOWN_STACK = {
    ("off, fp32, all features", "split_kernel"): 416,
    ("off, group of 64", "split_kernel"): 40,
    ("fixed, small tiles, no folds", "split_kernel"): 8,
    ("prefill", "_prefill_kernel"): 24,
}


@cache
def compiled() -> dict[str, dict]:
    """All cases from one process, without the interpreter that conftest.py asks for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HELPERS.parent)
    script = [sys.executable, HELPERS / "compile_triton.py"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_spills_no_more_than_is_known(case):
    kernels = compiled()[case]
    assert "error" not in kernels
    for kernel, used in kernels.items():
        assert used["stack"] <= KNOWN_STACK.get((case, kernel), 0), kernel


def test_the_merge_of_fixed_mode_fits_beside_the_split_kernel():
    """So that its blocks are there when the last split block ends: an SM has 65,536 registers,
    and those of the split kernel lie in it two at a time. Both have four warps."""
    kernels = compiled()["fixed"]
    split, merge = (kernels[f"{name}_kernel"]["registers"] for name in ("split", "merge"))
    assert (2 * split + merge) * 128 <= 65536
