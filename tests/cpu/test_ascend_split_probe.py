"""bench/ascend_split_probe.py, which asks an NPU whether the operator splits by itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from helpers import fia_standin

PROBE = Path(__file__).parents[2] / "bench" / "ascend_split_probe.py"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = spec_from_file_location("ascend_split_probe", PROBE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
@pytest.mark.parametrize(
    ("own_segments", "answer"),
    [(1, "does not split by itself"), (12, "unclear"), (24, "splits by itself")],
)
def test_the_probe_tells_who_splits(monkeypatch, probe, layout, own_segments, answer) -> None:
    """A device of 24 cores that takes a microsecond for a token, and shares out each row longer
    than 1,024 tokens over some of them."""

    operator = fia_standin.install(monkeypatch)

    def measure(runs) -> float:
        operator.calls.clear()
        for one in runs:
            one()
        lens = [call["actual_seq_kvlen"] for call in operator.calls]
        assert len(lens) == len(runs) == 4096 // sum(lens[0])
        assert all(each == lens[0] for each in lens)
        longest = max(lens[0])
        return longest / min(own_segments, 24 // len(lens[0])) if longest > 1024 else longest

    lengths = [512, 2048, 4096]
    cells = probe.probe(layout, probe.probe_spec("cpu", 4, 1, 128), lengths, measure, 4096)
    assert [cell.tokens for cell in cells] == lengths
    assert [cell.cut_us for cell in cells] == [128, 128, 256]
    assert cells[-1].whole_us == 4096 / own_segments
    assert probe.verdict(cells).startswith(answer)


def test_the_probe_needs_an_npu() -> None:
    result = subprocess.run([sys.executable, str(PROBE)], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        "ascend_split_probe: torch_npu isn't installed; run this on a machine with an NPU\n"
    )
