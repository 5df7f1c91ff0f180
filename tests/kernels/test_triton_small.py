"""The small kernels of the ``cuda`` runtime beside their references, in the interpreter."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from octavo.attention.merge import merge_lse
from octavo.engine.batch import StepBatch
from octavo.kernels.gated import reference as gated_reference
from octavo.kernels.gated.triton import gated
from octavo.kernels.merge_rows.triton import merge_rows
from octavo.kernels.norm import reference as norm_reference
from octavo.kernels.norm.triton import add_rms_norm
from octavo.kernels.rope_write import reference as rope_reference
from octavo.kernels.rope_write import triton as rope_triton
from octavo.kernels.rope_write.triton import rope_write
from octavo.kernels.step_inputs import reference as inputs_reference
from octavo.kernels.step_inputs.layout import StepInputs, make_inputs
from octavo.kernels.step_inputs.triton import unpack
from octavo.runtime.packing import most_ints, pack

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 80, 512, 513])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight, post = randn(size), randn(size)
    for options in (
        {},
        {"delta": randn(5, size, dtype=dtype)},
        {"delta": randn(5, size, dtype=dtype), "post_weight": post},
        {"delta": randn(3, 5, size, dtype=dtype)},
        {"delta": randn(2, 5, size, dtype=dtype), "post_weight": post},
    ):
        for x_dtype in {dtype, torch.float32}:
            x = randn(5, size, dtype=x_dtype)
            ours, theirs = x.clone(), x.clone()
            found = add_rms_norm(ours, weight, 1e-5, dtype=dtype, **options)
            wanted = norm_reference.add_rms_norm(theirs, weight, 1e-5, dtype=dtype, **options)
            close(found, wanted, dtype)
            close(ours, theirs, dtype)
    assert add_rms_norm(x[:0], weight, 1e-5).shape == (0, size)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1023, 1025])
def test_gated(size: int, dtype: torch.dtype, activation: str) -> None:
    x = randn(3, 2 * size, dtype=dtype) * 4
    close(gated(x, activation), gated_reference.gated(x, activation), dtype)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "block_size", "normed"),
    [(4, 2, 16, 8, 16, True), (3, 1, 80, 40, 5, False), (6, 3, 24, 6, 1, True)],
)
def test_rope_write(
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
    block_size: int,
    normed: bool,
    dtype: torch.dtype,
    parts: bool,
) -> None:
    shape = (5, (heads + 2 * kv_heads) * head_dim)
    qkv = randn(*((3, *shape) if parts else shape), dtype=dtype)
    positions = torch.tensor([0, 7, 3, 49, 0], dtype=torch.int32)
    slots = torch.tensor([2, 0, 19, 11, -1], dtype=torch.int32)  # the last one is padding
    options = {"num_heads": heads, "eps": 1e-6}
    if normed:
        options["qk_norm"] = randn(heads + kv_heads, head_dim)
    angles = torch.rand(50, half) * 6
    results = []
    for op in (rope_write, rope_reference.rope_write):
        caches = [torch.full((20, block_size, kv_heads, head_dim), torch.nan) for _ in range(2)]
        caches = [cache.to(dtype) for cache in caches]
        q = op(qkv, positions, angles.cos(), angles.sin(), *caches, slots, **options)
        results.append((q, *caches))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        close(found.nan_to_num(), wanted.nan_to_num(), dtype)


@pytest.mark.parametrize("count", [12, 13])  # several tokens a block, the last one's fewer
def test_rope_write_of_many_tokens(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_triton, "MANY", 12)
    qkv, norm = randn(count, 20 * 16), randn(18, 16)
    tables = torch.arange(count, dtype=torch.int32), *torch.rand(2, count, 8)
    slots = torch.arange(count, dtype=torch.int32).flip(0) - 1
    results = []
    for op in (rope_write, rope_reference.rope_write):
        caches = [torch.full((3, 5, 2, 16), torch.nan) for _ in range(2)]
        q = op(qkv, *tables, *caches, slots, num_heads=16, qk_norm=norm, eps=1e-6)
        results.append((q, *caches))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        close(found.nan_to_num(), wanted.nan_to_num(), torch.float32)


@pytest.mark.parametrize("partials", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_rows(partials: int, dtype: torch.dtype) -> None:
    out, lse = randn(partials, 7, 3, 24, dtype=dtype), randn(partials, 7, 3) * 5
    lse[0, :2] = -torch.inf
    lse[:, 4] = -torch.inf  # all empty
    out[lse == -torch.inf] = 0
    found, found_lse = merge_rows(list(out), lse)
    wanted, wanted_lse = merge_lse(out.float(), lse)
    close(found, wanted.to(dtype), dtype)
    close(found_lse, wanted_lse, torch.float32)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [1, 1, 300], [5, 2], [1] * 300])
@pytest.mark.parametrize("groups", [1, 2])
def test_step_inputs(counts: list[int], groups: int) -> None:
    """Laid out with padding, ids that the device knows filled in, and nothing else touched."""
    rng = np.random.default_rng(len(counts))

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(1, 1000, shape).astype(np.int32)

    tokens, rows = sum(counts), len(counts)
    id_rows = np.where(rng.random(tokens) < 0.5, ints(tokens) % rows, -1).astype(np.int32)
    batch = StepBatch(
        input_ids=np.where(id_rows < 0, ints(tokens), -1).astype(np.int32),
        id_rows=id_rows,
        positions=ints(tokens),
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=ints(rows),
        num_decodes=counts.count(1),
        slot_mapping=tuple(ints(tokens) for _ in range(groups)),
        block_table=tuple(ints(rows, 270) for _ in range(groups)),
        logits_indices=np.arange(0, tokens, 2, dtype=np.int32),
        sample_indices=ints(0),
        sample_rows=ints(0),
    )
    packed = np.full(most_ints(tokens, rows, groups, 270), -7, np.int32)
    count = pack(batch, packed)
    assert count <= len(packed)
    row_ids = torch.from_numpy(ints(rows))
    found, wanted = (make_inputs(tokens + 3, rows + 3, groups, 271, "cpu") for _ in range(2))
    for inputs in (found, wanted):
        for field in fields(StepInputs):
            getattr(inputs, field.name).fill_(-9)
    padding = {"num_tokens": tokens + 2, "num_rows": rows + 2}
    unpack(torch.from_numpy(packed), row_ids, found, **padding)
    inputs_reference.unpack(torch.from_numpy(packed), row_ids, wanted, **padding)
    for field in fields(StepInputs):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
    known = torch.where(
        torch.from_numpy(id_rows) < 0,
        torch.from_numpy(batch.input_ids),
        row_ids[torch.from_numpy(id_rows).long().clamp(min=0)],
    )
    assert torch.equal(found.ids[:tokens], known)
