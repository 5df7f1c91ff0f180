"""The ``flashinfer`` candidate over a stand-in of the package: every translation at its edge."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle, run
from helpers.flashinfer_standin import make_standin

from octavo.attention.backends import flashinfer as adapter
from octavo.attention.backends.flashinfer import FlashinferCandidate

torch.set_num_threads(1)


def gpu_spec(phase: str = "decode", **changes):
    gpu = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return make_spec(phase, **gpu | changes)


@pytest.fixture
def standin(monkeypatch):
    module = make_standin()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(adapter, "find_spec", lambda name: object())
    monkeypatch.setattr(adapter, "WORKSPACE_BYTES", 1024)
    return module


def test_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    support = FlashinferCandidate().supports(gpu_spec())
    assert (support.ok, support.reason) == (False, "the package flashinfer isn't installed")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on CUDA GPUs, not on cpu"),
        ({"graph": True}, "plans on the host"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "float32 isn't one of bfloat16, float16"),
        ({"kv_dtype": "float8_e4m3fn"}, "stores keys and values as the queries' bfloat16"),
        ({"num_heads": 7}, "needs whole groups of query heads"),
        ({"head_dim": 80}, "head sizes (80, 80) aren't equal and one of 64, 128, 256"),
        ({"head_dim": 128, "v_head_dim": 64}, "head sizes (128, 64)"),
        (
            {"split_mode": "fixed", "split_tokens": 500},
            "segments of 500 tokens aren't whole blocks",
        ),
        ({"split_mode": "fixed", "window": 99}, "cuts a sliding window from its own beginning"),
    ],
)
def test_a_refusal_says_why(standin, changes, reason):
    support = FlashinferCandidate().supports(gpu_spec(**changes))
    assert not support.ok
    assert support.reason.startswith(reason)


def test_the_usual_is_supported(standin):
    for phase in ("prefill", "decode"):
        spec = gpu_spec(phase, window=99, soft_cap=30.0, has_sinks=True, block_size=544)
        assert FlashinferCandidate().supports(spec).ok


FEATURES = [{}, {"window": 1}, {"window": 50}, {"soft_cap": 2.0}, {"has_sinks": True}]


@pytest.mark.parametrize("changes", FEATURES, ids=str)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_out_and_natural_lse(standin, phase, changes):
    """With rows without keys, and NaN wherever nobody may look."""
    spec = make_spec(phase, head_dim=64, **changes)
    lens = [3, 0, 130, 16, 17, 0]
    rows = make_rows(spec, lens, None if phase == "decode" else [3, 0, 60, 1, 17, 0], spread=2)
    sinks = np.linspace(-2, 4, spec.num_heads, dtype=np.float32) if spec.has_sinks else None
    out, lse = run(FlashinferCandidate(), spec, rows, sinks=sinks)
    want, want_lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


def test_a_batch_without_any_key(standin):
    spec = make_spec(head_dim=64)
    out, lse = run(FlashinferCandidate(), spec, make_rows(spec, [0, 0]))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_split_modes(standin, phase):
    """A fixed segment is told in pages."""
    wanted = {"auto": (False, None), "off": (True, None), "fixed": (False, 16)}
    for mode in wanted:
        spec = make_spec(phase, head_dim=64, split_mode=mode, split_tokens=256)
        run(FlashinferCandidate(), spec, make_rows(spec, [40]))
    told = [(call["disable_split_kv"], call.get("fixed_split_size")) for call in standin.calls]
    assert told == list(wanted.values())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_blocks_that_the_window_has_left_behind_are_left_out(standin, phase):
    spec = make_spec(phase, head_dim=64, window=20)
    rows = make_rows(spec, [100], [1 if phase == "decode" else 30])
    run(FlashinferCandidate(), spec, rows)
    (call,) = standin.calls
    first = 5 if phase == "decode" else 3  # of the keys 80 and 51
    assert call["pages"] == rows.batch.block_table[0, first:7].tolist()
    assert call["window_left"] == 19


def test_only_the_newest_plan_runs(standin):
    spec = make_spec(head_dim=64)
    rows = make_rows(spec, [40])
    candidate = FlashinferCandidate()
    backend = candidate.open(spec)
    pool = fill_pool(spec, candidate.kv_layout(spec, num_blocks(rows)), backend, rows)
    old = backend.plan(rows.batch)
    backend.plan(rows.batch)
    with pytest.raises(RuntimeError, match="planned last"):
        backend.run(torch.from_numpy(rows.q), *pool, old)
