"""The ``fused`` candidate on a real GPU: needles beside its own cuts, and a captured step."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from helpers.attention import make_spec

from octavo.attention.backends.fused import FusedCandidate
from octavo.verify.checks import errors
from octavo.verify.problems import cut_to, exact, hide_needles, make_pool, make_problem

CANDIDATE = FusedCandidate()
HALF = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
SPEC = make_spec(num_heads=16, num_kv_heads=8, head_dim=128, **HALF)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or os.environ.get("TRITON_INTERPRET") == "1"
    or not CANDIDATE.supports(SPEC).ok,
    reason="needs a CUDA GPU of compute capability 9.0 and compiled kernels",
)


@pytest.mark.parametrize("length", [129, 257, 1000, 8192, 40_000])
def test_a_needle_beside_every_cut_of_a_row_alone(length):
    backend = CANDIDATE.open(SPEC)
    problem = make_problem(SPEC, [length])
    plan = backend.plan(problem.batch)
    tiles = -(-length // plan.cut.tokens)
    splits = plan.cut.splits  # some may be empty
    cuts = sorted({plan.cut.tokens * (i * tiles // splits) for i in range(splits)})
    assert len(cuts) > 1 or length <= 256  # which one block reads
    for place in [0, length - 1, *(key - side for key in cuts[1:] for side in (0, 1))]:
        problem = make_problem(SPEC, [length])
        hide_needles(problem, [place])
        pool = make_pool(CANDIDATE, backend, problem)
        found = errors(*backend.run(problem.q, *pool, plan), *exact(problem))
        assert found["error"] < 2e-2
        assert found["LSE error"] < 1e-4


def test_a_captured_run_sees_what_was_planned_last():
    spec = make_spec(num_heads=16, num_kv_heads=8, head_dim=128, graph=True, **HALF)
    backend = CANDIDATE.open(spec)
    longest = make_problem(spec, [3000, 200, 4000])
    pool = make_pool(CANDIDATE, backend, longest)
    plan = backend.plan(longest.batch)
    backend.run(longest.q, *pool, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = backend.run(longest.q, *pool, plan)
    for lens in ([3000, 200, 4000], [1, 64, 65], [2999, 0, 129]):
        problem = cut_to(longest, np.array(lens, np.int32))
        assert backend.plan(problem.batch) is plan
        graph.replay()
        found = errors(*answer, *exact(problem))
        assert found["error"] < 2e-2
        assert found["LSE error"] < 1e-4
