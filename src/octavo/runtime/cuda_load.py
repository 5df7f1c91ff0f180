"""From a model and its attention to a :class:`~octavo.runtime.cuda.CudaRuntime`, ready to run.

Steps of every kind are run before the pools are allocated, over a few blocks and through the first
layers only, those that differ: kernels are compiled, or fetched from Triton's cache in the user's,
so that no request waits for them, and what a step needs besides weights and KV is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import triton

from octavo.attention.candidates import Selection, candidate, open_pair
from octavo.cache.groups import KVGroup, kv_groups
from octavo.engine.batch import StepBatch
from octavo.engine.sampling import SamplingBatch, SamplingRow, make_sampling_batch
from octavo.host import granted_cores
from octavo.runtime.candidates import Model
from octavo.runtime.cuda import CudaRuntime, Limits
from octavo.runtime.cuda_compile import compile_kernels, note_kernels
from octavo.runtime.cuda_early import compiled_mark, dismiss_forge, set_cache_folder
from octavo.runtime.cuda_stages import Attention
from octavo.runtime.eager import free_device_memory, make_layers
from octavo.runtime.memory import plan_kv
from octavo.runtime.torch_weights import DecoderTensors, load_weights, random_weights
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FEW_BLOCKS = 64
_GRAPH_BYTES = 512 << 20  # what the graphs of all sizes take, about


def load_cuda(
    model: Model,
    dtype: str,
    selections: Sequence[Selection],
    num_blocks: tuple[int, ...],
    lap: Callable[[str], None],
) -> tuple[CudaRuntime, tuple[int, ...]]:
    """Load the weights in ``dtype`` (in float32 products are exact: no TF32), and the rest.
    ``num_blocks`` is what was planned; unless the user said so, it is planned anew from what is
    measured. Returns the runtime and the blocks of each KV group that it has; ``lap`` is told of
    each part's end."""
    kind = getattr(torch, dtype)
    if kind is torch.float32:
        torch.set_float32_matmul_precision("highest")
    set_cache_folder()
    free = free_device_memory(model.device)
    spec, config = model.spec, model.config
    if model.checkpoint is None:
        weights = random_weights(spec, device=model.device, dtype=kind, seed=0)
    else:
        weights = load_weights(
            spec,
            model.checkpoint,
            device=model.device,
            dtype=kind,
            num_threads=model.num_threads,
        )
    lap("weights")
    attention = [open_attention(selection) for selection in selections]
    lap("attention")
    weight_bytes = torch.cuda.memory_allocated(model.device)
    few = [_FEW_BLOCKS] * len(num_blocks)
    first_layers = shortened(model)
    runtime = _make_runtime(first_layers, weights, attention, selections, few, graphs=False)
    allocated = torch.cuda.memory_allocated(model.device) - weight_bytes
    # Which kernels there are takes a second to find out, so it is done once for a model.
    mark, gpu = compiled_mark(model), torch.cuda.get_device_name(model.device)
    is_marked = mark.exists() and mark.read_text() == gpu
    if not is_marked and compile_ahead(runtime, first_layers, few[0]):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(gpu)
    dismiss_forge()
    lap("compile")
    torch.cuda.reset_peak_memory_stats(model.device)
    run_largest_steps(runtime, first_layers, few[0])
    peak = torch.cuda.max_memory_allocated(model.device) - weight_bytes
    warm_up(runtime, first_layers, few[0])
    del runtime
    torch.cuda.empty_cache()
    lap("kernels")
    if config.num_gpu_blocks_override is None:
        # Code of kernels, workspaces of libraries: what torch doesn't know of.
        others = free - free_device_memory(model.device) - torch.cuda.memory_reserved(model.device)
        num_blocks = plan_kv(
            spec,
            model.groups,
            [selection.kv_layout(1) for selection in selections],
            block_size=config.block_size,
            weights=weight_bytes,
            dtype=dtype,
            free_bytes=free,
            utilization=config.gpu_memory_utilization,
            max_model_len=config.max_model_len or spec.max_position,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
            fill=True,
            activations=max(peak, allocated) + max(others, 0) + _GRAPH_BYTES,
        )
    graphs = not config.enforce_eager
    runtime = _make_runtime(model, weights, attention, selections, num_blocks, graphs=graphs)
    for count in (1, 2):  # a decode and a prefill step
        batch = make_step([count], [count], config.block_size, num_blocks[0], model.groups)
        run_step(runtime, batch, SamplingParams())
    lap("pools")
    return runtime, num_blocks


def open_attention(selection: Selection) -> Attention:
    """The chosen pair; and ours for prefill steps of short rows, where it could have been chosen
    but for its place in the order."""
    prefill, decode = open_pair(selection)
    ours: Any = None
    states = {verdict.candidate: verdict.state for verdict in selection.verdicts["prefill"]}
    if states["triton"] == "possible":
        ours = candidate("triton").open(selection.prefill_spec)
    graph_decode: Any = decode
    return Attention(graph_decode, prefill, ours)


def run_largest_steps(runtime: CudaRuntime, model: Model, num_blocks: int) -> None:
    """A prefill step of as many tokens as a step may have, and a decode step of as many rows, both
    sampled with filters."""
    config = model.config
    longest = config.max_model_len or model.spec.max_position
    left = config.max_num_batched_tokens
    lengths: list[int] = []
    while left > 0 and len(lengths) < config.max_num_seqs:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    params = SamplingParams(top_k=20, top_p=0.9)
    for counts in (lengths, [1] * config.max_num_seqs):
        batch = make_step(counts, counts, config.block_size, num_blocks, model.groups)
        run_step(runtime, batch, params)


def shortened(model: Model) -> Model:
    """The model with its first layers alone: one of each kind and another, whose residual stream
    comes from a layer. Their kernels are those of all."""
    layers = model.spec.layers
    count = 1 + max(layers.index(layer) for layer in layers)
    spec = replace(model.spec, layers=layers[: count + 1])
    return replace(model, spec=spec, groups=kv_groups(spec))


def compile_ahead(runtime: CudaRuntime, model: Model, num_blocks: int) -> bool:
    """Have the kernels of all steps compiled on all cores, where they aren't yet. Whether that
    went well."""

    def launch() -> None:
        run_largest_steps(runtime, model, num_blocks)
        warm_up(runtime, model, num_blocks)

    try:
        kernels = note_kernels(launch)
        target = triton.runtime.driver.active.get_current_target()
        compile_kernels(kernels, target, granted_cores())
    except Exception as error:  # it leans on how Triton works inside
        logger.warning("octavo: kernels are compiled one after the other (%s)", error)
        return False
    return True


def warm_up(runtime: CudaRuntime, model: Model, num_blocks: int) -> None:
    """Run a step of each kind that is compiled by itself; the pools' contents don't matter yet."""
    config = model.config
    longest = config.max_model_len or model.spec.max_position

    def run(counts: list[int], length: int, **params: Any) -> None:
        lengths = [max(count, length) for count in counts]
        batch = make_step(counts, lengths, config.block_size, num_blocks, model.groups)
        run_step(runtime, batch, SamplingParams(**params))

    numbers = numbers_of_rows(config.max_num_seqs)
    for rows in numbers:  # first what takes longest to compile
        if 2 * rows <= config.max_num_batched_tokens:
            run([2] * rows, 2)
    for rows in numbers:  # what decodes beside a prompt
        if rows < config.max_num_seqs and rows + 2 <= config.max_num_batched_tokens:
            run([1] * rows + [2], 2)
    for rows, length in runtime.kinds_of_decode(longest):
        run([1] * rows, length)
    run([1], 1, top_k=20, top_p=0.9)
    one = make_step([1], [1], config.block_size, num_blocks, model.groups)
    for params in (SamplingParams(), SamplingParams(top_k=20, top_p=0.9)):
        runtime.wait(runtime.decode(one, _sampling(runtime, one, params), goes_on=False))


def numbers_of_rows(most: int) -> list[int]:
    """The fewest and the most rows up to each power of two: attention's kernels are compiled for
    that, and between the two at most once go another way (as full batches do)."""
    powers = [1 << i for i in range((most - 1).bit_length() + 1)]
    return sorted({min(rows, most) for power in powers for rows in (power // 2 + 1, power)})


def run_step(runtime: CudaRuntime, batch: StepBatch, params: SamplingParams) -> None:
    runtime.forward(batch)
    runtime.wait(runtime.sample(_sampling(runtime, batch, params)))


def _sampling(runtime: CudaRuntime, batch: StepBatch, params: SamplingParams) -> SamplingBatch:
    return make_sampling_batch(
        [SamplingRow(params, [0], [], 0, 0, 0)] * batch.num_rows,
        sample_indices=batch.sample_indices,
        vocab_size=runtime.vocab_size,
    )


def _make_runtime(
    model: Model,
    weights: DecoderTensors,
    attention: Sequence[Attention],
    selections: Sequence[Selection],
    num_blocks: Sequence[int],
    *,
    graphs: bool,
) -> CudaRuntime:
    spec, config = model.spec, model.config
    max_model_len = config.max_model_len or spec.max_position
    return CudaRuntime(
        spec,
        weights,
        make_layers(spec, weights, model.groups, selections, num_blocks),
        attention,
        Limits(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            -(-max_model_len // config.block_size),
        ),
        max_model_len=max_model_len,
        graphs=graphs,
        fused=all(selection.few_rows == "fused" for selection in selections),
        deterministic=config.deterministic,
    )


def make_step(
    counts: Sequence[int],
    lengths: Sequence[int],
    block_size: int,
    num_blocks: int,
    groups: Sequence[KVGroup],
) -> StepBatch:
    """A step of the newest ``counts`` tokens of rows of these lengths; those of a single token in
    front decode. All rows share the first blocks, so what they compute is nothing."""
    positions = np.concatenate(
        [np.arange(n - count, n, dtype=np.int32) for count, n in zip(counts, lengths, strict=True)]
    )
    table = np.arange(-(-max(lengths) // block_size), dtype=np.int32) % num_blocks
    slots = table[positions // block_size] * block_size + positions % block_size
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    return StepBatch(
        input_ids=np.zeros(len(positions), np.int32),
        id_rows=np.full(len(positions), -1, np.int32),
        positions=positions,
        query_start_loc=starts,
        seq_lens=np.asarray(lengths, np.int32),
        num_decodes=sum(1 for _ in takewhile(lambda count: count == 1, counts)),
        slot_mapping=(slots.astype(np.int32),) * len(groups),
        block_table=(np.tile(table, (len(counts), 1)),) * len(groups),
        logits_indices=starts[1:] - np.int32(1),
        sample_indices=rows,
        sample_rows=rows,
    )
