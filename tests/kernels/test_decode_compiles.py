"""The fused decode kernels compiled for Hopper, on a machine without a GPU."""

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

from helpers.compile_decode import CASES

HELPERS = Path(__file__).parents[1] / "helpers"
# Bytes of a thread's stack, in which registers are spilled.
KNOWN_STACK = {"attention, 256, one KV head": 8}


@cache
def compiled() -> dict[str, dict]:
    """All cases from one process, without the interpreter that conftest.py asks for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HELPERS.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    script = [sys.executable, HELPERS / "compile_decode.py"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_spills_no_more_than_is_known(case):
    kernel = compiled()[case]
    assert "error" not in kernel, kernel["error"]
    assert kernel["stack"] <= KNOWN_STACK.get(case, 0)


@pytest.mark.parametrize("case", [case for case in CASES if case != "embed"])
def test_weights_and_history_are_asked_for_before_the_wait(case):
    """And there is a wait in every kernel but the one that begins a step."""
    kernel = compiled()[case]
    assert kernel["waits"]
    assert kernel["early"]


def test_a_merge_reads_nothing_old():
    """Whoever counts a head's finished blocks empties the L1 before it reads what they left."""
    merging = {case: kernel for case, kernel in compiled().items() if kernel["counts"]}
    assert "attention, 128K" in merging
    assert [case for case, kernel in merging.items() if not kernel["empties_l1"]] == []
