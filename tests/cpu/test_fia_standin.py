"""The stand-in of Ascend's operator itself: it must raise where the operator does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import fia_standin


def valid_call(layout: str = "TND", queries: int = 2, **changes):
    """Two rows of 20 keys in blocks of 128; one query each, or more in prefill."""
    shape = {"TND": (queries, 4, 128), "BNSD": (2, 4, 1, 128), "BSND": (2, 1, 4, 128)}[layout]
    pool = (3, 128, 256) if layout == "BSND" else (3, 2, 128, 128)
    call = {
        "query": torch.ones(shape).bfloat16(),
        "key": torch.ones(pool).bfloat16(),
        "value": torch.ones(pool).bfloat16(),
        "block_table": torch.tensor([[1], [2]], dtype=torch.int32),
        "actual_seq_kvlen": [20, 20],
        "block_size": 128,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": layout,
    }
    if layout == "TND":
        call["actual_seq_qlen"] = [1, queries]
    return call | changes


def ones(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("layout", ["TND", "BNSD", "BSND"])
def test_the_stand_in_takes_what_is_right(layout) -> None:
    out, lse = fia_standin.attention(**valid_call(layout), return_softmax_lse=True)
    assert (out == 1).all()
    assert lse.shape == {"TND": (2, 4, 1)}.get(layout, (2, 4, 1, 1))
    torch.testing.assert_close(lse, torch.full_like(lse, 128 + np.log(20)))
    assert fia_standin.attention(**valid_call(layout))[1].numel() == 0


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("TND", {"actual_seq_qlen": [1, 3]}, r"queryT\(2\) must be equal to the last element\(3\)"),
        ("TND", {"actual_seq_qlen": None}, "mandatory in TND"),
        ("TND", {"actual_seq_qlen": [2, 1]}, "isn't cumulative"),
        ("TND", {"actual_seq_kvlen": [20]}, "actual_seq_kvlen has 1 elements"),
        ("TND", {"actual_seq_kvlen": None}, "mandatory with a block table"),
        ("TND", {"actual_seq_kvlen": [20, 138]}, r"138 should be in range \[0, 128\]"),
        ("TND", {"actual_seq_kvlen": torch.tensor([20, 20])}, "isn't a list of the host's"),
        ("BNSD", {"actual_seq_kvlen": []}, r"561002: .* should be >= batch size\(2\)"),
        ("BNSD", {"num_query_heads": 1}, "query has 4 heads, num_query_heads is 1"),
        ("BNSD", {"num_query_heads": 1, "query": ones(2, 1, 1, 128)}, "1 query heads, 2 key"),
        ("BNSD", {"block_size": 0}, "key is"),
        ("BSND", {"key": ones(3, 128, 2, 128)}, "key has 4 dimensions"),
        ("BNSD", {"query": ones(2, 4, 1, 256)[..., ::2]}, "query isn't contiguous"),
        ("BNSD", {"key": ones(6, 2, 128, 128)[::2]}, "key isn't contiguous"),
        ("BNSD", {"query": ones(2, 4, 1, 128, dtype=torch.float32)}, "query is torch.float32"),
        ("BNSD", {"key": ones(3, 2, 128, 128, dtype=torch.float16)}, "key is torch.float16"),
        ("BNSD", {"block_table": torch.tensor([[1], [2]])}, "block_table is torch.int64"),
        ("BNSD", {"block_table": torch.tensor([[1], [-1]], dtype=torch.int32)}, "are no blocks"),
        ("BNSD", {"block_table": torch.tensor([[1]], dtype=torch.int32)}, "for 2 rows"),
        ("TND", {"sparse_mode": 2}, "sparse_mode"),
        ("TND", {"sparse_mode": 3}, "needs atten_mask"),
        ("TND", {"atten_mask": ones(2048, 2048, dtype=torch.int8)}, "must be empty"),
        ("TND", {"sparse_mode": 3, "atten_mask": ones(20, 20, dtype=torch.int8)}, "not .2048"),
        ("TND", {"sparse_mode": 3, "atten_mask": ones(2048, 2048, dtype=torch.int8)}, "triangle"),
    ],
)
def test_the_stand_in_raises_as_the_operator_does(layout, changes, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        fia_standin.attention(**valid_call(layout, **changes))


def test_the_stand_in_refuses_head_and_block_sizes_as_the_operator_does() -> None:
    def call(layout: str, dim: int, block: int, queries: int = 1) -> None:
        shape = {"TND": (1, 4, dim), "BNSD": (1, 4, queries, dim)}[layout]
        pool = ones(2, 2, block, dim)
        lens = {"actual_seq_qlen": [1]} if layout == "TND" else {}
        fia_standin.attention(
            ones(*shape),
            pool,
            pool,
            block_table=torch.tensor([[1]], dtype=torch.int32),
            actual_seq_kvlen=[9],
            num_query_heads=4,
            num_key_value_heads=2,
            block_size=block,
            input_layout=layout,
            **lens,
        )

    for arguments, message in (
        (("TND", 64, 128), r"queryD\(64\)"),
        (("TND", 256, 128), r"queryD\(256\)"),
        (("BNSD", 72, 128), r"D\(72\) must be a multiple of 16"),
        (("BNSD", 128, 8), r"block_size\(8\)"),
        (("BNSD", 128, 528), r"block_size\(528\)"),
        (("BNSD", 128, 16, 2), r"block_size\(16\) must be a multiple of 128"),
        (("TND", 128, 1040), r"block_size\(1040\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)


def test_the_stand_in_ignores_what_the_operator_ignores() -> None:
    """A window in BNSD decode, with no mask at all: the trap behind one of our refusals."""
    values = torch.arange(3 * 2 * 128).view(3, 2, 128, 1).expand(3, 2, 128, 128).bfloat16()
    call = valid_call("BNSD", value=values.contiguous())
    out, _ = fia_standin.attention(**call)
    same, _ = fia_standin.attention(**call, sparse_mode=4, pre_tokens=0, next_tokens=0)
    assert torch.equal(out, same)


def test_the_stand_in_leaves_undefined_what_the_operator_does() -> None:
    out, lse = fia_standin.attention(
        **valid_call(actual_seq_kvlen=[0, 20]), return_softmax_lse=True
    )
    assert out[0].isnan().all()
    assert (lse[0] == torch.inf).all()
    assert (out[1] == 1).all()
