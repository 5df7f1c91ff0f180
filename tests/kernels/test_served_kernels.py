"""What loading compiles is all that serving needs, for Hopper, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")

from octavo.runtime.cuda_load import numbers_of_rows

TESTS = Path(__file__).parents[1]


def test_no_served_step_meets_a_compiler() -> None:
    """Prompts, decode rows and both, of numbers of rows about every one at which something else
    is compiled. It was 1.9 s of a benchmark of 5: attention of 17 to 31 rows beside prompts."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    script = [sys.executable, "-m", "helpers.served_kernels"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == dict.fromkeys(found, "nothing")


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 100, 256])
def test_numbers_of_rows(most: int) -> None:
    """The least and the most of those that are padded to each power of two."""
    found = numbers_of_rows(most)
    classes = [1 << (rows - 1).bit_length() for rows in range(1, most + 1)]
    for padded in set(classes):
        alike = [rows for rows in range(1, most + 1) if classes[rows - 1] == padded]
        assert {alike[0], alike[-1]} <= set(found)
    assert found == sorted(set(found))
    assert found[-1] == most
