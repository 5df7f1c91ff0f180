"""Choosing tokens on the device, for CUDA through Triton: settings, scratch, launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.choose.triton_draw import choose_kernel, finish_kernel
from octavo.kernels.choose.triton_filter import (
    bounds_kernel,
    collect_kernel,
    long_list_kernel,
    short_list_kernel,
)
from octavo.kernels.step_inputs.layout import StepInputs
from octavo.kernels.triton_launch import INTERPRETED, dependent_launches, power_of_2

# Rows of the settings, int32 [len(SETTINGS), rows]; floats by their bits. ``logits_row`` is a row
# of the logits, ``step_row`` where the id goes for the next step. ``floor`` is the lowest score
# that min_p leaves, or LOWEST_SCORE. ``turn`` says which of the outputs is written.
SETTINGS = (
    "logits_row",
    "step_row",
    "temperature",
    "top_k",
    "top_p",
    "floor",
    "seed_low",
    "seed_high",
    "choice",
    "position",
    "turn",
)
CHUNK = 8192  # tokens of a block
ONE_LAUNCH = 64  # rows; of 256, waiting for one another cost the blocks 4 to 6 us
FILTER_BLOCK = 2048
EDGES = 8
SHORT_LIST = 1024


@dataclass(frozen=True)
class Scratch:
    """What blocks leave for those that follow, for up to so many rows."""

    values: Tensor  # float32 [2, rows, chunks]: largest logit, and what the drawn bunch won with
    ids: Tensor  # int32 [rows, chunks]: the token of that logit, or that bunch where a row draws
    counters: Tensor  # int32 [rows]: finished chunks; zero between launches
    above: Tensor  # float32 [rows, filter blocks, 2, EDGES]
    lengths: Tensor  # int32 [rows], of the lists of tokens to draw from
    totals: Tensor  # float64 [rows]: the weight of all tokens that min_p leaves
    filtered: Tensor  # int32 [rows]: the ids drawn from lists


def make_scratch(num_rows: int, vocab_size: int, device: str) -> Scratch:
    chunks = -(-vocab_size // CHUNK)
    blocks = -(-vocab_size // FILTER_BLOCK)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Scratch(
        floats(2, num_rows, chunks),
        ints(num_rows, chunks),
        ints(num_rows).zero_(),
        floats(num_rows, blocks, 2, EDGES),
        ints(num_rows),
        floats(num_rows, dtype=torch.float64),
        ints(num_rows),
    )


def choose(
    logits: Tensor,
    settings: Tensor,
    num_rows: int,
    scratch: Scratch,
    ids: Tensor,
    row_ids: Tensor,
    *,
    filtered: bool,
    inputs: StepInputs | None = None,
) -> None:
    """Choose a token for each of the first ``num_rows`` columns of ``settings``.

    ``logits`` [any, V], last dimension contiguous; ``settings`` as :data:`SETTINGS` says. ``ids``
    [turns, rows] int32 (pinned host memory will do) gets the tokens at ``turn % turns``, -1 where a
    row's logits are not finite, and so does ``row_ids[step_row]``, but 0 for -1. Positions and
    turns are counted up, ready for the next token. ``filtered``: a row may have top_k, top_p or
    min_p. ``inputs``, of a step whose row r is column r (one with another ``step_row`` is padding),
    become those of the next token: ``advance`` of ``kernels/step_inputs/reference.py``. Launches
    only; ``logits`` alone may be written by the kernel in front.
    """
    vocab_size = logits.shape[1]
    chunks = -(-vocab_size // CHUNK)
    dependent = dependent_launches()
    partials = settings, scratch.values, scratch.ids, scratch.filtered
    results = ids, row_ids, _advanced(inputs)
    strides = (
        logits.stride(0),
        settings.stride(0),
        scratch.values.stride(0),
        ids.stride(0),
        0 if inputs is None else inputs.slots.stride(0),
    )
    constants = {
        "TURNS": len(ids),
        "GROUPS": 0 if inputs is None else len(inputs.slots),
        "CHUNKS": power_of_2(chunks),
        "num_warps": 4,
    }
    one_launch = not filtered and num_rows <= ONE_LAUNCH
    choose_kernel[(chunks, num_rows)](
        logits,
        *partials,
        scratch.counters,
        *results,
        vocab_size,
        *strides,
        **constants,
        CHUNK=CHUNK,
        FINISH=one_launch,
        APPROX=not INTERPRETED,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        maxnreg=128,  # four blocks a multiprocessor for three, and nothing is spilled
    )
    if filtered:
        _draw_from_few(logits, settings, num_rows, scratch)
    if not one_launch:
        finish_kernel[(num_rows,)](
            logits, *partials, *results, chunks, vocab_size, *strides, **constants
        )


def _advanced(inputs: StepInputs | None) -> tuple[Tensor, ...] | None:
    """What a token more changes, as the kernels take it."""
    if inputs is None:
        return None
    return inputs.ids, inputs.positions, inputs.slots, inputs.seq_lens


def _draw_from_few(logits: Tensor, settings: Tensor, num_rows: int, scratch: Scratch) -> None:
    vocab_size = logits.shape[1]
    chunks = -(-vocab_size // CHUNK)
    blocks = -(-vocab_size // FILTER_BLOCK)
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    tokens = torch.empty_like(scores, dtype=torch.int32)
    source = logits, settings, scratch.values, scratch.above, scratch.lengths
    sizes = vocab_size, chunks, logits.stride(0), settings.stride(0)
    constants = {
        "CHUNKS": power_of_2(chunks),
        "BLOCK": FILTER_BLOCK,
        "EDGES": EDGES,
        "num_warps": 8,
    }
    bounds_kernel[(blocks, num_rows)](*source, *sizes, **constants)
    collect_kernel[(blocks, num_rows)](
        *source,
        scratch.totals,
        scores,
        tokens,
        *sizes,
        BLOCKS=power_of_2(blocks),
        **constants,
    )
    lists = settings, scratch.lengths, scratch.totals, scores, tokens, scratch.filtered, vocab_size
    stride = settings.stride(0)
    short_list_kernel[(num_rows,)](*lists, stride, SHORT=SHORT_LIST, num_warps=8)
    long_list_kernel[(num_rows,)](
        *lists, stride, SHORT=SHORT_LIST, BLOCK=2048, PIVOTS=8, num_warps=16
    )
