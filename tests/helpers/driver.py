"""Drives a runtime without an engine: step batches built by hand, for tests of the runtimes.

``load`` opens a checkpoint on the eager runtime with its KV pools full of NaN, so that reading a
slot that was never written shows. ``Driver`` keeps a few sequences and runs chunks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.cache.groups import KVGroup, kv_groups
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.batch import StepBatch
from octavo.models.families import spec_from_config
from octavo.models.weights import check_weights
from octavo.runtime.candidates import choose_attention

Float32 = NDArray[np.float32]


@dataclass(eq=False)
class Row:
    """A sequence in the KV pools: what has been computed of it, and its blocks in each group."""

    length: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Driver:
    """Runs chunks of sequences on any runtime with ``forward`` and ``logits``.

    Blocks are handed out in a shuffled order and never taken back. A block that a sliding window
    has left behind is struck from the table (-1), as the engine does.
    """

    def __init__(
        self, runtime: Any, groups: Sequence[KVGroup], block_size: int, num_blocks: int
    ) -> None:
        self.runtime = runtime
        self.groups = groups
        self.block_size = block_size
        rng = np.random.default_rng(7)
        self.free = [rng.permutation(num_blocks).tolist() for _ in groups]

    def sequence(self) -> Row:
        return Row(blocks=[[] for _ in self.groups])

    def step(
        self, chunks: Sequence[tuple[Row, Sequence[int]]], logits: str = "all"
    ) -> list[Float32]:
        """Compute a chunk of each sequence; returns each one's logits ``[tokens, vocab]``, or
        ``[1, vocab]`` of its last token with ``logits="last"``."""
        batch, order = self.batch(chunks, logits)
        self.runtime.forward(batch)
        rows = np.asarray(self.runtime.logits).copy()
        counts = [1 if logits == "last" else len(chunks[i][1]) for i in order]
        parts = np.split(rows, np.cumsum(counts)[:-1])
        return [parts[order.index(i)] for i in range(len(chunks))]

    def batch(
        self, chunks: Sequence[tuple[Row, Sequence[int]]], logits: str = "all"
    ) -> tuple[StepBatch, list[int]]:
        """The step batch, and the chunks' order in it: single tokens first."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i][1]) > 1)
        rows = [chunks[i] for i in order]
        for sequence, ids in rows:
            self._grow(sequence, sequence.length + len(ids))
        positions = [np.arange(s.length, s.length + len(ids)) for s, ids in rows]
        starts = np.cumsum([0, *(len(ids) for _, ids in rows)])
        widest = max(len(s.blocks[0]) for s, _ in rows)
        slots, tables = [], []
        for g, group in enumerate(self.groups):
            table = np.full((len(rows), widest), -1)
            for r, (sequence, _) in enumerate(rows):
                first = group.first_key(sequence.length) // self.block_size
                table[r, first : len(sequence.blocks[g])] = sequence.blocks[g][first:]
            tables.append(table)
            slots.append(
                np.concatenate(
                    [
                        table[r, p // self.block_size] * self.block_size + p % self.block_size
                        for r, p in enumerate(positions)
                    ]
                )
            )
        for sequence, ids in rows:
            sequence.length += len(ids)
        wanted = starts[1:] - 1 if logits == "last" else np.arange(starts[-1])
        ids = np.concatenate([np.asarray(ids) for _, ids in rows])
        last = starts[1:] - 1
        return StepBatch(
            input_ids=_int32(ids),
            id_rows=_int32(np.full(len(ids), -1)),
            positions=_int32(np.concatenate(positions)),
            query_start_loc=_int32(starts),
            seq_lens=_int32([s.length for s, _ in rows]),
            num_decodes=sum(len(ids) == 1 for _, ids in rows),
            slot_mapping=tuple(_int32(s) for s in slots),
            block_table=tuple(_int32(t) for t in tables),
            logits_indices=_int32(wanted),
            sample_indices=_int32(np.searchsorted(wanted, last)),
            sample_rows=_int32(np.arange(len(rows))),
        ), order

    def _grow(self, sequence: Row, length: int) -> None:
        for g, blocks in enumerate(sequence.blocks):
            while len(blocks) * self.block_size < length:
                blocks.append(self.free[g].pop())

    def run(
        self, ids: Sequence[int], chunk: int | None = None, decode_from: int | None = None
    ) -> Float32:
        """Logits ``[len(ids), vocab]`` of a sequence computed in chunks (None: whole), and from
        ``decode_from`` on token by token."""
        sequence = self.sequence()
        prompt = len(ids) if decode_from is None else decode_from
        size = chunk or prompt
        cuts = [*range(0, prompt, size), *range(prompt, len(ids)), len(ids)]
        parts = [self.step([(sequence, ids[a:b])])[0] for a, b in pairwise(cuts)]
        return np.concatenate(parts)


def load(
    model: Path | Checkpoint,
    *,
    block_size: int = 16,
    num_blocks: int = 128,
    backend: str | None = "reference",
    dtype: str = "float32",
    num_threads: int = 1,
) -> Driver:
    """A checkpoint on the eager runtime, every slot of its KV pools NaN."""
    from octavo.runtime.eager import load_eager

    checkpoint = open_checkpoint(model) if isinstance(model, Path) else model
    spec = check_weights(spec_from_config(checkpoint.config), checkpoint)
    groups = kv_groups(spec)
    config = EngineConfig(dtype=dtype, block_size=block_size, attention_backend=backend)
    selections = choose_attention(config, spec, groups, "cpu", dtype, dtype)
    runtime = load_eager(
        spec,
        checkpoint,
        groups,
        selections,
        [num_blocks] * len(groups),
        dtype=dtype,
        num_threads=num_threads,
    )
    for layer in runtime.layers:
        layer.k_cache.fill_(float("nan"))
        layer.v_cache.fill_(float("nan"))
    return Driver(runtime, groups, block_size, num_blocks)


def load_cpu_runtime(
    model: Path | Checkpoint,
    *,
    block_size: int = 16,
    num_blocks: int = 128,
    num_threads: int = 2,
    max_tokens: int = 512,
    **options: Any,
) -> Driver:
    """A checkpoint on the cpu runtime, every slot of its KV pools NaN (128 times a NaN in int8).

    ``options`` are those of the engine's config, such as ``exact``."""
    from octavo.runtime.candidates import CpuCandidate, Model
    from octavo.runtime.cpu import load_cpu

    checkpoint = open_checkpoint(model) if isinstance(model, Path) else model
    spec = check_weights(spec_from_config(checkpoint.config), checkpoint)
    config = EngineConfig(
        block_size=block_size,
        threads=num_threads,
        max_num_batched_tokens=max_tokens,
        attention_backend="cpu",
        **options,
    )
    described = Model(spec, checkpoint, kv_groups(spec), config, "cpu")
    assert CpuCandidate().supports(described).ok
    dtypes = CpuCandidate().dtypes(described)
    selections = choose_attention(config, spec, described.groups, "cpu", *dtypes)
    runtime = load_cpu(described, selections, [num_blocks] * len(selections))
    for pool in runtime.pools:
        for cache in pool:
            cache.view(np.uint8)[...] = 0xFF
    return Driver(runtime, described.groups, block_size, num_blocks)


def relative_error(logits: Float32, reference: Float32) -> float:
    """Largest difference, relative to the reference's largest logit."""
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


def _int32(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)
