"""Sampling on the device: the rules of ``engine/sampling.py``, without a wait for the host.

Largest logits, draws and filters are Triton's kernels (``kernels/choose``). What few requests ask
for goes through torch: bans, masks, biases and penalties are made on a float32 copy of the logits,
and log probabilities are counted and ranked on the device; the host makes dicts of them in
:meth:`DeviceSampler.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.sampling import (
    IMPOSSIBLE_LOGPROB,
    SampleOutput,
    SamplingBatch,
    is_filtered,
)
from octavo.kernels.choose.triton import SETTINGS, choose, make_scratch
from octavo.kernels.step_inputs.layout import StepInputs
from octavo.outputs import Logprob, TokenLogprobs
from octavo.runtime.graphs import Graphs
from octavo.runtime.upload import pinned

SCORED_ROWS = 256  # rows of logits that log probabilities are taken from at a time
_LAST_ID = 0xFFFFFFFF
_TURNS = 4
_WEIGHT_BITS = 44


@dataclass(frozen=True)
class Ranked:
    """Log probabilities of R rows, on their way to the host. What isn't finite is -inf or NaN."""

    own: Tensor  # float64 [R], of the row's own token
    rank: Tensor  # int64 [R]
    top: Tensor  # float64 [R, K], of the likeliest, in order
    top_ids: Tensor  # int64 [R, K]


@dataclass(frozen=True)
class Handle:
    """A launched choice. ``done`` is None where the device is the host."""

    ids: NDArray[np.int32]  # [S], pinned: there when ``done`` is
    batch: SamplingBatch
    logprobs: Ranked | None  # of the rows that want any, in order
    prompt_logprobs: list[Ranked]
    done: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


class DeviceSampler:
    """Chooses ids from ``logits`` [rows, V], where forward leaves those of the rows that sample.
    ``row_ids`` on the device has each row's latest id, for the next step."""

    def __init__(self, logits: Tensor, buckets: Sequence[int], graphs: Graphs) -> None:
        max_rows, vocab_size = logits.shape
        device = logits.device
        self.row_ids = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._logits = logits
        self._device = device
        self._buckets = buckets
        self._graphs = graphs
        self._scratch = make_scratch(max_rows, vocab_size, str(device))
        # As many ids may be on their way as steps may be in flight, and one is being read.
        self._ids = pinned((_TURNS, max_rows), device)
        self._host_ids = self._ids.numpy()
        self._events: Iterator[Any] = repeat(None)  # by turns, also of steps that choose nothing
        if device.type == "cuda":
            events = [torch.cuda.Event() for _ in range(_TURNS)]  # type: ignore[no-untyped-call]
            self._events = cycle(events)
        self._settings = torch.zeros(len(SETTINGS), max_rows, dtype=torch.int32, device=device)
        self._sent = np.empty((len(SETTINGS), 0), np.int32)  # what the device has
        self._turn = 0
        self._last: SamplingBatch | None = None
        self._filtered = False

    def launch(
        self,
        batch: SamplingBatch,
        step_rows: NDArray[np.int32],
        prompt_logits: Callable[[NDArray[np.int32]], Tensor],
    ) -> Handle:
        """Choose for the batch's rows, which are rows ``step_rows`` [S] of the step.
        ``prompt_logits`` gives the logits of other places in the step."""
        count = len(step_rows)
        if count:
            filtered = self.prepare(batch, step_rows)
            if batch.edits_logits:
                self.choose(count, filtered, logits=_edited(self._logits[:count], batch))
            else:
                bucket = next(size for size in self._buckets if size >= count)
                self._graphs.run(_key(bucket, filtered), lambda: self.choose(bucket, filtered))
        return self.hand_over(batch, step_rows, prompt_logits)

    def capture(self, bucket: int) -> None:
        """Have the graph of an unfiltered choice for so many rows."""
        self._graphs.capture(_key(bucket, False), lambda: self.choose(bucket, False))

    def prepare(self, batch: SamplingBatch, step_rows: NDArray[np.int32]) -> bool:
        """Have the rows' settings on the device. Whether a filter is asked for."""
        if not self._goes_on(batch, step_rows):
            self._send_settings(pack_settings(batch, step_rows, self._turn))
            self._filtered = bool(is_filtered(batch, self._logits.shape[1]).any())
        self._last = batch
        return self._filtered

    def choose(
        self,
        num_rows: int,
        filtered: bool,
        *,
        logits: Tensor | None = None,
        inputs: StepInputs | None = None,
    ) -> None:
        """Choose for so many rows whose settings are on the device, from ``logits`` [rows, V]
        instead of forward's where they are given; can be captured. ``inputs``, of a step in which
        every row decodes, become those of the next."""
        choose(
            self._logits if logits is None else logits,
            self._settings,
            num_rows,
            self._scratch,
            self._ids,
            self.row_ids,
            filtered=filtered,
            inputs=inputs,
        )

    def hand_over(
        self,
        batch: SamplingBatch,
        step_rows: NDArray[np.int32],
        prompt_logits: Callable[[NDArray[np.int32]], Tensor],
    ) -> Handle:
        """What :meth:`launch` returns, once the ids are being chosen."""
        count, turn = len(step_rows), self._turn % _TURNS
        if count:
            self._sent[-2:] += 1  # as the device counts, too
            self._turn += 1
        logprobs = None
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        if len(wanted):
            rows = _to_device(wanted, self._device)
            taken = self.row_ids[_to_device(step_rows[wanted], self._device)]
            top = int(batch.num_logprobs.max())
            logprobs = _to_host(_rank(self._logits[rows].float(), taken.long(), top))
        prompt_logprobs = []
        for start in range(0, len(batch.prompt_indices), SCORED_ROWS):
            part = slice(start, start + SCORED_ROWS)
            targets = _to_device(batch.prompt_targets[part], self._device).long()
            scored = prompt_logits(batch.prompt_indices[part]).float()
            prompt_logprobs.append(
                _to_host(_rank(scored, targets, int(batch.prompt_top[part].max())))
            )
        done = next(self._events)
        if done is not None:
            done.record()
        return Handle(self._host_ids[turn, :count], batch, logprobs, prompt_logprobs, done)

    def wait(self, handle: Handle) -> SampleOutput:
        """Block until the ids are here."""
        if handle.done is not None:
            handle.done.synchronize()
        batch = handle.batch
        ids = handle.ids.copy()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if handle.logprobs is not None:
            wanted = np.flatnonzero(batch.num_logprobs >= 0)
            found = _entries(handle.logprobs, ids[wanted], batch.num_logprobs[wanted])
            for row, entry in zip(wanted.tolist(), found, strict=True):
                logprobs[row] = entry if ids[row] >= 0 else None
        prompt_logprobs: list[TokenLogprobs] = []
        for part in handle.prompt_logprobs:
            rows = slice(len(prompt_logprobs), len(prompt_logprobs) + len(part.own))
            prompt_logprobs += _entries(part, batch.prompt_targets[rows], batch.prompt_top[rows])
        return SampleOutput(ids, logprobs, prompt_logprobs)

    def _goes_on(self, batch: SamplingBatch, step_rows: NDArray[np.int32]) -> bool:
        """Whether this is the next token of the same rows: the device counts their positions and
        turns itself, so that there is nothing to send. Arrays of an engine's run are the same ones
        from step to step."""
        last = self._last
        return (
            last is not None
            and batch.seed is last.seed
            and batch.temperature is last.temperature
            and np.array_equal(batch.position, self._sent[-2])
            and np.array_equal(step_rows, self._sent[1])
        )

    def _send_settings(self, settings: NDArray[np.int32]) -> None:
        self._sent = settings
        # Rows of padding are greedy, and their ids go where nobody looks.
        whole = np.zeros(self._settings.shape, np.int32)
        whole[1], whole[-1] = len(self.row_ids) - 1, self._turn
        whole[:, : settings.shape[1]] = settings
        self._settings.copy_(_pinned(whole, self._device), non_blocking=True)


def _key(bucket: int, filtered: bool) -> tuple[str, int, bool]:
    return "choose", bucket, filtered


def pack_settings(
    batch: SamplingBatch, step_rows: NDArray[np.int32], turn: int
) -> NDArray[np.int32]:
    """The rows' settings as ``kernels/choose`` takes them, int32 [len(SETTINGS), S]."""
    count = len(step_rows)
    seed = batch.seed.view(np.int32).reshape(-1, 2)  # little-endian: the low half comes first
    rows: tuple[NDArray[Any] | int, ...] = (
        np.arange(count),
        step_rows,
        batch.temperature.view(np.int32),
        batch.top_k,
        batch.top_p.view(np.int32),
        batch.floor.view(np.int32),
        seed[:, 0],
        seed[:, 1],
        batch.choice,
        batch.position,
        turn,
    )
    settings = np.empty((len(SETTINGS), count), np.int32)
    for index, values in enumerate(rows):
        settings[index] = values
    return settings


def _edited(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A float32 copy of the logits with bans, masks, biases and penalties, in this order."""
    device = logits.device

    def send(*arrays: NDArray[Any]) -> list[Tensor]:
        return [_to_device(array, device) for array in arrays]

    block = logits.float() if logits.dtype != torch.float32 else logits.clone()
    if len(batch.ban_rows):
        rows, ids = send(batch.ban_rows, batch.ban_ids)
        block[rows, ids] += -torch.inf
    if len(batch.mask_rows):
        rows, words = send(batch.mask_rows, batch.masks.view(np.int32))
        tokens = torch.arange(block.shape[1], device=device)
        allowed = (words[:, tokens // 32] >> (tokens % 32)) & 1
        block[rows] += torch.where(allowed == 1, 0.0, -torch.inf)
    if len(batch.bias_rows):
        rows, ids, values = send(batch.bias_rows, batch.bias_ids, batch.bias_values)
        block[rows, ids] += values
    if len(batch.count_rows):
        rows, ids, output = send(batch.count_rows, batch.count_ids, batch.count_output)
        repetition, frequency, presence = send(
            *(
                getattr(batch, f"{name}_penalty")[batch.count_rows]
                for name in ("repetition", "frequency", "presence")
            )
        )
        values = block[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * output
        values -= presence * (output > 0)
        block[rows, ids] = values
    return block


def _rank(rows: Tensor, own: Tensor, top: int) -> Ranked:
    """``rows`` [R, V] float32, ``own`` [R] int64 tokens; of equal logits the lower id comes
    first."""
    best = rows.max(dim=1, keepdim=True).values
    # Weights as whole numbers: torch's order of sums depends on R, and no bit must. All of them fit
    # 62 bits. best - best is NaN where best isn't finite.
    weights = (rows - best).exp_().double().mul_(2.0**_WEIGHT_BITS).long()
    log_sum = (weights.sum(1, keepdim=True).double() / 2.0**_WEIGHT_BITS).log()
    log_sum += best.double() + (best - best)
    value = rows.gather(1, own[:, None])
    rank = (rows > value).sum(1) + 1
    # A key that orders by logit, then by id; + 0 because -0 has other bits.
    bits = (rows + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(rows.shape[1], device=rows.device)
    keys = (ordered << 32) | (_LAST_ID - ids)
    top_ids = _LAST_ID - (keys.topk(min(top, rows.shape[1])).values & _LAST_ID)
    top_values = rows.gather(1, top_ids)
    return Ranked((value.double() - log_sum)[:, 0], rank, top_values.double() - log_sum, top_ids)


def _entries(
    ranked: Ranked, tokens: Sequence[int] | NDArray[np.int32], tops: NDArray[np.int32]
) -> list[TokenLogprobs]:
    """A dict for each row, as ``engine/sampling.py`` makes them."""
    entries: list[TokenLogprobs] = []
    for token, count, own, rank, values, ids in zip(
        np.asarray(tokens).tolist(),
        tops.tolist(),
        ranked.own.tolist(),
        ranked.rank.tolist(),
        ranked.top.numpy(),
        ranked.top_ids.tolist(),
        strict=True,
    ):
        if np.isnan(own):  # the row's logits are not finite
            entries.append({})
            continue
        logprob = own if np.isfinite(own) else IMPOSSIBLE_LOGPROB
        entry = {token: Logprob(logprob, rank)}
        # All logits larger than one of the likeliest are among them.
        ranks = np.searchsorted(-values, -values) + 1
        for other, value, place in zip(ids[:count], values.tolist(), ranks.tolist(), strict=False):
            if np.isfinite(value):
                entry.setdefault(other, Logprob(value, place))
        entries.append(entry)
    return entries


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, on its way when this returns; indices become int64."""
    tensor = _pinned(array, device).to(device, non_blocking=True)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def _pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array where the device can copy it from while the host goes on."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    return source.pin_memory() if device.type == "cuda" else source


def _to_host(ranked: Ranked) -> Ranked:
    """The same in pinned memory, on its way when this returns."""

    def send(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    return Ranked(*map(send, (ranked.own, ranked.rank, ranked.top, ranked.top_ids)))
