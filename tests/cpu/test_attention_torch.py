"""The ``torch`` candidate, its kernel replaced by the formula: cuDNN runs on a GPU only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.attention import make_rows, make_spec, oracle, run

from octavo.attention.backends import torch as backend
from octavo.attention.backends.torch import TorchBackend, TorchCandidate, prefix_segments

torch.set_num_threads(1)


def gpu_spec(phase: str = "prefill", **changes):
    return make_spec(
        phase, **{"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16"} | changes
    )


class OnCpu(TorchCandidate):
    def open(self, spec):
        return TorchBackend(spec)


@pytest.fixture
def shapes(monkeypatch):
    """The shapes that the kernel is asked for: (queries, keys, causal)."""
    asked = []

    def formula(q, k, v, scale, *, causal):
        asked.append((len(q), len(k), causal))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            assert len(q) == len(k)
            scores = scores.masked_fill(~torch.ones_like(scores[0]).tril().bool(), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T

    monkeypatch.setattr(backend, "sdpa", formula)
    return asked


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": "decode"}, "would copy the whole history for each decoded token"),
        ({"device": "cpu"}, "runs on CUDA GPUs, not on cpu"),
        ({"graph": True}, "loops over the rows on the host, so it can't be captured"),
        ({"dtype": "float32"}, "float32 isn't one of bfloat16, float16"),
        ({"kv_dtype": "float16"}, "stores keys and values as the queries' bfloat16"),
        ({"num_heads": 7}, "needs whole groups of query heads"),
        ({"head_dim": 100}, "head sizes (100, 100) aren't multiples of 8 up to 256"),
        ({"head_dim": 576, "v_head_dim": 512}, "head sizes (576, 512) aren't"),
        ({"window": 9}, "has no sliding windows"),
        ({"soft_cap": 30.0}, "has no soft cap"),
    ],
)
def test_a_refusal_says_why(changes, reason):
    support = TorchCandidate().supports(gpu_spec(**changes))
    assert not support.ok
    assert support.reason.startswith(reason)


def test_the_usual_is_supported():
    assert TorchCandidate().supports(gpu_spec(has_sinks=True, head_dim=256)).ok


@pytest.mark.parametrize("has_sinks", [False, True])
def test_fresh_chunked_mixed_and_empty_rows(shapes, has_sinks):
    spec = make_spec("prefill", head_dim=16, has_sinks=has_sinks)
    rows = make_rows(spec, [5, 130, 700, 0, 300, 64], [5, 130, 40, 0, 1, 0])
    sinks = np.linspace(-2, 4, spec.num_heads, dtype=np.float32) if has_sinks else None
    out, lse = run(OnCpu(), spec, rows, sinks=sinks)
    want, want_lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


def test_the_kernel_meets_few_shapes(shapes):
    """Each new one costs cuDNN 50 ms or more."""
    spec = make_spec("prefill", head_dim=16)
    lens = range(600, 1500, 37)
    run(OnCpu(), spec, make_rows(spec, list(lens), [n % 250 + 1 for n in lens]))
    assert {queries for queries, _, _ in shapes} <= {128, 256, 512}
    assert {keys for _, keys, causal in shapes if not causal} <= {128, 256, 512, 1024}


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 1000, 4096, 5000])
def test_segments_are_powers_of_two_and_leave_little(length):
    segments = prefix_segments(length)
    covered = 0
    for start, stop in segments:
        assert start == covered
        assert (stop - start).bit_count() == 1
        covered = stop
    assert 0 <= length - covered < 128
    assert len({stop - start for start, stop in segments}) == len(segments)
