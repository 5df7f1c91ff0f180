"""The cpu backend and its kernel, against attention in float64 and against the reference."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle, run

from octavo.attention.backends import cpu as cpu_backend
from octavo.attention.backends.cpu import CpuCandidate
from octavo.attention.backends.reference import ReferenceCandidate
from octavo.kernels.team import Team

LENGTHS = [1, 15, 16, 17, 0, 300, 4097]
SINKS = np.linspace(-1, 3, 6).astype(np.float32)


def check(spec, rows, got, sinks=None, atol=1e-5):
    out, lse = oracle(spec, rows, sinks)
    np.testing.assert_allclose(got[0], out, atol=atol)
    np.testing.assert_allclose(got[1], lse, atol=atol)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 2000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_decode(window, soft_cap, sinks):
    spec = make_spec(window=window, soft_cap=soft_cap)
    rows = make_rows(spec, LENGTHS)
    check(spec, rows, run(CpuCandidate(), spec, rows, sinks=sinks), sinks)


@pytest.mark.parametrize(
    ("group", "head_dim", "v_head_dim"),
    [
        (1, 64, 64),
        (2, 128, 128),
        (5, 80, 80),
        (6, 96, 96),
        (7, 256, 256),
        (12, 64, 128),
        (24, 192, 128),
        (3, 8, 24),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_shapes(group, head_dim, v_head_dim, kv_dtype):
    spec = make_spec(
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_dtype=kv_dtype,
    )
    rows = make_rows(spec, [1, 65, 300])
    got, wanted = run(CpuCandidate(), spec, rows), run(ReferenceCandidate(), spec, rows)
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)


def test_large_scores_and_small_weights():
    """Scores past what exp can hold, and weights that underflow to nothing."""
    spec = make_spec()
    rows = make_rows(spec, [300], spread=100.0)
    assert np.abs(oracle(spec, rows)[1]).max() > 200
    check(spec, rows, run(CpuCandidate(), spec, rows), atol=2e-4)


def test_nan_in_a_live_key_or_value_is_not_swallowed():
    spec = make_spec(num_heads=3, num_kv_heads=1)
    for side in ("keys", "values"):
        rows = make_rows(spec, [300, 300])
        getattr(rows, side)[1][17, 0, 3] = np.nan
        out, lse = run(CpuCandidate(), spec, rows)
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1]).any()
        assert np.isnan(lse[1]).all() == (side == "keys")


def test_bfloat16_is_rounded_to_nearest_even_as_torch_does():
    spec = make_spec(kv_dtype="bfloat16")
    backend = CpuCandidate().open(spec)
    values = torch.randn(64, 2, 64) * 10.0 ** torch.randint(-30, 30, (64, 2, 64))
    values[0, 0, :4] = torch.tensor([torch.nan, torch.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    values[1, 0, 0] = torch.from_numpy(np.array([0x7F800001], np.uint32).view(np.float32))[0]
    layout = CpuCandidate().kv_layout(spec, 4)
    pool = [torch.zeros(shape, dtype=torch.bfloat16) for shape in (layout.k_shape, layout.v_shape)]
    backend.write(values, -values, *pool, torch.arange(64, dtype=torch.int32))
    k, v = backend.gather(*pool, torch.arange(4, dtype=torch.int32), 60)
    assert k.dtype == torch.bfloat16
    torch.testing.assert_close(k, values[:60].bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v, -values[:60].bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("candidate", [CpuCandidate(), ReferenceCandidate()])
def test_a_negative_slot_stores_nothing(candidate):
    spec = make_spec()
    layout = candidate.kv_layout(spec, 2)
    pool = [torch.zeros(shape) for shape in (layout.k_shape, layout.v_shape)]
    k, v = torch.ones(2, 2, 64), torch.ones(2, 2, 64)
    candidate.open(spec).write(k, v, *pool, torch.tensor([-1, 3], dtype=torch.int32))
    assert pool[0].sum() == pool[1].sum() == 2 * 64


def test_numpy_in_numpy_out_without_torch():
    """The cpu runtime's way in: a process that never loads torch."""
    code = """
import sys
sys.path.insert(0, "tests")
import numpy as np
from helpers.attention import make_rows, make_spec, oracle
from octavo.attention.backends.cpu import CpuCandidate
spec = make_spec()
rows = make_rows(spec, [40])
backend, layout = CpuCandidate().open(spec), CpuCandidate().kv_layout(spec, 5)
k_cache, v_cache = np.zeros(layout.k_shape, np.float32), np.zeros(layout.v_shape, np.float32)
table = rows.batch.block_table[0]
slots = np.array([table[i // 16] * 16 + i % 16 for i in range(40)], np.int32)
backend.write(rows.keys[0], rows.values[0], k_cache, v_cache, slots)
out, lse = backend.run(rows.q, k_cache, v_cache, backend.plan(rows.batch))
np.testing.assert_allclose(out, oracle(spec, rows)[0], atol=1e-5)
k, v = backend.gather(k_cache, v_cache, table, 40)
np.testing.assert_array_equal(k, rows.keys[0])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def run_with_threads(monkeypatch, threads, spec, rows):
    monkeypatch.setattr(cpu_backend, "SHORT_BYTES", 0)
    backend = CpuCandidate().open(spec)
    backend._team = Team(threads)
    pool = fill_pool(spec, CpuCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    plan = backend.plan(rows.batch)
    assert plan.team.num_threads == threads
    return backend.run(torch.from_numpy(rows.q), *pool, plan)


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_any_number_of_threads(monkeypatch, mode):
    """Fixed mode gives the same bits; auto cuts differently, and agrees."""
    spec = make_spec(split_mode=mode, split_tokens=100)
    rows = make_rows(spec, [1, 700, 0, 4097, 64])
    one = run_with_threads(monkeypatch, 1, spec, rows)
    for threads in (2, 3, 8):
        several = run_with_threads(monkeypatch, threads, spec, rows)
        if mode == "fixed":
            assert torch.equal(several[0], one[0])
            assert torch.equal(several[1], one[1])
        torch.testing.assert_close(several[0], one[0], atol=1e-5, rtol=0)


def test_a_short_step_wakes_nobody():
    spec = make_spec()
    backend = CpuCandidate().open(spec)
    backend._team = Team(2)
    plan = backend.plan(make_rows(spec, [300]).batch)
    assert plan.team.num_threads == 1
    assert plan.splits.num_splits.tolist() == [1]
    assert backend.plan(make_rows(spec, [3000]).batch).team.num_threads == 2


def test_beside_torchs_own_threads(monkeypatch):
    """Interleaved with torch's OpenMP regions, from several Python threads: no deadlock, and
    nothing is different."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(cpu_backend, "SHORT_BYTES", 0)
    spec = make_spec(split_mode="fixed", split_tokens=64)
    rows = make_rows(spec, [700, 300])
    backend = CpuCandidate().open(spec)
    pool = fill_pool(spec, CpuCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    q = torch.from_numpy(rows.q)
    wanted, _ = backend.run(q, *pool, backend.plan(rows.batch))

    def work(_):
        plan = backend.plan(rows.batch)
        for _ in range(20):
            square = torch.randn(200, 200)
            square @ square
            out, _ = backend.run(q, *pool, plan)
            assert torch.equal(out, wanted)

    with ThreadPoolExecutor(3) as several:
        list(several.map(work, range(3), timeout=60))


def test_a_second_process_compiles_nothing(tmp_path):
    """It finds the kernels in the cache folder, which is platformdirs' unless the user says."""
    code = """
import sys
sys.path.insert(0, "tests")
import numpy as np
from helpers.attention import make_rows, make_spec
from octavo.attention.backends.cpu import CpuCandidate
spec = make_spec(num_heads=2)
rows = make_rows(spec, [3])
backend, layout = CpuCandidate().open(spec), CpuCandidate().kv_layout(spec, 3)
backend.run(rows.q, np.zeros(layout.k_shape, np.float32), np.zeros(layout.v_shape, np.float32),
            backend.plan(rows.batch))
print(sum(call.op.compiled.cache_hits for call in backend.plan(rows.batch).calls))
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    hits = [
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            env=environment,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "2"]
    assert list((tmp_path / "octavo" / "numba").glob("*/*/*.nbc"))
