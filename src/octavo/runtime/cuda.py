"""The ``cuda`` runtime: steps on a GPU, those that decode as CUDA graphs.

A step's integers come in one upload and are laid out in fixed buffers on the device, where ids that
the host doesn't know yet are filled in. A step in which every row decodes and samples is padded to
one of a few sizes, and is one launch, of a graph that is captured when the first such step comes,
or earlier: while the host has nothing to do, or waits for a step of many prompt tokens. So is a
short prompt that comes alone, padded to one of a few lengths. Every other step is launched op by
op. Nothing waits for the device but :meth:`CudaRuntime.wait`.

Of few rows, such a step and its sampling are one launch where the engine tells both at once, and
that makes the next step's inputs, too: while no row begins a block, nothing is uploaded.

Deterministic, a token's bits depend on nothing but the tokens before it (docs/precision.md has the
rules): decode rows and prefill rows are carried out apart, whatever step they are part of, each by
kernels of their own whose sums don't depend on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.spec import AttentionBatch, Backend
from octavo.engine.batch import StepBatch
from octavo.engine.sampling import SampleOutput, SamplingBatch
from octavo.kernels.norm.triton import add_rms_norm
from octavo.kernels.step_inputs.layout import make_inputs
from octavo.kernels.step_inputs.triton import unpack
from octavo.models.spec import DecoderSpec
from octavo.models.weights import num_parameters
from octavo.runtime.capture_ahead import CaptureAhead
from octavo.runtime.cuda_fused import Cuts, FusedDecode, fused_ways
from octavo.runtime.cuda_linears import LIBRARY, fixed_linears
from octavo.runtime.cuda_stages import Attention, Stages
from octavo.runtime.cuda_step import GroupStep, Step
from octavo.runtime.device_sampling import DeviceSampler, Handle
from octavo.runtime.eager import Layer
from octavo.runtime.graphs import Graphs
from octavo.runtime.packing import most_ints, pack
from octavo.runtime.torch_weights import DecoderTensors
from octavo.runtime.upload import Upload

# A prefill row of so many operations in one layer's attention is worth the calls, a dozen a row,
# that a candidate makes for which the host cuts rows up; below, one launch for all rows is faster.
LONG_ROW_FLOPS = 1e11

# Up to so many rows, a decode step has a graph together with its sampling. Of more, hardly a step
# goes by in which no row begins a block, and what lies between two steps is less of it.
WHOLE_ROWS = 16

# Tokens to which prompts with graphs are padded. To launch their ops, nine a layer, takes the host
# several times as long as they take the device; past them it doesn't.
PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Limits:
    """The largest step: tokens, rows, and blocks of a row."""

    tokens: int
    rows: int
    blocks: int


class CudaRuntime:
    """A model on a GPU: its weights, its KV pools, and the ops for its stages.

    ``attention`` has the candidates of each KV group, whose pools lie as block, token, head, dim.
    ``graphs`` off launches every step op by op. ``fused`` off has no fused decode steps but
    deterministic ones, which are fused in any number of rows wherever they can be; attention must
    then be of kernels that don't look at the batch.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderTensors,
        layers: Sequence[Layer],
        attention: Sequence[Attention],
        limits: Limits,
        *,
        max_model_len: int,
        graphs: bool,
        fused: bool = True,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.layers = layers
        self._weights = weights
        self._attention = attention
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._deterministic = deterministic
        with self._on_device():
            self._linears = fixed_linears(self.device) if deterministic else LIBRARY
        self._stages = Stages(
            spec, weights, layers, attention, self._linears, max_model_len=max_model_len
        )
        groups = len(attention)
        self._upload = Upload(
            most_ints(limits.tokens, limits.rows, groups, limits.blocks), self.device
        )
        self._inputs = make_inputs(
            limits.tokens, limits.rows, groups, limits.blocks, str(self.device)
        )
        capped = spec.logit_soft_cap is not None
        self._logits = torch.empty(  # of the rows that sample, in the order of their rows
            limits.rows,
            spec.vocab_size,
            dtype=torch.float32 if capped else self.dtype,
            device=self.device,
        )
        self._hidden: Tensor | None = None  # of the last step's wanted logits; None: all sampled
        self._is_next = False  # the inputs are those of the step that follows the last one
        self._buckets = batch_buckets(limits.rows)
        self._graphs = Graphs(graphs)
        self._sampler = DeviceSampler(self._logits, self._buckets, self._graphs)
        specs = [one.decode.spec for one in attention]
        ways = fused_ways(spec, self.dtype, specs, limits.rows, deterministic=deterministic)
        self._fused = [
            FusedDecode(way, spec, weights, layers, self._inputs, self._stages.rope)
            for way in (ways if fused or deterministic else [])
        ]
        self._plans: dict[int, list[GroupStep]] = {}
        self._hold_buffers()
        self._prompt_sizes = [size for size in PROMPT_SIZES if size <= limits.tokens]
        if deterministic or any(one.short_prefill is None for one in attention):
            self._prompt_sizes = []
        self._ahead = CaptureAhead(
            self.kinds_of_decode(max_model_len) if graphs else [],
            list(self._prompt_sizes) if graphs else [],
            num_parameters(spec),
        )
        self._batch: StepBatch | None = None  # the last step

    # ---- the two launches of a step, and both in one

    def forward(self, batch: StepBatch) -> None:
        """See :class:`octavo.runtime.Runtime`."""
        rows = batch.num_rows
        # Where every row decodes and samples, logits are those of the rows in order.
        plain = batch.num_decodes == batch.num_tokens
        plain &= batch.num_tokens == len(batch.sample_rows) == len(batch.logits_indices)
        with self._on_device():
            if plain:
                rows = self._bucket(rows)
                self._lay_out(batch, rows, rows)
                key = self._decode_key(rows, int(batch.seq_lens.max()))
                self._graphs.run(key, lambda: self._launch_decode(*key))
                self._hidden = None
            elif (size := self._prompt_size(batch)) is not None:
                self._lay_out(batch, size, rows)
                self._graphs.run(("prompt", size), lambda: self._launch_prompt(size))
                self._hidden = None
            else:
                self._lay_out(batch, batch.num_tokens, rows)
                self._mixed(batch)
                self._ahead.launched(batch.num_tokens)
        self._batch = batch

    def sample(self, batch: SamplingBatch) -> Handle:
        """See :class:`octavo.runtime.Runtime`."""
        assert self._batch is not None
        rows = self._batch.sample_rows
        with self._on_device():
            return self._sampler.launch(batch, rows, self._logits_at)

    def decode(self, batch: StepBatch, sampling: SamplingBatch, *, goes_on: bool) -> Handle:
        """See :class:`octavo.runtime.DecodesWhole`."""
        if batch.num_rows > WHOLE_ROWS or sampling.edits_logits:
            self.forward(batch)
            return self.sample(sampling)
        rows = self._bucket(batch.num_rows)
        with self._on_device():
            if not (goes_on and self._is_next):
                self._lay_out(batch, rows, rows)
            filtered = self._sampler.prepare(sampling, batch.sample_rows)
            key = self._decode_key(rows, int(batch.seq_lens.max()))
            self._graphs.run(("whole", *key, filtered), lambda: self._launch_whole(*key, filtered))
            self._batch, self._hidden, self._is_next = batch, None, True
            return self._sampler.hand_over(sampling, batch.sample_rows, self._logits_at)

    def wait(self, handle: Handle) -> SampleOutput:
        while self._ahead.has_time and not handle.is_done and self.capture_ahead():
            pass
        return self._sampler.wait(handle)

    def capture_ahead(self) -> bool:
        """See :class:`octavo.runtime.CapturesAhead`."""
        began = time.monotonic()
        decode = self._ahead.next_decode(0 if self._batch is None else self._batch.num_rows)
        size = self._ahead.next_prompt() if decode is None else None
        with self._on_device():
            if decode is not None:
                self._capture_decode(*decode)
            elif size is not None:
                self._graphs.capture(("prompt", size), lambda: self._launch_prompt(size))
            else:
                return False
        self._ahead.seconds = time.monotonic() - began
        return True

    def _capture_decode(self, rows: int, longest: int) -> None:
        key = self._decode_key(rows, longest)
        self._graphs.capture(key, lambda: self._launch_decode(*key))
        if rows <= WHOLE_ROWS:
            whole = ("whole", *key, False)
            self._graphs.capture(whole, lambda: self._launch_whole(*key, filtered=False))
        self._sampler.capture(rows)

    def kinds_of_decode(self, max_model_len: int) -> list[tuple[int, int]]:
        """Rows and length of one decode step of each kind: every size, and where fused kernels
        look at the longest row, every way in which they cut it."""
        powers = [1 << i for i in range(max_model_len.bit_length())]
        lengths = [n for power in powers for n in (power, power * 3 // 2) if n < max_model_len]
        kinds: dict[Any, tuple[int, int]] = {}
        for bucket in self._buckets:
            for length in (*lengths, max_model_len):
                kinds.setdefault(self._decode_key(bucket, length), (bucket, length))
        return list(kinds.values())

    @property
    def logits(self) -> Tensor:
        """The last step's, float32 [L, vocab], on the host; for tests."""
        assert self._batch is not None
        with self._on_device():
            if self._hidden is None:
                return self._logits[: self._batch.num_rows].float().cpu()
            return self._stages.head(self._hidden).float().cpu()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), on_stream:
            yield

    def _lay_out(self, batch: StepBatch, num_tokens: int, num_rows: int) -> None:
        """Make the step's inputs, padded to so many tokens and rows."""
        self._is_next = False
        self._upload.send(pack(batch, self._upload.array()))
        unpack(
            self._upload.device,
            self._sampler.row_ids,
            self._inputs,
            num_tokens=num_tokens,
            num_rows=num_rows,
        )
        self._upload.launched()

    # ---- steps in which every row decodes

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _fused_of(self, rows: int) -> FusedDecode | None:
        """What fuses decode steps of so many rows, if anything does."""
        return next((fused for fused in self._fused if rows <= fused.max_rows), None)

    def _decode_key(self, bucket: int, longest: int) -> tuple[int, Cuts | None]:
        fused = self._fused_of(bucket)
        return bucket, None if fused is None else fused.cuts(bucket, longest)

    def _hold_buffers(self) -> None:
        """Make what steps of every size keep from launch to launch: what a graph is captured with
        must not be its own, as graphs share their memory."""
        with self._on_device():
            for bucket in reversed(self._buckets):  # the largest scratch, once
                fused = self._fused_of(bucket)
                if fused is None:
                    self._plans[bucket] = self._decode_groups(bucket)
                else:
                    fused.buffers_of(bucket)

    def _launch_whole(self, bucket: int, cuts: Cuts | None, filtered: bool) -> None:
        self._launch_decode(bucket, cuts)
        self._sampler.choose(bucket, filtered, inputs=self._inputs)

    def _launch_decode(self, bucket: int, cuts: Cuts | None) -> None:
        fused, logits = self._fused_of(bucket), self._logits[:bucket]
        if fused is not None and cuts is not None and fused.has_head:
            fused.launch(bucket, cuts, logits)
        else:
            self._stages.head(self._decoded(bucket, cuts), logits)

    def _decoded(self, rows: int, cuts: Cuts | None) -> Tensor:
        """The head's input [rows, hidden] for the step's first rows, which decode."""
        fused = self._fused_of(rows)
        if fused is not None and cuts is not None:
            x = fused.launch_layers(rows, cuts)
            normed = add_rms_norm(x, self._weights.final_norm, self.spec.norm_eps, dtype=self.dtype)
            assert normed is not None
            return normed
        if rows not in self._plans:
            self._plans[rows] = self._decode_groups(rows)
        step = Step(
            x=self._stages.embedded(self._inputs.ids[:rows]).float(),
            products=self._linears.decode,
            positions=self._inputs.positions[:rows],
            num_decodes=rows,
            groups=self._plans[rows],
            logits_rows=None,
        )
        return self._stages.run(step)

    def _decode_groups(self, rows: int) -> list[GroupStep]:
        inputs = self._inputs
        return [
            GroupStep(
                slots=inputs.slots[number, :rows],
                decode_plan=attention.decode.plan_on_device(
                    inputs.prefill_starts, inputs.seq_lens[:rows], inputs.tables[number, :rows]
                ),
                prefill=None,
                prefill_plan=None,
            )
            for number, attention in enumerate(self._attention)
        ]

    # ---- steps of one short prompt

    def _prompt_size(self, batch: StepBatch) -> int | None:
        """To how many tokens a step is padded that has a graph as its only row is a prompt, or the
        end of one, that samples; None: it isn't such a step."""
        alone = batch.num_rows == len(batch.logits_indices) == len(batch.sample_indices) == 1
        if not alone or batch.num_decodes or not self._rows_are_short(batch):
            return None
        return next((size for size in self._prompt_sizes if size >= batch.num_tokens), None)

    def _launch_prompt(self, size: int) -> None:
        inputs = self._inputs
        groups = []
        for number, attention in enumerate(self._attention):
            assert attention.short_prefill is not None
            plan = attention.short_prefill.plan_on_device(
                inputs.prefill_starts[:2], inputs.prefill_lens[:1], inputs.tables[number, :1]
            )
            slots = inputs.slots[number, :size]
            groups.append(GroupStep(slots, None, attention.short_prefill, plan))
        step = Step(
            x=self._stages.embedded(inputs.ids[:size]),
            products=self._linears.others,
            positions=inputs.positions[:size],
            num_decodes=0,
            groups=groups,
            logits_rows=inputs.logits_rows[:1],
        )
        self._stages.head(self._stages.run(step), self._logits[:1])

    # ---- all other steps

    def _mixed(self, batch: StepBatch) -> None:
        apart = batch.num_decodes if self._deterministic else 0
        rows = self._inputs.logits_rows[: len(batch.logits_indices)]
        parts = []
        if apart:
            _, cuts = self._decode_key(apart, int(batch.seq_lens[:apart].max()))
            decoded = int(np.searchsorted(batch.logits_indices, apart))
            parts.append(self._decoded(apart, cuts)[rows[:decoded]])
            # Where launches are only noted, nothing has been uploaded, and there are zeros.
            rows = (rows[decoded:] - apart).clamp_(min=0)
        if apart < batch.num_tokens:
            step = Step(
                x=self._stages.embedded(self._inputs.ids[apart : batch.num_tokens]),
                products=self._linears.others,
                positions=self._inputs.positions[apart : batch.num_tokens],
                num_decodes=batch.num_decodes - apart,
                groups=[self._plan(number, batch, apart) for number in range(len(self._attention))],
                logits_rows=rows,
            )
            parts.append(self._stages.run(step))
        self._hidden = sampled = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(batch.sample_indices) < len(sampled):
            sampled = sampled[self._indices(batch.sample_indices)]
        if len(sampled):
            self._stages.head(sampled, self._logits[: len(sampled)])

    def _plan(self, group: int, batch: StepBatch, apart: int) -> GroupStep:
        """Of all rows but the first ``apart``."""
        attention, inputs = self._attention[group], self._inputs
        first, rows = batch.num_decodes, batch.num_rows  # decode rows have one token each
        lens, tables, starts = inputs.seq_lens, inputs.tables[group], inputs.prefill_starts
        prefill_lens = inputs.prefill_lens[: rows - first]
        decode_plan = prefill_plan = None
        prefill: Backend | None = None
        if first > apart:
            decode_plan = attention.decode.plan_on_device(starts, lens[:first], tables[:first])
        if first < rows:
            short = attention.short_prefill
            if short is not None and self._rows_are_short(batch):
                prefill = short
                prefill_plan = short.plan_on_device(
                    starts[: rows - first + 1], prefill_lens, tables[first:rows]
                )
            else:
                prefill = attention.prefill
                prefill_plan = prefill.plan(
                    AttentionBatch(
                        batch.query_start_loc[first:] - first,
                        batch.seq_lens[first:],
                        batch.block_table[group][first:],
                    )
                )
        slots = inputs.slots[group, apart : batch.num_tokens]
        return GroupStep(slots, decode_plan, prefill, prefill_plan)

    def _rows_are_short(self, batch: StepBatch) -> bool:
        first = batch.num_decodes
        queries = np.diff(batch.query_start_loc[first:]).astype(np.float64)
        pairs = (queries * (batch.seq_lens[first:] - queries / 2)).sum()
        flops = 4 * self.spec.q_size * pairs
        return bool(flops < LONG_ROW_FLOPS * len(queries))

    def _logits_at(self, indices: NDArray[np.int32]) -> Tensor:
        """Logits of some of the step's wanted tokens."""
        if self._hidden is None:
            return self._logits[self._indices(indices)]
        return self._stages.head(self._hidden[self._indices(indices)])

    def _indices(self, indices: NDArray[np.int32]) -> Tensor:
        source = torch.from_numpy(indices)
        if self.device.type == "cuda":
            source = source.pin_memory()
        return source.to(self.device, non_blocking=True).long()


def batch_buckets(max_rows: int) -> list[int]:
    """Sizes to which decode steps are padded: powers of two up to 16, then in steps of 16."""
    sizes = [1, 2, 4, 8, *range(16, max_rows, 16)]
    return [size for size in sizes if size < max_rows] + [max_rows]
