"""The ``cpu`` runtime: a step is a program of compiled ops, run by a team of threads.

The programs are bound once, at load. What varies from step to step lies in buffers that their ops
read: ids, cosines and sines, the numbers of tokens and logits, each KV group's plan. Nothing here
imports torch.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from octavo.attention.candidates import Selection
from octavo.attention.cpu_step import REPLAN, CpuPlan
from octavo.attention.spec import KVLayout
from octavo.engine.batch import StepBatch
from octavo.engine.sampling import SampleOutput, SamplingBatch
from octavo.kernels.next_tokens.cpu import next_tokens
from octavo.kernels.team import Team, team
from octavo.models.rope import cos_sin
from octavo.models.spec import DecoderSpec
from octavo.runtime.candidates import Model
from octavo.runtime.cpu_program import Attention, Buffers, Programs
from octavo.runtime.cpu_sampling import Sampler
from octavo.runtime.cpu_weights import DecoderWeights, load_weights

Float32 = NDArray[np.float32]
Array = NDArray[Any]

# Steps at once: for so long, in which neither a stream nor a new request hears from us.
AHEAD_SECONDS = 0.010
MOST_AHEAD = 8

_POOL_DTYPES: dict[str, DTypeLike] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "int8": np.int8,
}


def load_cpu(
    model: Model, selections: Sequence[Selection], num_blocks: Sequence[int]
) -> CpuRuntime:
    """Pack the checkpoint's weights and bind the programs. Each group's ``selections`` are the
    ``cpu`` candidate in both phases."""
    spec, config = model.spec, model.config
    crew = team(model.num_threads)
    int8 = config.quantization == "int8"
    weights = load_weights(spec, model.checkpoint, crew, int8=int8)
    specs = [selection.decode_spec for selection in selections]
    groups = [Attention(spec, CpuPlan(spec, crew.num_threads)) for spec in specs]
    group_of = {layer: g for g, group in enumerate(model.groups) for layer in group.layers}
    layers = [group_of[layer] for layer in range(spec.num_layers)]
    layouts = [s.kv_layout(blocks) for s, blocks in zip(selections, num_blocks, strict=True)]
    return CpuRuntime(
        spec,
        weights,
        groups,
        layers,
        [make_pool(layouts[group]) for group in layers],
        crew,
        max_tokens=config.max_num_batched_tokens,
        exact=config.exact,
    )


class CpuRuntime:
    """See :class:`octavo.runtime.Runtime`; everything is done when a call returns.

    ``group_of`` gives the KV group of each layer, ``pools`` its keys and values. ``logits``
    [L, vocab] float32 are those of the last forward.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        groups: Sequence[Attention],
        group_of: Sequence[int],
        pools: Sequence[tuple[Array, Array]],
        crew: Team,
        *,
        max_tokens: int,
        exact: bool,
    ) -> None:
        self.vocab_size = spec.vocab_size
        self.pools = pools
        self._team, self._groups = crew, groups
        self._buffers = Buffers(spec, max_tokens, quantised=not exact)
        attention = [groups[group] for group in group_of]
        self._programs = Programs(spec, weights, self._buffers, attention, pools, exact=exact)
        self._sampler = Sampler(spec.vocab_size, crew)
        self._row_ids = np.empty(0, np.int32)  # [R]: last sample's
        self.num_splits: NDArray[np.int32] | None = None  # see octavo.runtime.ReportsSplits
        self._can_follow = all(
            group.spec.split_mode != "fixed" and group.spec.window is None for group in groups
        )
        self._step_seconds = math.inf  # of the last step of single-token rows
        self._state = np.zeros(2, np.int64)
        self._next_tokens = next_tokens.bind(
            num_rows=self._buffers.num_tokens,
            best=0,
            ids=self._buffers.ids,
            chosen=0,
            state=self._state,
            copies=0,
            num_copies=0,
        )

    @property
    def logits(self) -> Float32:
        return self._programs.logits[: self._buffers.num_logits[0]]

    def forward(self, batch: StepBatch) -> None:
        self._fill(batch)
        decode, prefill = batch.num_decodes > 0, batch.num_decodes < batch.num_rows
        began = time.perf_counter()
        self._team.run(self._programs.program(decode=decode, prefill=prefill))
        if not prefill:
            self._step_seconds = time.perf_counter() - began
        self.num_splits = self._groups[0].plan.num_splits if decode else None
        self._batch = batch

    def _fill(self, batch: StepBatch) -> None:
        """Write what the programs read."""
        buffers, tokens = self._buffers, batch.num_tokens
        ids = batch.input_ids
        if (ids < 0).any():  # those that the last sample chose
            ids = np.where(ids < 0, self._row_ids[batch.id_rows.clip(min=0)], ids)
        buffers.num_tokens[0] = tokens
        buffers.ids[:tokens] = ids
        for rope, (cos, sin) in buffers.ropes.items():
            cos[:tokens], sin[:tokens] = cos_sin(rope, batch.positions)
        wanted = len(batch.logits_indices)
        self._programs.make_room(wanted)
        buffers.num_logits[0] = wanted
        buffers.logits_indices[:wanted] = batch.logits_indices
        for group, table, slots in zip(
            self._groups, batch.block_table, batch.slot_mapping, strict=True
        ):
            group.plan.fill(batch.query_start_loc, batch.seq_lens, batch.num_decodes, table, slots)

    # ---- several steps at once: see octavo.runtime.DecodesAhead

    def steps_ahead(self, seq_len: int) -> int:
        if not self._can_follow:
            return 1
        planned = REPLAN - (seq_len - 1) % REPLAN  # steps for which one plan serves
        return min(int(AHEAD_SECONDS / self._step_seconds), MOST_AHEAD, planned)

    def decode_ahead(self, batches: Sequence[StepBatch]) -> list[SampleOutput]:
        first, later, count = batches[0], batches[1:], len(batches)

        def table(arrays: Iterable[Array]) -> Array:  # [steps, rows]
            return np.array(list(arrays), np.int32).reshape(len(later), first.num_rows)

        # Tables only grow: the last one serves all steps.
        self._fill(replace(first, block_table=batches[-1].block_table))
        follows: list[tuple[Array, Array]] = []
        positions = table(batch.positions for batch in later)
        for rope, buffers in self._buffers.ropes.items():
            values = cos_sin(rope, positions.reshape(-1))
            follows += zip((buffer[: first.num_rows] for buffer in buffers), values, strict=True)
        for number, group in enumerate(self._groups):
            slots = table(batch.slot_mapping[number] for batch in later)
            follows += group.plan.follow(positions + np.int32(1), slots)
        copies = np.array(
            [(to.ctypes.data, values.ctypes.data, to.nbytes) for to, values in follows], np.int64
        )
        chosen = np.empty((count, first.num_rows), np.int32)
        record = self._next_tokens.record
        record["best"], record["chosen"] = self._programs.best.ctypes.data, chosen.ctypes.data
        record["copies"], record["num_copies"] = copies.ctypes.data, len(copies)
        self._state[:] = 0, count
        began = time.perf_counter()
        self._team.run(self._programs.several(count, self._next_tokens))
        self._step_seconds = (time.perf_counter() - began) / count
        self.num_splits = self._groups[0].plan.num_splits
        self._batch, self._row_ids = batches[-1], chosen[-1].clip(min=0)
        return [SampleOutput(ids, [None] * len(ids), []) for ids in chosen]

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        output = self._sampler.choose(self.logits, self._programs.best, batch)
        # An id that couldn't be chosen is -1; its row is about to fail, any id will do for it.
        self._row_ids = np.zeros(self._batch.num_rows, np.int32)
        self._row_ids[self._batch.sample_rows] = output.token_ids.clip(min=0)
        return output

    def wait(self, handle: SampleOutput) -> SampleOutput:
        return handle


def make_pool(layout: KVLayout) -> tuple[Array, Array]:
    """Keys and values of one layer, in pages that cost memory once they are written."""
    kind = np.dtype(_POOL_DTYPES[layout.dtype])

    def pages(shape: tuple[int, ...]) -> Array:
        # Not numpy's own: it asks for pages of 2 MB, and a single token would cost as much.
        memory = mmap.mmap(-1, max(prod(shape) * kind.itemsize, 1))
        return np.frombuffer(memory, kind, prod(shape)).reshape(shape)

    return pages(layout.k_shape), pages(layout.v_shape)
