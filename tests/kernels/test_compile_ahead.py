"""Kernels compiled ahead by other processes, for Hopper, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from helpers.server import gone, wait_for

from octavo.runtime import cuda_load

TESTS = Path(__file__).parents[1]


def test_launches_find_what_other_processes_compiled(tmp_path: Path) -> None:
    """Also beside one that can't be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, "-m", "helpers.compile_ahead"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "noted": [
            ["gated", "_gated_kernel"],
            ["norm_linear", "_norm_linear_kernel"],
            ["linear_fixed", "wide_linear_kernel"],
        ],
        "processes": 2,
        "processes of the second time": 0,
        "in the cache": [True, True, True],
    }
    assert "compiling 4 kernels" in done.stderr
    assert "left to their launch: AttributeError" in done.stderr
    assert "no_such_kernel" in done.stderr


def test_the_forge_ends_with_the_process_that_began_it(tmp_path: Path) -> None:
    script = (
        "import os; from octavo.runtime.cuda_early import forge\n"
        "print(forge().pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    wait_for(lambda: gone(int(done.stdout)))


def test_what_goes_wrong_ahead_is_left_to_the_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(launch: object) -> None:
        raise KeyError("is_manual_warmup")

    monkeypatch.setattr(cuda_load, "note_kernels", fail)
    cuda_load.compile_ahead(None, None, 1)  # type: ignore[arg-type]
    assert "compiled one after the other" in caplog.text
