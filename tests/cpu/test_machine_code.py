"""Compiled code that is kept on disk and mapped: the second start neither compiles nor imports
numba, and runs nothing that anybody else may have put there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.kernels import levels
from octavo.kernels.host_cpu import features
from octavo.kernels.kv_store.cpu import scale_of, tile_of
from octavo.kernels.machine_code import Image, NotMovableError, from_bytes, lay_out, place
from octavo.kernels.machine_code import works_here as machine_code_works_here

pytestmark = pytest.mark.skipif(not machine_code_works_here(), reason="only x86-64 on Linux")

# An op that calls compiled functions and one of libm, run by two threads: what a program needs.
PROGRAM = """
import json, sys
import numpy as np
from octavo.kernels.linear.cpu_pack import pack_op
from octavo.kernels.norm.cpu import add_norm
from octavo.kernels.program import Program
from octavo.kernels.team import Team

x = np.arange(64, dtype=np.float32).reshape(2, 32)
out = np.zeros_like(x)
norm = add_norm.bind(count=np.array([2]), rows=0, x=x, y=0, post_weight=0, weight=np.ones(32, "f4"),
                     width=32, eps=1e-6, out=out, out_q8=0, q8_stride=0)
rows = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
packed = np.zeros_like(rows)
sources = rows.ctypes.data + np.arange(16) * rows.strides[0]
pack = pack_op("F32", "F32").bind(sources=sources, target=packed, block_bytes=packed.nbytes,
                                  num_blocks=1, columns=32)
Team(2).run(Program([norm, pack]))
assert (packed.reshape(32, 16) == rows.T).all()
np.testing.assert_allclose(out, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6), rtol=1e-6)
print(json.dumps({
    "hits": [op.compiled.cache_hits for op in (add_norm, pack_op("F32", "F32"))],
    "imported": sorted({"numba", "llvmlite.binding", "torch"} & set(sys.modules)),
    "bits": out.view("u4").sum().item(),
}))
"""


def run(cache: Path, **variables: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"XDG_CACHE_HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_second_start_needs_no_numba(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first["hits"] == [0, 0]
    assert "numba" in first["imported"]
    assert second == {"hits": [1, 1], "imported": [], "bits": first["bits"]}
    [folder] = (tmp_path / "octavo" / "numba").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700

    # Others could have written there: nothing of it is run.
    folder.chmod(0o777)
    assert run(tmp_path)["imported"] == ["llvmlite.binding", "numba"]
    folder.chmod(0o700)

    # With numba's own variables all is left to numba.
    assert "numba" in run(tmp_path, NUMBA_OPT="2")["imported"]

    # What is damaged is compiled again, and kept again.
    for path in folder.glob("*.code"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = run(tmp_path)
    assert again["bits"] == first["bits"]
    assert "numba" in again["imported"]


def test_an_image_comes_back_as_it_was() -> None:
    image = Image(b"\n\xc3\n", 1, [[8, "memset"], [16, ""]])  # type: ignore[list-item]
    assert from_bytes(image.to_bytes()) == image


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(NotMovableError, match="not an object file"):
        lay_out(b"MZ" + bytes(100), "main")
    executable = Path(sys.executable).resolve().read_bytes()
    with pytest.raises(NotMovableError, match="not an object file"):
        lay_out(executable, "main")
    with pytest.raises(NotMovableError, match="no_such_function"):
        place(Image(bytes(16), 0, [(0, "no_such_function")]))


def test_the_cpu_has_what_llvm_finds() -> None:
    import llvmlite.binding

    found = llvmlite.binding.get_host_cpu_features()
    wanted = {name for needs in levels._NEEDS.values() for name in needs}
    assert wanted & features() == {name for name in wanted if found.get(name)}


def test_a_function_that_python_calls_with_integers_and_without() -> None:
    """Integers take the way without numba; both give the same."""
    assert tile_of(37, 2, 32) == tile_of(np.int64(37), 2, 32) == 4
    assert scale_of(np.array([-254, 1], np.float32)) == (2, 0.5)
