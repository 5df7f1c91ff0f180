"""Decode attention by itself: every candidate that can serve, over batch, context and heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from octavo.attention import AttentionSpec
from octavo.attention.candidates import ORDER, ROW_LIMITS, candidate
from octavo.config import SplitMode
from octavo.errors import ConfigError

BLOCK_SIZE = {"npu": 128}  # 16 elsewhere


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and their size."""

    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}x{self.size}"


@dataclass(frozen=True)
class Cell:
    """One measurement. ``us`` is the median time of a step; ``share`` is of the read bandwidth in
    the same run; ``splits`` of a row, None where the candidate doesn't tell."""

    backend: str
    heads: str
    batch: int
    context: int
    split_kv: SplitMode
    splits: int | None
    us: float
    gb_s: float
    share: float


def parse_heads(text: str) -> Heads:
    """``32/8x128``; raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
    heads = Heads(*map(int, match.groups())) if match else None
    if heads is None or 0 in (heads.query, heads.kv, heads.size) or heads.query % heads.kv:
        raise ConfigError(
            f"heads {text!r} aren't query heads / KV heads x head size, such as 32/8x128, with as "
            "many query heads for each KV head"
        )
    return heads


def decode_backends(device: str) -> list[str]:
    """Candidates for decode that can run on the device, but for the reference and for those of
    small steps, which have launches here that no step has."""
    spec = decode_spec(device, Heads(32, 8, 128), *default_dtypes(device))
    return [
        name
        for name in ORDER["decode"]
        if name not in ("reference", *ROW_LIMITS) and candidate(name).supports(spec).ok
    ]


def default_dtypes(device: str) -> tuple[str, str]:
    """Of queries, and of keys and values."""
    return ("float32", "float32") if device == "cpu" else ("bfloat16", "bfloat16")


def decode_spec(
    device: str, heads: Heads, dtype: str, kv_dtype: str, split_kv: SplitMode = "auto"
) -> AttentionSpec:
    return AttentionSpec(
        phase="decode",
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=BLOCK_SIZE.get(device, 16),
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        v_head_dim=heads.size,
        scale=1 / math.sqrt(heads.size),
        split_mode=split_kv,
    )


def bench_attention(
    device: str,
    backends: Sequence[str],
    heads: Sequence[Heads],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    split_kv: Sequence[SplitMode] = ("auto",),
    kv_dtype: str | None = None,
    seconds: float = 0.3,
    read_gb_s: float,
) -> Iterator[Cell | str]:
    """A cell for each combination, or a sentence on why it was left out.

    Every launch reads keys and values that come from memory, none from a cache. ``seconds`` is the
    time for each cell, ``read_gb_s`` the bandwidth measured in this run.
    """
    from octavo.verify.timing import free_bytes, make_workload, num_splits, pool_bytes, sample_us

    dtype, default_kv = default_dtypes(device)
    for shape in heads:
        for batch in batches:
            for context in contexts:
                for name in backends:
                    for mode in split_kv:
                        what = f"{name} {shape} {batch} x {context:,}, splitting {mode}"
                        spec = decode_spec(device, shape, dtype, kv_dtype or default_kv, mode)
                        support = candidate(name).supports(spec)
                        if not support.ok:
                            yield f"{what}: {support.reason}"
                            continue
                        if batch > ROW_LIMITS.get(name, batch):
                            yield f"{what}: a step has up to {ROW_LIMITS[name]} rows"
                            continue
                        if pool_bytes(spec, batch, context) > 0.8 * free_bytes(device):
                            yield f"{what}: its keys and values don't fit the memory that is free"
                            continue
                        work = make_workload(candidate(name), spec, batch, context)
                        us = median(sample_us(work, device, seconds))
                        gb_s = work.num_bytes / us / 1e3
                        yield Cell(
                            name,
                            str(shape),
                            batch,
                            context,
                            mode,
                            num_splits(candidate(name), spec, batch, context),
                            us,
                            gb_s,
                            gb_s / read_gb_s,
                        )
